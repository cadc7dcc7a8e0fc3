"""Times of collectives: laws, the oracle paper's formulas, sharing of links, measured curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cluster import Cluster, Collective, Curve, Link, Measured, Waits, preset
from fourfold.oracle.prices.collectives import FORMULAS, collective_cost, measured_cost, neighbour_time, waiting
from fourfold.oracle.prices.curves import reading, rising
from fourfold.oracle.prices.traffic import ALONE, Channel, Groups, traffic

MB = 1e6
ABCI, DGX = preset("abci"), preset("dgx-h100")


def strided(count: int, groups: int) -> list[range]:
    """So many ranks in so many groups, each with every groups-th rank."""
    return [range(first, count, groups) for first in range(groups)]


def blocks(count: int, size: int) -> list[range]:
    return [range(first, first + size) for first in range(0, count, size)]


def seconds(cluster: Cluster, groups: Groups, collective: Collective, size: float) -> float:
    return collective_cost(cluster, traffic(cluster, groups), collective, size).seconds


def only(cluster: Cluster, groups: Groups) -> Channel:
    (channel,) = traffic(cluster, groups).channels
    return channel


def with_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    return replace(cluster, links=tuple(change(link) for link in cluster.links))


collectives = st.sampled_from(sorted(FORMULAS))
sizes = st.floats(1, 1e10)
layouts = st.sampled_from(
    [
        [range(2)],
        [range(4)],
        [range(3, 9)],
        [range(100)],
        blocks(64, 4),
        blocks(96, 6),
        strided(64, 4),
        strided(136, 2),
        [(0, 70), (1, 71)],
    ]
)


@given(collectives, st.floats(0, 1e10))
def test_one_rank_costs_nothing(collective: Collective, size: float) -> None:
    assert only(ABCI, [[3]]) == ALONE
    assert seconds(ABCI, [[3]], collective, size) == FORMULAS[collective](ALONE, size) == 0
    assert neighbour_time(ALONE, size, neighbours=2) == 0


@given(collectives, layouts, sizes, st.floats(1, 10))
def test_more_bytes_never_take_less_time(collective: Collective, groups: Groups, size: float, factor: float) -> None:
    assert seconds(ABCI, groups, collective, size) <= seconds(ABCI, groups, collective, size * factor)


@given(collectives, layouts, sizes, st.floats(1, 10), st.integers(0, 2))
def test_more_bandwidth_is_never_slower(collective: Collective, groups: Groups, size: float, factor: float, level: int) -> None:
    name = ABCI.links[level].name
    wider = with_links(ABCI, lambda link: replace(link, bandwidth=link.bandwidth * (factor if link.name == name else 1)))
    assert seconds(wider, groups, collective, size) <= seconds(ABCI, groups, collective, size)


@given(collectives, layouts, sizes, st.floats(0, 1))
def test_less_latency_is_never_slower(collective: Collective, groups: Groups, size: float, factor: float) -> None:
    quicker = with_links(ABCI, lambda link: replace(link, latency=link.latency * factor))
    assert seconds(quicker, groups, collective, size) <= seconds(ABCI, groups, collective, size)


@given(collectives, layouts, sizes, st.integers(1, 8), st.floats(1, 4))
def test_sharing_and_oversubscription_never_help(
    collective: Collective, groups: Groups, size: float, more: int, over: float
) -> None:
    def busier(link: Link) -> Link:
        return replace(link, shared_by=link.shared_by * more, oversubscription=link.oversubscription * over)

    slower = seconds(with_links(ABCI, busier), groups, collective, size)
    assert slower >= seconds(ABCI, groups, collective, size) * (1 - 1e-12)


@given(collectives, st.integers(1, 8), st.integers(1, 8), sizes)
def test_other_groups_never_help(collective: Collective, few: int, more: int, size: float) -> None:
    groups = strided(64, 8)
    alone, together = groups[:few], groups[: max(few, more)]
    assert seconds(ABCI, alone, collective, size) <= seconds(ABCI, together, collective, size) * (1 + 1e-12)


def test_inside_a_node_the_formulas_are_the_papers() -> None:
    alpha, beta, p, m = 20e-6, 1 / 50e9, 4, 100 * MB
    assert seconds(ABCI, [range(4)], "all_reduce", m) == pytest.approx(2 * (p - 1) * (alpha + m * beta / p))
    assert seconds(ABCI, [range(4)], "all_gather", m) == pytest.approx((p - 1) * (alpha + m * beta))
    assert seconds(ABCI, [range(4)], "reduce_scatter", m) == pytest.approx((p - 1) * (alpha + m * beta))
    assert seconds(ABCI, [range(4)], "all_to_all", m) == pytest.approx((p - 1) * alpha + m * beta)
    assert seconds(ABCI, [range(4)], "broadcast", m) == pytest.approx(2 * (alpha + m * beta))
    assert seconds(ABCI, [(0, 1)], "send", m) == pytest.approx(alpha + m * beta)
    assert neighbour_time(only(ABCI, [range(4)]), m, neighbours=2) == pytest.approx(2 * alpha + m * beta)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    groups, m = strided(64, 4), 8 * MB
    halves = seconds(ABCI, groups, "reduce_scatter", m / 16) + seconds(ABCI, groups, "all_gather", m / 16)
    assert seconds(ABCI, groups, "all_reduce", m) == pytest.approx(halves)


def test_four_groups_of_a_node_share_its_two_adapters() -> None:
    alone, together = only(ABCI, strided(16, 4)[:1]), only(ABCI, strided(16, 4))
    assert alone.ring == pytest.approx(1 / 12.5e9)
    assert together.ring == pytest.approx(2 / 12.5e9)  # the paper's contention factor of 2


def test_a_ring_through_whole_nodes_uses_all_their_adapters() -> None:
    assert only(ABCI, [range(16)]).ring == pytest.approx(1 / 25e9)
    assert only(DGX, [range(16)]).ring == pytest.approx(1 / 400e9)  # eight adapters of 50 GB/s; NVSwitch has 450


def test_the_narrowest_level_decides_a_ring() -> None:
    slow_inside = with_links(ABCI, lambda link: replace(link, bandwidth=1e9) if link.name == "nvlink" else link)
    assert only(slow_inside, [range(16)]).ring == pytest.approx(1e-9)
    assert only(slow_inside, [range(0, 16, 4)]).ring == pytest.approx(1 / 12.5e9)  # one rank a node: no NVLink


def test_one_port_a_node_is_shared_by_its_ranks() -> None:
    ethernet = preset("ethernet-25g-gpu")
    pairs = [(rank, rank + 8) for rank in range(8)]
    assert only(ethernet, pairs).border == pytest.approx(8 * only(ethernet, pairs[:1]).border)


def test_oversubscription_bites_when_a_rack_sends_more_than_its_uplinks_carry() -> None:
    pairs = [(rank, rank + 68) for rank in range(68)]
    assert only(ABCI, pairs[:1]).border == pytest.approx(1 / 12.5e9)
    assert only(ABCI, pairs).border == pytest.approx(68 * 3 / 34 / 12.5e9)


def test_an_oversubscribed_switch_serves_two_nodes_and_not_all() -> None:
    switch = with_links(preset("ethernet-10g"), lambda link: replace(link, oversubscription=4))
    pairs = [(rank, rank + 32) for rank in range(32)]
    assert only(switch, pairs).border == pytest.approx(4 * only(switch, pairs[:1]).border)


def test_a_bus_is_shared_by_the_devices_on_it() -> None:
    bus = with_links(ABCI, lambda link: replace(link, shared_by=4) if link.name == "nvlink" else link)
    assert only(bus, [(0, 1)]).border == pytest.approx(2 / 50e9)  # both send at once
    assert only(bus, [(0, 1), (2, 3)]).border == pytest.approx(4 / 50e9)


def test_an_even_exchange_pays_for_the_part_that_leaves_the_node() -> None:
    even = only(ABCI, [range(8)]).even
    assert even == pytest.approx(4 / 7 * 2 / 12.5e9)  # 4 of 7 peers are elsewhere, 4 ranks share 2 adapters


def test_groups_of_unequal_reach_are_told_apart_and_the_slowest_counts() -> None:
    groups = [range(4), range(4, 12)]
    found = traffic(ABCI, groups)
    assert [channel.level for channel in found.channels] == [0, 1]
    assert collective_cost(ABCI, found, "all_reduce", MB).seconds == seconds(ABCI, groups[1:], "all_reduce", MB)


def test_thousands_of_ranks_are_quick_and_have_one_channel_for_all_groups() -> None:
    found = traffic(DGX, strided(16384, 8))
    assert len(found.channels) == 1 and found.groups == 8


def measured(**change: object) -> Cluster:
    fields = {"collective": "all_reduce", "level": "nvlink", "ranks": 4, "sizes": (1e3, 1e6), "seconds": (1e-4, 1e-2), **change}
    return replace(ABCI, measured=Measured(curves=(Curve(**fields),)))  # type: ignore[arg-type]


def test_a_measured_curve_goes_before_the_formula() -> None:
    cost = collective_cost(measured(spreads=(1e-5, 1e-3)), traffic(ABCI, [range(4)]), "all_reduce", 1e6)
    assert cost.measured and not cost.extrapolated and (cost.seconds, cost.spread) == (pytest.approx(1e-2), pytest.approx(1e-3))


@pytest.mark.parametrize("groups", [[range(3)], [range(4), range(4, 8)], [range(0, 16, 4)]])
def test_a_curve_of_other_groups_is_not_used(groups: Groups) -> None:
    cost = collective_cost(measured(), traffic(ABCI, groups), "all_reduce", 1e6)
    assert not cost.measured and cost == collective_cost(ABCI, traffic(ABCI, groups), "all_reduce", 1e6)


def test_what_was_not_measured_has_no_measured_cost() -> None:
    groups = traffic(ABCI, [range(4)])
    assert measured_cost(measured(), groups, "all_reduce", 1e6) == collective_cost(measured(), groups, "all_reduce", 1e6)
    assert measured_cost(measured(), groups, "shared_give", 1e6) is None
    assert measured_cost(measured(), traffic(ABCI, [range(3)]), "all_reduce", 1e6) is None


@pytest.mark.parametrize(
    ("computing", "longer"), [(0.0, 0.0), (1e-3, 0.0), (4e-3, 0.0), (8e-3, 1e-3), (12e-3, 2e-3), (1.0, 2e-3)]
)
def test_after_long_computing_an_exchange_takes_longer_and_never_less_than_its_curve(computing: float, longer: float) -> None:
    waits = Waits(level="nvlink", ranks=4, computing=(4e-3, 12e-3, 50e-3), seconds=(1e-3, 3e-3, 3e-3))
    cluster = replace(ABCI, measured=Measured(waits=(waits,)))
    assert waiting(cluster, traffic(ABCI, [range(4)]), computing) == pytest.approx(longer, abs=1e-9)
    assert waiting(cluster, traffic(ABCI, [range(3)]), computing) == 0.0


def test_beyond_the_measured_sizes_the_answer_says_so() -> None:
    groups = traffic(ABCI, [range(4)])
    small, large = (collective_cost(measured(), groups, "all_reduce", size) for size in (1.0, 1e8))
    assert small.extrapolated and small.seconds == pytest.approx(1e-4)
    assert large.extrapolated and large.seconds == pytest.approx(1.0)


def test_between_two_sizes_the_curve_is_straight() -> None:
    (curve,) = measured().measured.curves
    assert reading(curve, 1e3 + 0.25 * (1e6 - 1e3)).seconds == pytest.approx(0.75 * 1e-4 + 0.25 * 1e-2)
    assert reading(curve, 1e3).seconds == pytest.approx(1e-4) and not reading(curve, 1e3).extrapolated


@given(st.lists(st.floats(1e-7, 10), min_size=1, max_size=12))
def test_jitter_is_smoothed_into_times_that_never_fall(times: list[float]) -> None:
    smooth = rising(tuple(times))
    assert list(smooth) == sorted(smooth)
    assert rising(tuple(sorted(times))) == pytest.approx(tuple(sorted(times)))
    assert min(times) * 0.999 <= smooth[0] and smooth[-1] <= max(times) * 1.001


@given(st.lists(st.floats(1e-7, 10), min_size=2, max_size=8), st.floats(1, 1e9), st.floats(1, 100))
def test_a_measured_time_never_falls_with_size(times: list[float], size: float, factor: float) -> None:
    points = tuple(10.0**k for k in range(1, len(times) + 1))
    curve = Curve(collective="send", level="nvlink", ranks=2, sizes=points, seconds=tuple(times))
    assert reading(curve, size).seconds <= reading(curve, size * factor).seconds * (1 + 1e-12)


def test_a_small_all_reduce_on_many_ranks_takes_a_trees_time() -> None:
    many = [range(1024)]
    ring = 2 * 1023 * ABCI.links[-1].latency
    small, middle, large = (seconds(ABCI, many, "all_reduce", size) for size in (1e3, 1e6, 1e9))
    assert small < middle < large and small < 0.05 * ring
