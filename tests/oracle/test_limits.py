"""Limits and bottlenecks: each finding of ParaDL's list appears where it must, with the right numbers, and only there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fourfold.cluster import COLLECTIVES, Cluster, Curve, Measured, Waits, cluster_named, local
from fourfold.oracle.findings.finding import Finding
from fourfold.oracle.findings.limits import reserved
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.kernels import kernel_of
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.plans import LoweredPlan, Options, lower_plan, named
from small import graph_of

MODEL = "vgg16-cifar"
FLOAT = 4
MIB = 2**20


@cache
def lowered(strategy: str, ranks: int, batch: int, options: Options | None = None) -> LoweredPlan:
    graph = graph_of(MODEL)
    return lower_plan(graph, named(strategy, graph, ranks=ranks, batch=batch, options=options))


@cache
def machine(ranks: int, *, bandwidth: float = 1.0, latency: float = 1.0, memory: float = 0.0) -> Cluster:
    """ABCI with its links' bandwidth and latency multiplied, its devices' memory set."""
    cluster = cluster_named("abci", devices=ranks)
    links = tuple(replace(k, bandwidth=k.bandwidth * bandwidth, latency=k.latency * latency) for k in cluster.links)
    kinds = tuple(replace(kind, memory=memory or kind.memory) for kind in cluster.kinds)
    return replace(cluster, links=links, kinds=kinds)


def predicted(made: LoweredPlan, cluster: Cluster | None = None, optimizer: str = "sgd", **tables: Any) -> Prediction:
    return predict(made, Prices(cluster=cluster or machine(made.plan.size), **tables), optimizer=optimizer)


def named_in(prediction: Prediction) -> dict[str, Finding]:
    return {finding.name: finding for finding in prediction.findings}


def weight_bytes() -> int:
    graph = graph_of(MODEL)
    return sum(graph.values[p.name].bytes for p in graph.parameters if p.trainable)


def test_gradient_exchange_is_named_on_slow_links_and_not_on_fast_ones() -> None:
    made = lowered("data", 4, 32)
    slow = predicted(made, machine(4, bandwidth=0.001))
    found = named_in(slow)["gradient-exchange"]
    assert found.kind == "bottleneck"
    assert found.numbers["bytes"] == pytest.approx(weight_bytes())
    assert found.numbers["seconds"] == pytest.approx(slow.estimate.breakdown["gradient_exchange"])
    assert found.numbers["share"] == pytest.approx(found.numbers["seconds"] / slow.estimate.step_seconds)
    most = 64 * 64 * 3 * 3 * FLOAT
    ring = 2 * 3 * (20e-6 + weight_bytes() / 4 / (50e9 * 0.001))
    assert found.numbers["layer_bytes"] == pytest.approx(most)
    assert found.numbers["layer_seconds"] == pytest.approx(ring * most / weight_bytes(), rel=0.01), "its share of the ring"
    assert found.where == "features.19.weight" and "features.19.weight" in found.text, "the largest: 64 x 64 x 3 x 3"
    assert "gradient-exchange" not in named_in(predicted(made, machine(4, bandwidth=1e6, latency=0.0)))


def test_layer_exchange_is_named_for_filter_and_not_for_data() -> None:
    slow = machine(4, bandwidth=0.01)
    found = named_in(predicted(lowered("filter", 4, 32), slow))["layer-exchange"]
    assert found.numbers["share"] > 0.5
    assert found.where == "features.1.relu_", "the largest activations are gathered there"
    assert found.numbers["layer_bytes"] == pytest.approx(2 * 32 * 8 * 32 * 32 * FLOAT / 4), "a fourth of them, both ways"
    assert "layer-exchange" not in named_in(predicted(lowered("data", 4, 32), slow))


def test_halos_are_named_for_spatial_and_not_when_links_are_fast() -> None:
    made = lowered("spatial", 4, 8)
    found = named_in(predicted(made, machine(4, latency=50.0)))["halo-exchange"]
    assert found.kind == "bottleneck" and found.numbers["share"] > 0.1
    assert found.where == "features.1.relu_"
    border = 2 * 8 * 8 * 32 * FLOAT  # a rank in the middle sends a row up and one down, 8 examples of 8 channels
    assert found.numbers["layer_bytes"] == pytest.approx(2 * border), "values forward, gradients backward"
    assert "halo-exchange" not in named_in(predicted(made, machine(4, bandwidth=1e6, latency=0.0)))
    assert "halo-exchange" not in named_in(predicted(lowered("data", 4, 8), machine(4, latency=50.0)))


def test_groups_that_share_adapters_are_congested_and_one_group_is_not() -> None:
    """Four all-reduces between nodes, one for each GPU of a node, on two adapters a node: each gets half a link."""
    slow = machine(8, bandwidth=0.001, latency=0.0)
    prediction = predicted(lowered("data+filter:model=4", 8, 32), slow)
    found = named_in(prediction)["network-congestion"]
    assert found.where == "axis data"
    assert found.numbers["groups"] == 4
    assert found.numbers["factor"] == pytest.approx(2.0)
    exchanged = prediction.estimate.breakdown["gradient_exchange"]
    assert found.numbers["seconds"] == pytest.approx(exchanged / 2, rel=0.01), "half of what they take is lost"
    assert "network-congestion" not in named_in(predicted(lowered("data", 8, 32), slow))


def waiting(cluster: Cluster, ranks: int, *, waits: bool = True) -> Cluster:
    """All collectives take the same time, alone or not, and far longer after a millisecond of computing."""
    level, groups = cluster.links[-1].name, (1, 2)
    curves = [Curve(collective=kind, level=level, ranks=ranks, groups=n, sizes=(1e2, 1e9), seconds=(1e-4, 1e-3))
              for kind in COLLECTIVES for n in groups]  # fmt: skip
    late = [Waits(level=level, ranks=ranks, groups=n, computing=(1e-6, 1e-3), seconds=(1e-4, 1e-1)) for n in groups]
    return replace(cluster, measured=Measured(curves=tuple(curves), waits=tuple(late) if waits else ()))


def test_ranks_that_come_late_to_an_exchange_are_no_congestion() -> None:
    made = lowered("data+filter:model=2", 4, 32)
    late, plain = (predicted(made, waiting(local(4), 2, waits=waits)) for waits in (True, False))
    assert late.estimate.step_seconds > 2 * plain.estimate.step_seconds
    assert "network-congestion" not in named_in(late)


@pytest.mark.parametrize(("place", "messages"), [("local", False), ("ethernet-1g", True)])
def test_small_sums_come_late_where_they_are_messages(place: str, messages: bool) -> None:
    graph = graph_of("resnet50")
    made = lower_plan(graph, named("data", graph, ranks=2, batch=4))
    cluster = cluster_named(place, devices=2)
    late, plain = (predicted(made, waiting(cluster, 2, waits=waits)).estimate.step_seconds for waits in (True, False))
    assert late > 2 * plain if messages else late == plain


def test_memory_redundancy_counts_what_replicas_repeat_and_sharding_removes_it() -> None:
    prediction = predicted(lowered("data", 8, 8), optimizer="adamw")
    found = named_in(prediction)["memory-redundancy"]
    assert found.kind == "limit"
    repeated = weight_bytes() * 7 / 8
    assert found.numbers["weights_bytes"] == pytest.approx(repeated)
    assert found.numbers["gradients_bytes"] == pytest.approx(repeated)
    assert found.numbers["optimizer_bytes"] == pytest.approx(2 * repeated), "two moments"
    assert found.numbers["activations_bytes"] == 0
    assert "zero" in found.text
    assert "memory-redundancy" not in named_in(predicted(lowered("fsdp", 8, 8), optimizer="adamw"))


def test_double_precision_repeats_twice_the_bytes() -> None:
    made = lowered("filter", 4, 32)
    single, double = (
        named_in(predicted(made, precision=precision))["memory-redundancy"].numbers for precision in ("fp32", "fp64")
    )
    for kind in ("weights", "gradients", "activations"):
        assert double[f"{kind}_bytes"] == pytest.approx(2 * single[f"{kind}_bytes"])


def test_filter_repeats_activations() -> None:
    found = named_in(predicted(lowered("filter", 4, 32)))["memory-redundancy"]
    assert found.numbers["activations_bytes"] > 100 * found.numbers["weights_bytes"]
    assert "batch or domain" in found.text


def test_segments_are_packed_as_the_allocator_packs_them() -> None:
    assert reserved([1]) == 2 * MIB
    assert reserved([600] * 2048) == 2 * MIB, "two blocks of 512 bytes each"
    assert reserved([MIB + 1, 9 * MIB]) == 20 * MIB
    assert reserved([10 * MIB + 1, 12 * MIB]) == 24 * MIB


def test_fragmentation_is_named_where_segments_are_mostly_empty_or_memory_is_tight() -> None:
    small = predicted(lowered("fsdp", 8, 8))
    assert named_in(small)["fragmentation"].numbers["bytes"] >= 0.05 * small.memory.heaviest.tensors
    wide = predicted(lowered("data", 1, 8192))
    assert "fragmentation" not in named_in(wide)
    tight = predicted(lowered("data", 1, 8192), machine(1, memory=wide.peak_bytes + 1000.0))
    assert tight.feasible and named_in(tight)["fragmentation"].numbers["bytes"] > 1000


def test_a_processor_has_no_segments() -> None:
    made = lowered("fsdp", 8, 8)
    assert "fragmentation" not in named_in(predicted(made, cluster_named("ethernet-10g", devices=8)))


def test_a_slow_update_is_named() -> None:
    made = lowered("data", 1, 8)
    cluster = machine(1)
    slow = replace(cluster, kinds=tuple(replace(kind, updates=(("adamw", 1e8),)) for kind in cluster.kinds))
    found = named_in(predicted(made, slow, optimizer="adamw"))["weight-update"]
    assert found.numbers["seconds"] == pytest.approx(weight_bytes() / 1e8)
    assert found.numbers["share"] == pytest.approx(found.numbers["seconds"] / found.numbers["compute_seconds"])
    assert "weight-update" not in named_in(predicted(made, slow, optimizer="sgd"))


def staged(first: str) -> LoweredPlan:
    """Two stages, the second from an op on."""
    plan = named("pipeline", graph_of(MODEL), ranks=2, batch=32, options=Options(stages=2, microbatches=8))
    opening, second = plan.stages
    return lower_plan(graph_of(MODEL), replace(plan, stages=(opening, replace(second, first=first))))


def test_the_slowest_stage_is_named_and_even_stages_are_not() -> None:
    prediction = predicted(staged("classifier.0.linear"), machine(2, bandwidth=1e6, latency=0.0))
    found = named_in(prediction)["workload-imbalance"]
    times = [stage["forward"] + stage["backward"] for stage in prediction.estimate.stages]
    assert found.where == "stage 0"
    assert found.numbers["factor"] == pytest.approx(max(times) / (sum(times) / 2))
    assert found.numbers["factor"] > 1.5
    assert "workload-imbalance" not in named_in(predicted(staged("features.20.relu__8"))), "half the launches on either side"


def test_the_bubble_shrinks_with_micro_batches() -> None:
    fast = machine(4, bandwidth=1e6, latency=0.0)
    few = predicted(lowered("pipeline", 4, 128, Options(stages=4, microbatches=2)), fast)
    found = named_in(few)["pipeline-bubble"]
    assert found.numbers["even_share"] == pytest.approx(3 / 5)
    assert found.numbers["seconds"] == pytest.approx(few.estimate.breakdown["pipeline"])
    many = predicted(lowered("pipeline", 4, 128, Options(stages=4, microbatches=8)), fast)
    assert named_in(many)["pipeline-bubble"].numbers["even_share"] == pytest.approx(3 / 11)
    assert named_in(many)["pipeline-bubble"].numbers["share"] < found.numbers["share"]
    assert "pipeline-bubble" not in named_in(predicted(lowered("data", 4, 128), fast))


def test_split_kernels_that_do_not_shrink_are_named() -> None:
    """By measured kernels: a filter split over 4 ranks that takes half the whole kernel's time does twice the work."""
    made, whole = lowered("filter", 4, 32), lowered("data", 1, 32)
    table = {**measured(whole, 1.0), **measured(made, 0.5)}
    found = named_in(predicted(made, kernels=table))["compute-redundancy"]
    assert found.numbers["factor"] == pytest.approx(2.0)
    assert found.numbers["layer_factor"] == pytest.approx(2.0)
    ideal = {**measured(whole, 1.0), **measured(made, 0.25)}
    assert "compute-redundancy" not in named_in(predicted(made, kernels=ideal))


def measured(made: LoweredPlan, seconds: float) -> dict[str, KernelTime]:
    """A table in which every kernel of a plan takes as long."""
    program, live = made.parts[0].program, dict.fromkeys(made.cut.live, True)
    kernels = [kernel_of(step, program.graph, program.mesh.coords(0), live) for step in program.computes()]
    return {k.key: KernelTime(forward=seconds, backward=seconds if any(k.gradients) else 0.0) for k in kernels}


def test_a_measured_kernel_is_not_compared_with_one_that_is_not() -> None:
    made = lowered("filter", 2, 4096)
    assert "compute-redundancy" not in named_in(predicted(made, kernels=measured(made, 10.0)))


def test_ops_that_every_rank_does_are_named() -> None:
    graph = graph_of(MODEL)
    plan = named("filter", graph, ranks=4, batch=32)
    splits = (*plan.splits, ("features.2.conv2d_1", {"model": "replicate"}))
    made = lower_plan(graph, replace(plan, splits=splits))
    table = {**measured(lowered("data", 1, 32), 4.0), **measured(made, 1.0)}
    step = next(s for s in made.computes() if s.op.path == "features.2.conv2d_1")
    key = kernel_of(step, made.parts[0].program.graph, {"model": 0}, dict.fromkeys(made.cut.live, True)).key
    found = named_in(predicted(made, kernels={**table, key: KernelTime(forward=100.0, backward=200.0)}))["replicated-compute"]
    assert found.where == "features.2.conv2d_1" and found.numbers["copies"] == 4
    assert found.numbers["seconds"] >= 300 * 3 / 4
    assert "replicated-compute" not in named_in(predicted(lowered("data", 4, 32)))


def test_the_layer_that_stops_a_split_is_named() -> None:
    found = named_in(predicted(lowered("filter", 8, 32)))["scaling-limit"]
    assert found.where == "features.0.conv2d" and dict(found.numbers) == {"limit": 8, "ranks": 8}
    assert "scaling-limit" not in named_in(predicted(lowered("filter", 4, 32)))


def test_a_batch_bounds_data_parallelism() -> None:
    found = named_in(predicted(lowered("data", 8, 8)))["scaling-limit"]
    assert dict(found.numbers) == {"limit": 8, "ranks": 8} and "larger batch" in found.text
    assert "scaling-limit" not in named_in(predicted(lowered("data", 8, 16)))


def test_rows_bound_a_spatial_split() -> None:
    prediction = predicted(lowered("spatial", 4, 8))
    (rows,) = [f for f in prediction.findings if f.name == "scaling-limit" and "domain:0" in f.text]
    assert dict(rows.numbers) == {"limit": 2, "ranks": 4} and rows.where.startswith("features.24"), "two rows of 2 x 2"


def test_memory_past_the_device_is_a_limit_with_its_stage() -> None:
    made = lowered("pipeline", 2, 64, Options(stages=2, microbatches=2))
    roomy = predicted(made)
    assert roomy.feasible and "memory-capacity" not in named_in(roomy)
    sizes = [roomy.memory.of(rank).bytes for rank in (0, 1)]
    heavy, holds = sizes.index(max(sizes)), (sizes[0] + sizes[1]) / 2
    prediction = predicted(made, machine(2, memory=holds))
    found = [f for f in prediction.findings if f.name == "memory-capacity"]
    assert not prediction.feasible and [f.where for f in found] == [f"stage {heavy}"]
    assert found[0].numbers["over_bytes"] == pytest.approx(sizes[heavy] - holds)
    assert prediction.findings[0] is found[0], "what makes a plan infeasible comes first"


def test_one_device_with_room_has_no_findings() -> None:
    assert not predicted(lowered("data", 1, 8192)).findings


def test_findings_read_nothing_twice_and_are_the_same_each_time() -> None:
    first, second = (predicted(lowered("data+filter", 4, 32), machine(4, bandwidth=0.01)) for _ in range(2))
    assert first.findings == second.findings and first.findings is first.findings
    assert all(math.isfinite(value) for finding in first.findings for value in finding.numbers.values())
