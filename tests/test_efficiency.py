"""Efficiency curves: shipped ones are sane, and prices prefer what was measured to what was fitted to the roofline."""

from __future__ import annotations

import pytest

from fourfold.cluster import cluster_named
from fourfold.oracle.efficiency import Curve, fit, shipped
from fourfold.oracle.prices import KernelTime, Prices
from fourfold.oracle.stage import StagePrices
from fourfold.plans import named, pipeline
from small import batch_of, graph_of


def test_the_h200_curves_rise_and_stay_below_the_peak() -> None:
    curves = shipped("h200")
    assert curves is not None and len(curves.curves) > 40
    for curve in curves.curves.values():
        assert list(curve.efficiency) == sorted(curve.efficiency) and 0 < curve.efficiency[-1] <= 1.0
        assert list(curve.work) == sorted(curve.work)


def test_a_curve_is_read_between_and_beyond_its_points() -> None:
    curve = Curve((1e6, 1e8), (0.1, 0.4))
    assert curve.at(1e5) == 0.1 and curve.at(1e9) == 0.4
    assert curve.at(1e7) == pytest.approx(0.2)


def test_a_fit_gives_back_the_efficiency_it_was_made_from() -> None:
    rows = [{"precision": "fp32", "family": "matmul", "flops": w, "bytes": 1.0, "backward_flops": 2 * w, "backward_bytes": 1.0,
             "forward": max(1e-5, w / 1e12 / 0.5), "backward": max(2e-5, 2 * w / 1e12 / 0.25)}
            for w in (1e3, 1e4, 1e5, 1e9, 1e10, 1e11)]  # fmt: skip
    data = fit(rows, rates={"fp32": 1e12}, bandwidth=1e9)
    assert data["floor_seconds"]["matmul/forward"] == pytest.approx(1e-5)
    assert [e for _, e in data["curves"]["fp32/matmul/forward"]] == pytest.approx([0.5] * 3)
    assert [e for _, e in data["curves"]["fp32/matmul/backward"]] == pytest.approx([0.25] * 3)


@pytest.mark.parametrize(("cluster", "source"), [("dgx-h200", "fitted"), ("abci", "roofline")])
def test_prices_take_the_best_they_know(cluster: str, source: str) -> None:
    made = pipeline(graph_of("vgg16-cifar"), named("data", graph_of("vgg16-cifar"), ranks=2, batch=batch_of("vgg16-cifar")))
    prices = Prices(cluster=cluster_named(cluster, devices=2))
    stage = StagePrices(made.parts[0], made.plan.sizes[0], prices, made.cut.live, {})
    convolutions = [item for item in stage.forward() if "conv" in item.label and not item.meets]
    assert {item.source for item in convolutions} == {source}


def test_a_measured_kernel_wins_over_a_fitted_one() -> None:
    made = pipeline(graph_of("vgg16-cifar"), named("data", graph_of("vgg16-cifar"), ranks=2, batch=batch_of("vgg16-cifar")))
    cluster = cluster_named("dgx-h200", devices=2)
    stage = StagePrices(made.parts[0], made.plan.sizes[0], Prices(cluster=cluster), made.cut.live, {})
    step = made.parts[0].program.computes()[0]
    key = stage.kernel(step, 0).key
    known = Prices(cluster=cluster, kernels={key: KernelTime(forward=0.5, backward=1.0)})
    assert known.kernel(stage.kernel(step, 0), 0).forward == 0.5
