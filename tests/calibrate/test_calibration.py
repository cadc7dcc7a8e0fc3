"""Measurements that the oracle rests on: what is measured is complete, kept, read again, and what is left out is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.calibrate import calibration, measured_prices
from fourfold.calibrate.calibration import AT_ONCE, Progress, _Measurements, calibrated, drift, requests
from fourfold.calibrate.collectives import Effort, TimedCurve, measure_rates, time_collective, time_waits
from fourfold.calibrate.kernel_table import add_kernels, load_kernels
from fourfold.calibrate.kernels import (
    Rounds,
    Sample,
    _chain_length,
    _NormalisedTimes,
    _Times,
    arithmetic,
    samples,
    time_kernels,
    time_once,
)
from fourfold.calibrate.machine_speed import LEAST_EXPONENT, MOST_EXPONENT, load_pace, machine_name, save_pace, speed_exponent
from fourfold.calibrate.measured_prices import check_here, here, predict_on_ranks
from fourfold.calibrate.robust_stats import interquartile_mean, strays
from fourfold.cluster import Cluster, cluster_named, load_cluster, local, save_calibration, save_cluster
from fourfold.cluster.cache import calibration_file, kernels_file, pace_file
from fourfold.errors import InvalidInput
from fourfold.optimizers import OPTIMIZERS
from fourfold.oracle.predict import predict
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.plans import LoweredPlan, lower_plan, named
from fourfold.plans.lists.comm_batches import RING_BYTES
from fourfold.runtime.execution.precision import lower_for_precision
from fourfold.runtime.host.launch import LocalRanks
from ranks import pool
from small import graph_of


class QuickEffort(Effort):
    """Two rounds of all, and one more of what strays."""

    @property
    def most(self) -> int:
        return self.rounds + 1


QUICK = QuickEffort(sizes=(256.0, 65536.0), rounds=2)
SHARED = {"shared_gather", "shared_sum", "shared_fetch", "shared_give"}
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", *SHARED}


@pytest.fixture(scope="module")
def progress() -> list[Progress]:
    return list(calibrated(pool(2), name="here", effort=QUICK, kernels=some_kernels()))


def lowered(strategy: str) -> LoweredPlan:
    graph = graph_of("vgg16-cifar")
    return lower_plan(graph, named(strategy, graph, ranks=2, batch=4))


def some_kernels() -> list[Sample]:
    return list(samples(lowered("data"), {}).values())[: AT_ONCE + 1]


def test_a_calibration_grows_curve_by_curve_and_ends_with_every_collective_of_the_ranks(progress: list[Progress]) -> None:
    counts = [len(p.cluster.measured.curves) for p in progress]
    assert counts == sorted(counts) and progress[-1].done == progress[-1].of
    assert {curve.collective for curve in progress[-1].cluster.measured.curves} == KINDS
    assert all(p.next for p in progress[:-1]), "each says what it will do next"


def test_kernels_are_gone_through_in_the_rounds_of_a_calibration(progress: list[Progress]) -> None:
    wanted = [sample.kernel.key for sample in some_kernels()]
    begun = [k for k, p in enumerate(progress) if p.next == f"kernel 1 of {len(wanted)}"]
    assert len(begun) >= QUICK.rounds and progress[begun[0] + 1].next == f"kernel {AT_ONCE + 1} of {len(wanted)}"
    assert not progress[begun[0]].kernels and set(progress[begun[0] + 1].kernels) == set(wanted[:AT_ONCE])
    assert set(progress[begun[1]].kernels) == set(progress[-1].kernels) == set(wanted)
    assert all(time.forward > 0 for time in progress[-1].kernels.values())


def test_a_calibrated_cluster_reads_back_from_its_file_as_it_was(progress: list[Progress], tmp_path: Path) -> None:
    cluster = progress[-1].cluster
    save_cluster(cluster, tmp_path / "here.toml")
    again = load_cluster(tmp_path / "here.toml")
    assert again.measured == cluster.measured
    assert again.kinds[0].drift == cluster.kinds[0].drift > 0


def test_an_interrupted_calibration_leaves_what_it_has_and_that_can_be_planned_with(progress: list[Progress]) -> None:
    partial = progress[3].cluster
    assert 0 < len(partial.measured.curves) < len(progress[-1].cluster.measured.curves)
    assert predict(lowered("filter"), Prices(cluster=partial)).estimate.step_seconds > 0


def test_local_is_what_was_calibrated_once_it_was(progress: list[Progress]) -> None:
    assert not cluster_named("local", devices=2).measured.curves
    path = calibration_file(2)
    save_calibration(progress[-1].cluster, path)
    try:
        assert cluster_named("local", devices=2).measured == progress[-1].cluster.measured
        assert not cluster_named("local", devices=3).measured.curves, "three ranks are another matter"
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("before", "told"), [(0.0, 2.0), (0.9, 2.0), (0.96, 0.96), (1.0, 1.0), (3.0, 3.0), (3.1, 3.1), (4.0, 2.0)]
)
def test_a_calibration_is_told_at_the_pace_of_earlier_ones_unless_the_machine_has_changed(before: float, told: float) -> None:
    so_far = _Measurements(local(2), 2, before)
    so_far.paces += [1.0, 2.0, 3.0, 9.0]
    assert so_far.pace == told


def test_the_pace_is_kept_for_later_calibrations(progress: list[Progress]) -> None:
    assert load_pace() == progress[-1].cluster.kinds[0].pace > 0
    pace_file(machine_name()).write_text('{"seconds": "soon"}')
    assert load_pace() == 0.0, "a damaged file counts as missing"
    save_pace(progress[-1].cluster.kinds[0].pace)


def test_collectives_are_measured_again_until_the_middle_of_their_times_is_known() -> None:
    so_far = _Measurements(local(2), 2, 1.0)
    steady, straying = requests(["a", "a"])[:2]
    for k in range(6):
        so_far.next_round(1.0, [])
        so_far.add(steady, 1.0, TimedCurve(points=((10.0, 1.0), (20.0, 2.0)), computing=()))
        so_far.add(straying, 1.0, TimedCurve(points=((10.0, 1.0 + k), (20.0, 2.0), (30.0, 3.0 + k), (40.0, 4.0)), computing=()))
    assert so_far.uncertain() == [(straying, (10.0, 20.0, 30.0))]


@pytest.mark.parametrize(("level", "told"), [("loopback", 4.0**LEAST_EXPONENT), ("network", 1.0)])
def test_exchanges_within_a_host_are_told_at_the_pace_and_others_as_they_were(level: str, told: float) -> None:
    so_far = _Measurements(local(2), 2, 4.0)
    request = replace(requests(["a", "a"])[0], level=level)
    so_far.next_round(1.0, [])
    so_far.add(request, 1.0, TimedCurve(points=((10.0, 1.0),), computing=()))
    so_far.paces += [4.0, 4.0, 4.0]
    assert so_far._curve(request).seconds == pytest.approx((told,), rel=1e-3)


def test_groups_of_every_size_are_measured_alone_and_all_at_once() -> None:
    found = {(r.collective, len(r.groups[0]), len(r.groups)) for r in requests(["a"] * 4) if r.collective == "all_gather"}
    assert found == {("all_gather", 2, 2), ("all_gather", 2, 1), ("all_gather", 4, 1)}


def test_an_exchange_is_timed_after_ever_more_computing() -> None:
    (request,) = [r for r in requests(["a", "a"]) if r.collective == "all_gather"]
    rounds = [pool(2)(time_waits, replace(request, crowd=2.0)) for _ in range(3)]
    assert all(one == other for one, other in rounds), "the mean over both ranks"
    computing = [min(busy for busy, _ in stretch) for stretch in zip(*(one for one, _ in rounds), strict=True)]
    assert computing[1] > 2 * computing[0] and computing[2] > 2 * computing[1] > 0


def test_where_ranks_take_turns_waits_are_told_with_the_curves() -> None:
    so_far = _Measurements(local(4), 4, 1.0)
    request = requests(["a"] * 4)[0]
    so_far.next_round(1.0, [])
    so_far.add(request, 1.0, TimedCurve(points=((10.0, 1.0),), computing=()))
    for seconds in (2.0, 3.0, 4.0):
        so_far.add_waits(request, 1.0, [(1e-3, seconds), (1e-2, 2 * seconds)])
    waits = so_far._waits(request)
    assert (waits.ranks, waits.groups) == (len(request.groups[0]), len(request.groups))
    assert waits.computing == pytest.approx((1e-3, 1e-2)) and waits.seconds == pytest.approx((3.0, 6.0))


def test_what_there_is_no_common_memory_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_SOCKETS", "1")
    so_far = _Measurements(local(2), 2, 1.0)
    with LocalRanks(2) as ranks:
        so_far.next_round(1.0, ranks(measure_rates))
        for request in requests(["a", "a"]):
            if request.collective in (*SHARED, "all_gather"):
                so_far.add(request, 1.0, ranks(time_collective, request, (256.0, 1024.0))[0])
    (curve,) = so_far.cluster().measured.curves
    assert curve.collective == "all_gather" and curve.sizes == (256.0, 1024.0)


def test_the_latency_of_the_first_size_is_not_taken_for_a_slow_link() -> None:
    (send,) = [r for r in requests(["a", "a"]) if r.collective == "send"]
    sizes = (4.0, 2.0**20)  # at the bytes per second of the first, the second would take minutes
    assert [size for size, _ in pool(2)(time_collective, send, sizes)[0].points] == list(sizes)


@pytest.mark.parametrize(
    ("points", "bandwidth"), [([(10.0, 1.0)], 10.0), ([(10.0, 2.0), (20.0, 2.0)], 10.0), ([(10.0, 1.0), (20.0, 3.0)], 5.0)]
)
def test_a_link_has_a_bandwidth_whatever_its_sends_took(points: list[tuple[float, float]], bandwidth: float) -> None:
    so_far = _Measurements(local(2), 2, 1.0)
    (send,) = [r for r in requests(["a", "a"]) if r.collective == "send"]
    so_far.next_round(1.0, [dict.fromkeys(("rate", "bandwidth", "launch", *(f"update_{one}" for one in OPTIMIZERS)), 1.0)])
    so_far.add(send, 1.0, TimedCurve(points=tuple(points), computing=()))
    (link,) = [one for one in so_far.cluster().links if one.name == send.level]
    assert link.bandwidth == pytest.approx(bandwidth)


def test_between_hosts_nothing_goes_through_common_memory() -> None:
    found = requests(["a", "b"])
    assert {r.level for r in found} == {"network"}
    assert not [r for r in found if r.collective.startswith("shared")]


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "a", "b"]], ids=["uneven", "by turns"])
def test_hosts_with_unequal_or_mixed_ranks_are_refused(hosts: list[str]) -> None:
    with pytest.raises(InvalidInput, match="start as many on each"):
        calibration._described(hosts, "x")


def test_drift_is_nothing_on_a_machine_that_always_takes_as_long() -> None:
    assert drift([2.0] * 20) == 0.0
    assert drift([1.0] * 5 + [2.0] * 10 + [3.0] * 5) == pytest.approx(0.5)


# --- kernels ------------------------------------------------------------------------------------------------------------


def told(cluster: Cluster | None = None, strategy: str = "filter") -> Any:
    return predict_on_ranks(lowered(strategy), pool(2), cluster=cluster, precision="fp32", optimizer="sgd")


def test_a_foretold_step_rests_on_measured_kernels_which_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told()
    assert found.estimate.measured_share == 1.0
    low, high = found.estimate.interval
    assert 0 < low < found.estimate.step_seconds < high
    known = load_kernels(here(cluster_named("local", devices=2)).measured.kernels)
    assert not samples(lowered("filter"), {}, known), "all are in the table"
    assert all(time.busy >= 1.0 and time.forward > 0 for time in known.values())
    monkeypatch.setattr(measured_prices, "time_kernels", None)  # must not be needed again
    assert told().estimate.step_seconds == found.estimate.step_seconds


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_step_is_predicted_in_every_precision_of_processors(precision: Any) -> None:
    graph = graph_of("vgg16-cifar")
    plan = lower_for_precision(graph, named("data", graph, ranks=2, batch=4), precision=precision, device="cpu")
    found = predict_on_ranks(plan, pool(2), cluster=None, precision=precision, optimizer="sgd")
    assert found is not None and found.estimate.measured_share == 1.0


def test_kernels_told_at_another_pace_are_in_another_table() -> None:
    at = [here(replace(local(2), kinds=(replace(local(2).kinds[0], pace=pace),))) for pace in (0.0, 6.15e-3, 6.42e-3, 6.42e-3)]
    names = [cluster.measured.kernels for cluster in at]
    assert len(set(names)) == 3 and names[2] == names[3]


def test_kernels_are_told_at_the_pace_asked_for() -> None:
    wanted = some_kernels()[:3]
    powers = {sample.kernel.key: speed_exponent(arithmetic(sample.kernel)) for sample in wanted}
    now = time_kernels(pool(2), wanted, {}, Rounds(1, 1), 0.0)
    slow, slower = (time_kernels(pool(2), wanted, {}, Rounds(5, 9), pace) for pace in (10.0, 1000.0))  # one bad moment is none
    for key, time in now.items():
        assert time.forward < slow[key].forward
        assert 0.2 < slower[key].forward / slow[key].forward / 100 ** powers[key] < 5
    found = pool(2)(time_once, wanted, {}, False)
    assert len(found[0]) == len(wanted) and not found[1], "a host's first rank answers for it"
    assert all(one.single is None for one in found[0])


@pytest.mark.parametrize(("times", "again"), [
    ([1.0, 1.0, 1.0, 1.0, 9.0], False),  # one bad moment is none
    ([1.0, 1.05, 1.1, 1.15, 1.2], True),
    ([1.0, 1.05, 1.1, 1.15, 1.2] * 4, False),  # as far apart, but often enough
])  # fmt: skip
def test_kernels_are_timed_again_until_the_middle_of_their_times_is_known(times: list[float], again: bool) -> None:
    assert strays(times) is again


@pytest.mark.parametrize(("scale", "again"), [(1e-4, False), (1e-2, True)], ids=["short", "long"])
def test_long_kernels_must_be_known_better(scale: float, again: bool) -> None:
    times = [_Times(scale * forward, 0.0) for forward in (1.0, 1.02, 1.04, 1.06, 1.08, 1.1)]
    assert _NormalisedTimes(times, times).strays is again


def test_a_kernels_calm_moments_weigh_more() -> None:
    calm, loud = _Times(1.0, 2.0).at(1.0, 0.5), _Times(4.0, 8.0).at(0.25, 0.5)
    assert (loud.forward, loud.backward) == (2.0, 4.0), "told at the pace"
    told = _NormalisedTimes([calm, loud, loud], [calm, loud, loud]).kernel_time()
    assert (told.forward, told.backward, told.busy) == (1.0, 2.0, 1.0)


@pytest.mark.parametrize(("times", "weights", "found"), [
    ([3.0], [1.0], 3.0),
    ([2.0, 1.0], [1.0, 1.0], 1.5),
    ([1.0, 100.0, 2.0, 3.0], [1.0] * 4, 2.5),
    ([1.0, 2.0, 3.0, 4.0, 100.0], [1.0] * 5, 3.0),  # a quarter of the weight is more than the last alone
    ([1.0, 5.0], [3.0, 1.0], 1.0),
])  # fmt: skip
def test_the_middle_of_times_is_the_mean_of_their_middle_half(times: list[float], weights: list[float], found: float) -> None:
    assert interquartile_mean(times, weights) == pytest.approx(found)


def test_short_kernels_are_run_in_a_row_and_long_ones_by_themselves() -> None:
    short = min((sample.kernel for sample in samples(lowered("data"), {}).values()), key=lambda kernel: kernel.flops)
    links = [_chain_length(replace(short, flops=flops)) for flops in (0.0, 1e7, 1e8, 1e9)]
    assert links[0] > 1 >= links[-1] and links == sorted(links, reverse=True)


def test_the_more_arithmetic_a_kernel_has_the_more_it_feels_the_pace() -> None:
    short = min((sample.kernel for sample in samples(lowered("data"), {}).values()), key=lambda kernel: kernel.flops)
    powers = [speed_exponent(arithmetic(replace(short, flops=flops))) for flops in (0.0, 1e6, 1e7, 1e8, 1e10)]
    assert powers == sorted(powers)
    assert LEAST_EXPONENT <= powers[0] < 0.45 and 0.85 < powers[-1] <= MOST_EXPONENT


def test_a_cluster_that_is_not_where_the_ranks_run_is_refused() -> None:
    with pytest.raises(InvalidInput, match="of kind gpu"):
        check_here(cluster_named("abci", devices=2), 1)
    with pytest.raises(InvalidInput, match="on 1 nodes, these ranks run on 2 hosts"):
        check_here(local(2), 2)


def test_tables_of_kernels_are_added_to_and_keep_their_numbers() -> None:
    one = KernelTime(forward=1.2345e-3, backward=2.0e-3, busy=1.25, spread=0.1)
    add_kernels("some machine", {"a": one})
    add_kernels("some machine", {"b": KernelTime(forward=1.0, backward=0.0)})
    found = load_kernels("some machine")
    assert found["a"] == one and found["b"].forward == 1.0
    assert load_kernels("another") == {}


@pytest.mark.parametrize("text", ["", "[1]", "\x00", '{"kernels": {"a": [1]}}', '{"version": 1, "hash": "", "kernels": {}}'])
def test_a_damaged_table_of_kernels_counts_as_missing_and_is_measured_again(text: str) -> None:
    path = kernels_file("broken")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert load_kernels("broken") == {}
    add_kernels("broken", {"a": KernelTime(forward=1.0, backward=2.0)})
    assert load_kernels("broken")["a"].backward == 2.0


def test_a_table_of_kernels_with_one_number_changed_counts_as_missing() -> None:
    add_kernels("changed", {"a": KernelTime(forward=1.5, backward=2.0)})
    path = kernels_file("changed")
    path.write_text(path.read_text().replace("1.5", "1.4"))
    assert load_kernels("changed") == {}


def test_a_table_of_kernels_says_what_its_numbers_are() -> None:
    add_kernels("documented", {"a": KernelTime(forward=1.0, backward=2.0)})
    data = json.loads(kernels_file("documented").read_text())
    assert data["about"] == "documented" and "seconds" in data["unit"] and data["fields"][0] == "forward"


def test_gradients_larger_than_the_ring_are_timed_in_one_of_their_own_size() -> None:
    (request,) = [r for r in requests(["a", "a"]) if r.collective == "shared_give"]
    large = 1.5 * RING_BYTES
    for found in pool(2)(time_collective, request, (large,)):
        assert [size for size, _ in found.points] == [large]
