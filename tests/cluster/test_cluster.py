"""Clusters as values: where ranks lie, over which link they talk, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cluster import (
    Cluster,
    Curve,
    Device,
    Link,
    Measured,
    Nodes,
    Precision,
    cluster_named,
    local,
    preset,
    preset_names,
)
from fourfold.errors import Error, Infeasible, InvalidInput

GPU = Device(name="gpu", kind="gpu", memory=16e9, bandwidth=1e12, rates=(("fp32", 1e13),))
CPU = Device(name="cpu", kind="cpu", memory=64e9, bandwidth=1e11, rates=(("fp64", 1e12), ("fp32", 2e12)), cores=8)
PAIR = Link(name="pair", devices=2, latency=1e-6, bandwidth=100e9)
NODE = Link(name="node", nodes=1, latency=2e-6, bandwidth=50e9)
RACK = Link(name="rack", nodes=3, latency=5e-6, bandwidth=10e9, shared_by=2)
SPINE = Link(name="spine", latency=9e-6, bandwidth=10e9, shared_by=2, oversubscription=3)


def nodes(count: int, devices: int, device: str = "gpu") -> Nodes:
    return Nodes(count=count, device=device, devices=devices)


def cluster(*runs: Nodes, links: tuple[Link, ...] = (PAIR, NODE, RACK, SPINE), **rest: object) -> Cluster:
    size = sum(run.count * run.devices for run in runs)
    return Cluster(name="test", kinds=(GPU, CPU), nodes=runs, links=links, size=size, **rest)  # type: ignore[arg-type]


def test_ranks_fill_nodes_in_order_and_mixed_kinds_follow_each_other() -> None:
    mixed = cluster(nodes(2, 4), nodes(3, 2, "cpu"))
    assert [mixed.node(rank) for rank in range(14)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [mixed.device(rank).name for rank in (0, 7, 8, 13)] == ["gpu", "gpu", "cpu", "cpu"]
    assert [(kind.name, ranks) for kind, ranks in mixed.with_size(9).runs_in_use()] == [("gpu", range(8)), ("cpu", range(8, 9))]


def test_ranks_talk_over_the_innermost_link_that_joins_them() -> None:
    found = cluster(nodes(7, 4))
    groups = [(0, 1), (1, 2), (0, 3), (3, 4), (0, 11), (11, 12), (0, 27)]
    assert [found.link(ranks) for ranks in groups] == [PAIR, NODE, NODE, RACK, RACK, SPINE, SPINE]


def test_a_single_rank_talks_over_no_link() -> None:
    assert cluster(nodes(2, 4)).level([5]) is None
    assert cluster(nodes(1, 1), links=()).link([0]) is None


@given(st.integers(1, 40), st.integers(0, 39), st.integers(0, 39))
def test_a_wider_group_never_talks_over_a_more_inner_link(size: int, one: int, other: int) -> None:
    found = cluster(nodes(7, 4), nodes(6, 2, "cpu")).with_size(size)
    low, high = sorted((one % size, other % size))
    levels = [found.level(range(low, end + 1)) for end in range(low + 1, high + 1)]
    assert levels == sorted(levels)  # type: ignore[type-var]


@given(st.integers(0, 39))
def test_every_unit_lies_inside_a_unit_of_the_level_above(rank: int) -> None:
    found = cluster(nodes(7, 4), nodes(6, 2, "cpu"))
    sizes = [found.unit_devices(rank, level) for level in range(-1, 4)]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 40
    for level in range(4):
        peers = [other for other in range(40) if found.unit(other, level) == found.unit(rank, level)]
        assert len(peers) == found.unit_devices(rank, level)
        assert peers == list(range(peers[0], peers[-1] + 1))


def test_unused_devices_of_a_node_leave_its_links_to_the_others() -> None:
    abci = preset("abci")
    assert abci.ports(0, 1) == 2  # adapters of a node
    assert abci.with_size(1).ports(0, 1) == 2
    assert abci.ports(0, 2) == 34  # of a rack
    assert preset("ethernet-25g-gpu").ports(0, 1) == 1


def test_ranks_on_one_processor_share_its_memory_and_gpus_are_their_own() -> None:
    found = cluster(nodes(1, 4), nodes(1, 4, "cpu")).with_size(7)
    assert [found.ranks_per_device(rank) for rank in (0, 6)] == [1, 3]
    assert [found.memory(rank) for rank in (0, 6)] == [16e9, 64e9 / 3]


def test_hardware_without_tf32_computes_in_fp32_and_other_gaps_are_refused() -> None:
    assert GPU.rate("tf32") == GPU.rate("fp32") == 1e13
    missing: Precision = "bf16"
    with pytest.raises(InvalidInput, match=r"'gpu' has no rate for bf16, only for fp32; .*rate_bf16"):
        GPU.rate(missing)


def test_a_cluster_smaller_than_asked_says_both_numbers() -> None:
    with pytest.raises(Infeasible, match=r"'fpga-mixed' has 4 devices, 5 are asked for; ask for fewer"):
        cluster_named("fpga-mixed", devices=5)
    with pytest.raises(InvalidInput, match="0 devices"):
        cluster_named("abci", devices=0)


def test_a_rank_that_is_not_in_use_has_no_device() -> None:
    with pytest.raises(InvalidInput, match="rank 4 of a cluster with 4 devices in use"):
        preset("abci").with_size(4).device(4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cluster(nodes(2, 3)), r"'pair' joins 2 devices, nodes of 'gpu' have 3; use a divisor"),
        (lambda: cluster(nodes(2, 4), links=(NODE,)), r"2 nodes, but the outermost link 'node' joins 1; add a link"),
        (lambda: cluster(nodes(1, 4), links=(PAIR,)), r"4 devices, but the outermost link 'pair' joins 2; add a link"),
        (lambda: cluster(nodes(2, 4), links=()), r"8 devices and no link"),
        (lambda: cluster(nodes(2, 4), links=(SPINE, NODE)), r"'spine' joins everything, yet 'node' lies outside"),
        (lambda: cluster(nodes(2, 4), links=(NODE, PAIR)), r"order links from the innermost out"),
        (lambda: cluster(nodes(8, 4), links=(RACK, replace(RACK, name="row", nodes=4))), r"joins 4 nodes, 'rack' inside it 3"),
        (lambda: cluster(nodes(2, 4), links=(NODE, replace(SPINE, name="node"))), r"two entries of link are named 'node'"),
        (lambda: cluster(nodes(2, 4, "gpus")), r"unknown device 'gpus'; did you mean 'gpu'"),
        (lambda: cluster(), r"has no nodes"),
        (lambda: replace(GPU, memory=-1.0), r"memory is -1, it must be positive"),
        (lambda: replace(GPU, rates=()), r"has no rate"),
        (lambda: replace(GPU, kind="tpu"), r"kinds are gpu, cpu, fpga"),
        (lambda: replace(SPINE, oversubscription=0.5), r"oversubscription is 0.5, at least 1"),
        (lambda: replace(PAIR, nodes=2), r"joins 2 devices and 2 nodes; say one"),
        (lambda: nodes(0, 4), r"count is 0, it must be positive"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make, words: str) -> None:
    with pytest.raises(Error, match=words):
        make()


def curve(**change: object) -> Curve:
    fields = {"collective": "all_reduce", "level": "node", "ranks": 4, "sizes": (1e3, 1e6), "seconds": (1e-5, 1e-3), **change}
    return Curve(**fields)  # type: ignore[arg-type]


def test_curves_are_found_by_collective_and_level_in_order_of_their_groups() -> None:
    curves = (curve(ranks=8), curve(), curve(groups=2), curve(level="rack"), curve(collective="send", ranks=2))
    measured = cluster(nodes(2, 4), measured=Measured(curves=curves)).measured
    assert [(c.ranks, c.groups) for c in measured.curves_of("all_reduce", "node")] == [(4, 1), (4, 2), (8, 1)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: curve(sizes=(1e6, 1e3)), "sizes must be positive and rise"),
        (lambda: curve(sizes=(0.0, 1e3)), "sizes must be positive and rise"),
        (lambda: curve(seconds=(1e-5,)), "2 sizes, 1 times and 0 spreads"),
        (lambda: curve(seconds=(1e-5, 0.0)), "times must be positive"),
        (lambda: curve(collective="gossip"), "collectives are all_reduce"),
        (lambda: curve(ranks=1), "at least 2"),
        (lambda: Measured(curves=(curve(), curve(source="again"))), "given twice"),
        (lambda: cluster(nodes(2, 4), measured=Measured(curves=(curve(level="nodes"),))), "no link; did you mean 'node'"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(make, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make()


def test_this_machine_takes_as_many_ranks_as_asked_and_says_it_is_not_calibrated() -> None:
    here = cluster_named("local", devices=6)
    assert here == local(6) and here.size == here.capacity == 6 and here.ranks_per_device(0) == 6
    assert 0 < here.memory(0) * 6 == here.kinds[0].memory
    assert "not calibrated" in here.kinds[0].sources.of("rate_fp32") and "not calibrated" in here.links[0].sources.of("latency")
    assert here.link([0, 5]) == here.links[0]


def test_the_presets_that_are_promised_are_there() -> None:
    promised = "abci dgx-a100 dgx-h100 dgx-h200 ethernet-1g ethernet-10g ethernet-25g cori-knl vcu118 vcu129"
    assert {*promised.split(), "ethernet-10g-gpu", "ethernet-25g-gpu", "fpga-mixed"} == set(preset_names())


def test_the_machine_of_the_oracle_paper_is_as_it_says() -> None:
    abci = preset("abci").with_size(1024)
    assert abci.device(0).memory < 16 * 2**30 and len(abci.node_ranks(0)) == 4
    assert [link.bandwidth for link in abci.links] == [50e9, 12.5e9, 12.5e9]
    assert abci.links[0].latency == 20e-6 and abci.links[2].oversubscription == 3
    assert [abci.level(range(ranks)) for ranks in (4, 68, 69)] == [0, 1, 2]


def test_boards_stream_transfers_under_compute_and_other_devices_do_not() -> None:
    streaming = {name for name in preset_names() for kind in preset(name).kinds if kind.asynchronous}
    assert streaming == {"vcu118", "vcu129", "fpga-mixed"}
