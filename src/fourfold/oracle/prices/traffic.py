"""What each of several groups of ranks gets from the links when all of them communicate at once.

Groups are those of one exchange: the same collective, at the same time, on disjoint ranks. At a level of links, traffic
leaves a unit of the level below (a device, a node, a rack) by the unit's ports. Members of any group that send out of it
share them evenly, one link for each at most; what a level carries in all is its ports divided by its oversubscription.
Traffic to other racks passes the ports of its node too; traffic to other nodes does not pass the links inside a node.

Left out: other traffic of the same program at the same moment (the replay knows that), routing, and links of one level
that differ. Wrong where a library drives fewer links than there are: it is then too low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.cluster import Cluster

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One group's share: a start-up time, and seconds per byte by the way the group communicates."""

    ranks: int
    level: int  # of the outermost link it uses; -1 for a single rank
    latency: float  # seconds for each message
    ring: float  # seconds per byte that goes round a ring, which uses as many links as the group has members in a unit
    even: float  # seconds per byte of all that a rank gives, evenly, to all others
    border: float  # seconds per byte of what a rank gives to its neighbours in the group


ALONE = Channel(ranks=1, level=-1, latency=0.0, ring=0.0, even=0.0, border=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The distinct shares of groups that communicate at once, and how many groups there are."""

    channels: tuple[Channel, ...]
    groups: int


@dataclass(frozen=True, slots=True)
class _Crossing:
    """One group's members that send out of one unit over one level."""

    level: int
    ports: int  # which ports of the level they share with others
    parent: int  # the unit of the level
    members: int
    outside: int  # members of the group they reach over this level
    rank: int  # one of them


@dataclass(slots=True)
class _Load:
    """How many send by the same ports, and how many links those are worth."""

    links: float
    members: int = 0
    groups: int = 0


def traffic(cluster: Cluster, groups: Groups) -> Traffic:
    """Who gets what when all groups communicate. Takes time in proportion to the number of ranks: keep the answer."""
    wide = [group for group in groups if len(group) > 1]
    crossings = [_crossings(cluster, group) for group in wide]
    every = [crossing for some in crossings for crossing in some]
    loads = _loads(cluster, every)
    carried = _carried(cluster, every, loads)
    found = {_channel(cluster, len(group), some, loads, carried) for group, some in zip(wide, crossings, strict=True)}
    return Traffic(channels=tuple(sorted(found or {ALONE}, key=lambda c: (c.level, c.ranks, c.ring))), groups=len(groups))


def pair_kind(cluster: Cluster, a: int, b: int) -> tuple[object, ...]:
    """What the traffic of two ranks alone depends on: pairs of one kind need be looked at once."""
    outermost = cluster.level((a, b))
    assert outermost is not None, "two ranks"
    sizes = ((cluster.unit_devices(a, level), cluster.unit_devices(b, level)) for level in range(-1, outermost + 1))
    return outermost, *sizes, *(_ports(cluster, a, level) == _ports(cluster, b, level) for level in range(outermost + 1))


def _crossings(cluster: Cluster, group: Sequence[int]) -> list[_Crossing]:
    outermost = cluster.level(group)
    assert outermost is not None, "a group has two ranks or more"
    out: list[_Crossing] = []
    units = [(rank, 1) for rank in group]  # of the level below: one of the ranks in it, how many there are
    for level in range(outermost + 1):
        members, first = Counter[int](), dict[int, int]()
        for rank, count in units:
            parent = cluster.unit(rank, level)
            members[parent] += count
            first.setdefault(parent, rank)
        for rank, count in units:
            parent = cluster.unit(rank, level)
            reach = len(group) if _between_nodes(cluster, level) else members[parent]
            if reach > count:
                out.append(_Crossing(level, _ports(cluster, rank, level), parent, count, reach - count, rank))
        units = [(first[parent], count) for parent, count in members.items()]
    return out


def _between_nodes(cluster: Cluster, level: int) -> bool:
    """Whether traffic to units further out passes this level too."""
    return not cluster.links[level].devices and cluster.links[level].nodes != 1


def _ports(cluster: Cluster, rank: int, level: int) -> int:
    """Which ports a rank uses: those of its unit, or the one link that several small units share."""
    shared_by = cluster.links[level].shared_by
    if cluster.unit_devices(rank, level - 1) < shared_by:
        return -1 - rank // shared_by  # apart from units, which count from 0
    return cluster.unit(rank, level - 1)


def _loads(cluster: Cluster, crossings: Sequence[_Crossing]) -> dict[tuple[int, int], _Load]:
    """By level and ports. Uplinks are whole links, so that oversubscription leaves a unit at least one."""
    out: dict[tuple[int, int], _Load] = {}
    for crossing in crossings:
        key = (crossing.level, crossing.ports)
        if key not in out:
            over = cluster.links[crossing.level].oversubscription
            out[key] = _Load(max(1.0, cluster.ports(crossing.rank, crossing.level) / over))
        out[key].members += crossing.members
        out[key].groups += 1
    return out


def _carried(
    cluster: Cluster, crossings: Sequence[_Crossing], loads: dict[tuple[int, int], _Load]
) -> dict[tuple[int, int], float]:
    """By level and unit: the fraction of the busy links' bandwidth that an oversubscribed level carries."""
    busy: dict[tuple[int, int], dict[int, float]] = {}
    limit: dict[tuple[int, int], float] = {}
    for crossing in crossings:
        load, key = loads[crossing.level, crossing.ports], (crossing.level, crossing.parent)
        busy.setdefault(key, {})[crossing.ports] = min(load.members, load.links)
        if key not in limit:
            link, devices = cluster.links[crossing.level], cluster.unit_devices(crossing.rank, crossing.level)
            limit[key] = max(1.0, devices / link.shared_by / link.oversubscription)
    return {key: min(1.0, limit[key] / sum(links.values())) for key, links in busy.items()}


def _channel(
    cluster: Cluster,
    ranks: int,
    crossings: Sequence[_Crossing],
    loads: dict[tuple[int, int], _Load],
    carried: dict[tuple[int, int], float],
) -> Channel:
    ring = even = border = 0.0
    for crossing in crossings:
        load = loads[crossing.level, crossing.ports]
        bandwidth = cluster.links[crossing.level].bandwidth * carried[crossing.level, crossing.parent]
        each = bandwidth * min(1.0, load.links / load.members)
        ring = max(ring, 1 / (each * crossing.members))
        even = max(even, crossing.outside / (ranks - 1) / each)
        border = max(border, 1 / (bandwidth * min(1.0, load.links / load.groups)))
    outermost = crossings[-1].level
    latency = cluster.links[outermost].latency
    return Channel(ranks=ranks, level=outermost, latency=latency, ring=ring, even=even, border=border)
