"""ParaDL's formulas: each row of its table written out once more, what they read of a graph, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cluster import cluster_named
from fourfold.errors import Infeasible, InvalidInput
from fourfold.oracle.paradl.formulas import Inputs, Wire, project
from fourfold.oracle.paradl.layers import Layer, layers_of
from fourfold.oracle.paradl.projection import inputs_of, project_named, projected
from fourfold.oracle.prices.prices import Prices
from fourfold.plans import Options, named
from small import graph_of

LAYERS = (
    Layer(path="a", forward=1.0, backward=2.0, update=0.3, weights=10, inputs=5.0, outputs=6.0, halo_inputs=1.0,
          halo_outputs=2.0, filters=16, channels=3, places=64),
    Layer(path="relu", forward=0.1, backward=0.1, inputs=6.0, outputs=6.0),
    Layer(path="b", forward=2.0, backward=3.0, update=0.6, weights=20, inputs=6.0, outputs=7.0, filters=8, channels=16),
)  # fmt: skip
K, U, W, A, Y, DELTA = 8.2, 0.9, 30, 36.0, (6.0, 7.0), 4
B, D = 32, 3200
ALPHA, BETA = 0.5, 0.01
NEAR, FAR = Wire(0.1, 0.001), Wire(ALPHA, BETA)


def given(p1: int, p2: int) -> Inputs:
    return Inputs(layers=LAYERS, batch=B, p1=p1, p2=p2, whole=FAR, data=FAR, model=FAR)


def test_serial_does_everything_alone() -> None:
    found = project("serial", given(1, 1))
    assert found.epoch_seconds(D) == pytest.approx(D * K + D / B * U)
    assert found.communication_seconds == 0
    assert found.memory_bytes == pytest.approx(2 * DELTA * (B * A + W))
    assert found.limit == 1 and found.feasible


def test_the_row_data() -> None:
    p, found = 8, project("data", given(8, 1))
    steps = D / B
    assert found.compute_seconds * steps == pytest.approx(D * K / p + steps * U)
    assert found.communication_seconds * steps == pytest.approx(2 * steps * (p - 1) * (ALPHA + W * DELTA * BETA / p))
    assert found.memory_bytes == pytest.approx(2 * DELTA * (B * A / p + W))
    assert (found.limit, found.limited_by) == (B, "the batch")


@pytest.mark.parametrize(("strategy", "limit", "layer"), [("filter", 8, "b"), ("channel", 16, "b")])
def test_the_rows_filter_and_channel(strategy: str, limit: int, layer: str) -> None:
    p, found = 4, project(strategy, given(1, 4))
    steps = D / B
    assert found.compute_seconds * steps == pytest.approx(D * K / p + D / (B * p) * U)
    exchanged = 3 * steps * (p - 1) * sum(ALPHA + B * y * DELTA * BETA / p for y in Y)
    assert found.communication_seconds * steps == pytest.approx(exchanged)
    assert found.memory_bytes == pytest.approx(2 * DELTA * (B * A + W / p))
    assert (found.limit, found.limited_by) == (limit, layer), "the first layer's 3 channels are left out"


def test_the_row_data_filter_uses_near_links_inside_and_far_ones_between() -> None:
    p1, p2, steps = 4, 2, D / B
    p = p1 * p2
    found = project("data+filter", replace(given(p1, p2), model=NEAR))
    assert found.compute_seconds * steps == pytest.approx(D * K / p + D / (B * p2) * U)
    inside = 3 * steps * (p2 - 1) * sum(NEAR.alpha + B * y * DELTA * NEAR.beta / p for y in Y)
    between = 2 * steps * (p1 - 1) * (ALPHA + W * DELTA * BETA / p)
    assert found.communication_seconds * steps == pytest.approx(inside + between)
    assert found.breakdown["gradient_exchange"] * steps == pytest.approx(between)
    assert found.memory_bytes == pytest.approx(2 * DELTA * (B * A / p1 + W / p2))
    assert found.limit == B * 8


def test_the_row_spatial_is_datas_and_its_halos() -> None:
    p, steps = 4, D / B
    found, data = project("spatial", given(1, p)), project("data", given(p, 1))
    halos = 2 * steps * (2 * ALPHA + B * (1.0 + 2.0) * DELTA * BETA)
    assert found.communication_seconds * steps == pytest.approx(data.communication_seconds * steps + halos)
    assert found.compute_seconds == pytest.approx(data.compute_seconds)
    assert found.memory_bytes == pytest.approx(data.memory_bytes)
    assert (found.limit, found.limited_by) == (64, "a")


def test_data_spatial_sends_a_groups_share_of_halos() -> None:
    found = project("data+spatial", replace(given(4, 2), model=NEAR))
    assert found.breakdown["halo"] == pytest.approx(2 * (2 * NEAR.alpha + B / 4 * 3.0 * DELTA * NEAR.beta))
    assert found.breakdown["gradient_exchange"] == pytest.approx(2 * 7 * (ALPHA + W * DELTA * BETA / 8))


def test_the_row_pipeline() -> None:
    p, s, steps = 2, 8, D / B
    stages = replace(given(1, 1), segments=s, groups=(LAYERS[:2], LAYERS[2:]))
    found = project("pipeline", stages)
    assert found.compute_seconds * steps == pytest.approx(D * (p + s - 1) / s * (2.0 + 3.0) + steps * 0.6)
    assert found.communication_seconds * steps == pytest.approx(2 * D * (p + s - 2) / B * (ALPHA + B / s * 6 * DELTA * BETA))
    assert found.memory_bytes == pytest.approx(2 * DELTA * max(B * 23.0 + 10, B * 13.0 + 20))
    assert found.limit == 3 and found.devices == 2


def test_a_device_too_small_or_too_many_devices_are_not_feasible() -> None:
    assert not project("data", given(64, 1)).feasible
    assert not project("data", given(2, 1), capacity=100.0).feasible


def prices(devices: int) -> Prices:
    return Prices(cluster=cluster_named("abci", devices=devices))


def test_a_graphs_layers_have_its_weights_outputs_and_halos() -> None:
    graph = graph_of("vgg16-cifar")
    found = {layer.path: layer for layer in layers_of(graph, 8, prices(1), optimizer="sgd")}
    assert sum(layer.weights for layer in found.values()) == sum(
        graph.values[p.name].numel for p in graph.parameters if p.trainable
    )
    conv = found["features.2.conv2d_1"]
    assert (conv.inputs, conv.outputs) == (8 * 32 * 32, 8 * 32 * 32)
    assert (conv.halo_inputs, conv.halo_outputs) == (8 * 32, 8 * 32), "one row of eight channels: a 3 x 3 window"
    assert (conv.filters, conv.channels, conv.places, conv.split) == (8, 8, 32 * 32, True)
    pool = found["features.4.max_pool2d"]
    assert not pool.split and pool.halo_inputs == 0, "windows of 2 with stride 2"
    assert "flatten" not in found, "a view is no layer"


def test_groups_that_share_adapters_share_their_bandwidth() -> None:
    graph = graph_of("vgg16-cifar")
    found = inputs_of(graph, named("data+filter:model=4", graph, ranks=8, batch=32), prices(8))
    assert (found.p1, found.p2) == (2, 4)
    assert found.model.beta == pytest.approx(1 / 50e9), "NVLink within a node"
    assert found.data.beta == pytest.approx(2 / 12.5e9), "four groups on two adapters"
    assert found.whole.beta == pytest.approx(1 / 12.5e9), "one group"


@pytest.mark.parametrize("strategy", ["data", "filter", "channel", "spatial", "data+filter", "data+spatial", "pipeline"])
def test_every_strategy_of_the_table_is_projected(strategy: str) -> None:
    found = project_named(graph_of("vgg16-cifar"), strategy, devices=4, batch=8, prices=prices(4))
    assert found.devices == 4 and found.step_seconds > 0
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert found.epoch_seconds(8) == pytest.approx(found.step_seconds)


def test_what_the_formulas_do_not_know_is_refused() -> None:
    graph = graph_of("vgg16-cifar")
    cases: list[tuple[str, Options | None, str]] = [
        ("splitbrain", None, "no strategy 'splitbrain'"),
        ("data", Options(zero=1), "no ZeRO"),
        ("data", Options(stages=2), "no stages or micro-batches under data"),
        ("pipeline:stages=2", None, "pipeline of 2 stages on 4 devices"),
    ]
    for strategy, options, words in cases:
        plan = named(strategy, graph, ranks=4, batch=8, options=options)
        with pytest.raises(InvalidInput, match=words):
            projected(graph, plan, prices(4))
    with pytest.raises(Infeasible, match="needs 4 devices, cluster 'abci' has 2"):
        project_named(graph, "data", devices=4, batch=8, prices=prices(2))
