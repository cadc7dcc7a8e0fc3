"""Efficiency read from measured kernels: near ones decide, laws hold, and prices take the best they know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cluster import cluster_named
from fourfold.graph.spec import TensorSpec
from fourfold.oracle.prices.efficiency import ARITHMETIC, efficiency_of, family_of, features, format_of, shipped_efficiency
from fourfold.oracle.prices.fitting import fit
from fourfold.oracle.prices.kernels import Kernel
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.oracle.time.estimate import estimate
from fourfold.oracle.time.gradient_fan_in import gradient_sums
from fourfold.oracle.time.stage import StagePrices
from fourfold.plans import LoweredPlan, lower_plan, named
from small import batch_of, graph_of

RATES = {"fp32": 1e12, "tf32": 8e12, "bf16": 16e12}
LIMITS = {"precision": "tf32", "rate": 494.5e12, "bandwidth": 4.8e12}


def stage_prices(made: LoweredPlan, prices: Prices) -> StagePrices:
    """Of the first stage."""
    return StagePrices(made.lists(prices.placement, prices.precision)[0, made.plan.sizes[0]], prices)


def matmul(rows: int, width: int = 256, *, dtype: str = "float32") -> Kernel:
    operands = (TensorSpec((rows, width), dtype), TensorSpec((width, width), dtype))
    return Kernel(target="aten.linear.default", way="linear", arguments="", operands=operands,
                  results=(TensorSpec((rows, width), dtype),), gradients=(True, True), flops=2.0 * rows * width**2)  # fmt: skip


def view(rows: int) -> Kernel:
    spec = TensorSpec((rows, 8), "float32")
    return Kernel(target="aten.transpose.int", way="plain", arguments="", operands=(spec,), results=(spec,),
                  gradients=(True,), flops=0.0)  # fmt: skip


def row(kernel: Kernel, forward: float, backward: float, host: tuple[float, float] = (1e-5, 4e-5)) -> dict[str, object]:
    return {"precision": "tf32", "target": kernel.target, "way": kernel.way, "arguments": "", "flops": kernel.flops,
            "operands": [[s.shape, s.dtype] for s in kernel.operands], "results": [[s.shape, s.dtype] for s in kernel.results],
            "gradients": kernel.gradients, "forward": forward, "backward": backward, "forward_host": host[0],
            "backward_host": host[1]}  # fmt: skip


def fitted(rows: list[dict[str, object]]) -> dict[str, dict[str, list[list[float]]]]:
    return fit([*rows, row(view(8), 1e-7, 1e-7, (5e-6, 2.5e-5))], rates=RATES, bandwidth=1e12)


def test_a_fit_gives_back_the_efficiency_it_was_made_from() -> None:
    kernels = [matmul(rows) for rows in (1 << 10, 1 << 14, 1 << 18)]
    data = fitted([row(k, k.flops / 8e12 / 0.5, k.backward_flops / 8e12 / 0.25) for k in kernels])
    assert [found[-1] for found in data["points"]["matmul/linear/tf32/forward"]] == pytest.approx([0.5] * 3, rel=1e-3)
    assert [found[-1] for found in data["points"]["matmul/linear/tf32/backward"]] == pytest.approx([0.25] * 3, rel=1e-3)


def test_kernels_of_one_shape_are_one_point() -> None:
    kernel = matmul(1 << 14)
    data = fitted([row(kernel, 1e-4, 2e-4), row(kernel, 4e-4, 2e-4)])
    assert len(data["points"]["matmul/linear/tf32/forward"]) == 1


def test_the_engine_around_a_measured_backward_is_taken_off_the_host() -> None:
    data = fitted([row(matmul(1 << 14), 1e-4, 2e-4, (2e-5, 9e-5))])
    assert data["host_seconds"]["linear/forward"] == pytest.approx(2e-5)
    assert data["host_seconds"]["linear/backward"] == pytest.approx(9e-5 - (2.5e-5 - 5e-6))


def test_near_kernels_decide_and_far_away_the_nearest_does() -> None:
    rows = [row(matmul(1 << n), matmul(1 << n).flops / 8e12 / e, 1.0) for n, e in ((10, 0.1), (14, 0.4))]
    known = efficiency_of("gpu", {"source": "", **fitted(rows)})
    found = [matmul(rows).flops / 8e12 / known.seconds(matmul(rows), "forward", precision="tf32", rate=8e12, bandwidth=1e15)
             for rows in (1 << 10, 1 << 12, 1 << 14, 1 << 20)]  # fmt: skip
    assert found == pytest.approx([0.1, 0.2, 0.4, 0.4], rel=0.05)


def test_no_shipped_kernel_computes_faster_than_the_device_can() -> None:
    known = shipped_efficiency("h200")
    assert known is not None and sum(map(len, known.points.values())) > 1000
    for (family, _), points in known.points.items():
        cores = [p for p in points if family in ARITHMETIC and p.number in ("tf32", "bf16")]  # fp32 has Winograd's convolutions
        assert all(point.efficiency <= 0 for point in cores)
    assert all(seconds > 0 for seconds in known.least.values())
    assert all(0 < seconds < 1e-2 for seconds in known.hosts.values())


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_more_bandwidth_or_a_higher_rate_never_hurts(way) -> None:
    known = shipped_efficiency("h200")
    assert known is not None
    for kernel in (matmul(64), matmul(1 << 16, 1024), view(64)):
        before = known.seconds(kernel, way, **LIMITS)
        assert known.seconds(kernel, way, **{**LIMITS, "rate": 1e15, "bandwidth": 9e12}) <= before
        assert known.seconds(kernel, way, **{**LIMITS, "rate": 1e12, "bandwidth": 1e11}) >= before


def test_an_op_nobody_measured_is_read_from_its_family() -> None:
    known, spec = shipped_efficiency("h200"), TensorSpec((64, 1 << 16), "float32")
    unheard = Kernel(target="aten.mish.default", way="plain", arguments="", operands=(spec,), results=(spec,),
                     gradients=(True,), flops=spec.numel)  # fmt: skip
    assert known is not None and family_of(unheard) == "pointwise"
    assert known.seconds(unheard, "forward", **LIMITS) == pytest.approx(2 * spec.bytes / 4.8e12, rel=1.0)


def test_number_formats_follow_operands_under_autocast() -> None:
    assert [format_of(matmul(8), precision) for precision in ("fp32", "tf32", "bf16")] == ["fp32", "tf32", "tf32"]
    assert format_of(matmul(8, dtype="bfloat16"), "bf16") == "bf16"
    assert features(matmul(8)) == features(matmul(8, dtype="bfloat16"))


@pytest.mark.parametrize(("cluster", "source"), [("dgx-h200", "fitted"), ("abci", "roofline")])
def test_prices_take_the_best_they_know(cluster: str, source: str) -> None:
    made = lower_plan(graph_of("vgg16-cifar"), named("data", graph_of("vgg16-cifar"), ranks=2, batch=batch_of("vgg16-cifar")))
    prices = Prices(cluster=cluster_named(cluster, devices=2))
    stage = stage_prices(made, prices)
    convolutions = [item for item in stage.forward() if "conv" in item.label and not item.is_blocking]
    assert {item.source for item in convolutions} == {source}


def test_a_measured_kernel_wins_over_a_fitted_one() -> None:
    made = lower_plan(graph_of("vgg16-cifar"), named("data", graph_of("vgg16-cifar"), ranks=2, batch=batch_of("vgg16-cifar")))
    cluster = cluster_named("dgx-h200", devices=2)
    stage = stage_prices(made, Prices(cluster=cluster))
    step = made.parts[0].program.computes()[0]
    key = stage.kernel(step, 0).key
    known = Prices(cluster=cluster, kernels={key: KernelTime(forward=0.5, backward=1.0)})
    assert known.kernel(stage.kernel(step, 0), 0).forward == 0.5


def test_a_step_takes_as_long_as_the_slower_of_host_and_device() -> None:
    graph = graph_of("vgg16-cifar")
    prices = Prices(cluster=cluster_named("dgx-h200", devices=1), precision="tf32")
    small, large = (estimate(lower_plan(graph, named("data", graph, ranks=1, batch=b)), prices) for b in (2, 1 << 14))
    asked = sum(item.host_seconds for found in small.items.values() for item in found)
    assert small.step_seconds == pytest.approx(asked) and small.breakdown["other"] > 0
    assert large.step_seconds > 5 * asked and large.breakdown["other"] == pytest.approx(0.0, abs=1e-9)
    assert sum(small.breakdown.values()) == pytest.approx(small.step_seconds)


def test_gradients_of_a_value_with_two_readers_are_added_once() -> None:
    graph = graph_of("gpt2")
    made = lower_plan(graph, named("data", graph, ranks=1, batch=batch_of("gpt2")))
    (program,) = made.parts[0].programs.values()
    sums = [name for name, _ in gradient_sums(program, program.mesh.coords(0), made.cut.live, {})]
    tied = next(p.name for p in graph.parameters if p.key == "tokens.weight")
    assert sums.count(tied) == 1
    readers = {name: sum(name in op.operands for op in graph.ops) for name in set(sums)}
    assert all(sums.count(name) == readers[name] - 1 for name in readers)
    known = Prices(cluster=cluster_named("dgx-h200", devices=1), precision="tf32")
    stage = stage_prices(made, known)
    assert sum(item.label.startswith("gradients of") for item in stage.backward()) == len(sums)
    replaced = replace(known, cluster=cluster_named("ethernet-1g", devices=1), precision="fp32")
    stage = stage_prices(made, replaced)
    assert not any(item.label.startswith("gradients of") for item in stage.backward())


def test_prices_take_the_efficiencies_they_are_given_before_those_shipped() -> None:
    kernel = matmul(1 << 14)
    known = efficiency_of("h200", {"source": "", **fitted([row(kernel, 0.5, 1.5)])})
    prices = Prices(cluster=cluster_named("dgx-h200", devices=1), precision="tf32")
    own = replace(prices, efficiencies={"h200": known})
    assert prices.kernel(kernel, 0).forward < 1e-3
    ratio = own.kernel(kernel, 0).backward / own.kernel(kernel, 0).forward
    assert own.kernel(kernel, 0).forward >= 0.5 and ratio == pytest.approx(3.0, rel=1e-3)
