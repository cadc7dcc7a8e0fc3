"""A cluster as a value: which devices there are, how they lie in nodes, and the links between them, level by level.

Ranks are the devices in order: rank r is the r-th device, nodes are filled one after the other. Everything is SI (bytes,
seconds, FLOP/s). Links form a tree: a level joins all devices of one unit (a pair, a node, a rack, everything), and two
ranks talk over the innermost level whose unit holds both. Left out: which path a packet takes inside a level, and what
messages cost, which is the oracle's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise

from fourfold.cluster.measured import Curve, Measured, Waits
from fourfold.cluster.parts import Device, Link, Nodes
from fourfold.errors import Infeasible, InvalidInput, nearest

NOTHING = Measured()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, nodes and links, innermost first; `size` of the devices are in use, the first ones."""

    name: str
    about: str = ""
    kinds: tuple[Device, ...]
    nodes: tuple[Nodes, ...]
    links: tuple[Link, ...]
    measured: Measured = NOTHING
    size: int

    def __post_init__(self) -> None:
        _check_names("device", [kind.name for kind in self.kinds])
        _check_names("link", [link.name for link in self.links])
        known = [kind.name for kind in self.kinds]
        for run in self.nodes:
            if run.device not in known:
                raise InvalidInput(f"nodes of an unknown device {run.device!r}{nearest(run.device, known)}")
        if not self.nodes:
            raise InvalidInput(f"cluster {self.name!r} has no nodes; describe at least one run of them")
        _check_links(self)
        levels = [link.name for link in self.links]
        found: tuple[Curve | Waits, ...] = (*self.measured.curves, *self.measured.waits)
        for one in found:
            if one.level not in levels:
                raise InvalidInput(f"{one.name}, which is no link{nearest(one.level, levels)}")
        if not 1 <= self.size <= self.capacity:
            raise _too_small_error(self, self.size)

    @property
    def capacity(self) -> int:
        """All devices there are."""
        return self._firsts[-1]

    @property
    def node_count(self) -> int:
        """All nodes there are."""
        return self._runs[-1]

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The first device of each run, and the number of all."""
        return tuple(accumulate((run.count * run.devices for run in self.nodes), initial=0))

    @cached_property
    def _runs(self) -> tuple[int, ...]:
        """The first node of each run, and the number of all."""
        return tuple(accumulate((run.count for run in self.nodes), initial=0))

    @cached_property
    def _kinds(self) -> dict[str, Device]:
        return {kind.name: kind for kind in self.kinds}

    def with_size(self, devices: int) -> Cluster:
        """The same cluster with so many devices in use."""
        if not 1 <= devices <= self.capacity:
            raise _too_small_error(self, devices)
        return replace(self, size=devices)

    def device(self, rank: int) -> Device:
        """The kind of a rank's device."""
        return self._kinds[self.nodes[self._run(rank)].device]

    def node(self, rank: int) -> int:
        run = self._run(rank)
        return self._runs[run] + (rank - self._firsts[run]) // self.nodes[run].devices

    @cached_property
    def places(self) -> tuple[tuple[int, str], ...]:
        """The node and the kind of device of every rank in use."""
        runs = zip(self.nodes, self._runs, strict=False)
        nodes = ((first + k, self._kinds[run.device].kind, run.devices) for run, first in runs for k in range(run.count))
        return tuple(islice(((node, kind) for node, kind, count in nodes for _ in range(count)), self.size))

    def node_ranks(self, node: int) -> range:
        """The ranks in use on a node."""
        return range(min(self._first_device(node), self.size), min(self._first_device(node + 1), self.size))

    def ranks_per_device(self, rank: int) -> int:
        """How many ranks compute on this rank's device: those of its node where it is a shared processor, else one."""
        return len(self.node_ranks(self.node(rank))) if self.device(rank).cores else 1

    def memory(self, rank: int) -> float:
        """Bytes for one rank: those of its device, evenly shared where ranks share it."""
        return self.device(rank).memory / self.ranks_per_device(rank)

    def unit(self, rank: int, level: int) -> int:
        """Which unit of a level holds a rank, counted from 0. Below the innermost level every rank is its own unit."""
        if level < 0:
            return rank
        link = self.links[level]
        if link.devices:
            return rank // link.devices
        return self.node(rank) // link.nodes if link.nodes else 0

    def unit_devices(self, rank: int, level: int) -> int:
        """How many devices, in use or not, the unit of a level that holds a rank has."""
        if level < 0:
            return 1
        link = self.links[level]
        if link.devices or not link.nodes:
            return link.devices or self.capacity
        first = self.unit(rank, level) * link.nodes
        return self._first_device(first + link.nodes) - self._first_device(first)

    def ports(self, rank: int, level: int) -> float:
        """How many links of a level lead out of the unit of the level below that holds a rank."""
        return max(1.0, self.unit_devices(rank, level - 1) / self.links[level].shared_by)

    def level(self, ranks: Collection[int]) -> int | None:
        """The innermost level that joins all these ranks, or None for a single one. Units are runs of consecutive ranks, so
        the first and the last rank decide."""
        first, last = min(ranks), max(ranks)
        if first == last:
            return None
        return next(i for i in range(len(self.links)) if self.unit(first, i) == self.unit(last, i))

    def link(self, ranks: Collection[int]) -> Link | None:
        """The link of that level."""
        level = self.level(ranks)
        return None if level is None else self.links[level]

    def runs_in_use(self) -> Iterator[tuple[Device, range]]:
        """The kinds of the ranks in use, in order: a kind and its consecutive ranks."""
        for run, (first, end) in zip(self.nodes, pairwise(self._firsts), strict=True):
            if first < self.size:
                yield self._kinds[run.device], range(first, min(end, self.size))

    def _run(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise InvalidInput(f"rank {rank} of a cluster with {self.size} devices in use; ranks count from 0")
        return bisect_right(self._firsts, rank) - 1

    def _first_device(self, node: int) -> int:
        """The first device of a node; past the last node, the number of devices."""
        if node >= self.node_count:
            return self.capacity
        run = bisect_right(self._runs, node) - 1
        return self._firsts[run] + (node - self._runs[run]) * self.nodes[run].devices


def _too_small_error(cluster: Cluster, devices: int) -> Exception:
    if devices < 1:
        return InvalidInput(f"{devices} devices of cluster {cluster.name!r}; ask for at least 1")
    text = f"cluster {cluster.name!r} has {cluster.capacity} devices, {devices} are asked for"
    return Infeasible(f"{text}; ask for fewer or describe more nodes", reason="cluster too small")


def _check_names(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput(f"two entries of {what} are named {name!r}; give each its own name")


def _check_links(cluster: Cluster) -> None:
    """Units nest: each is a whole number of the units below, and the outermost holds every node."""
    for below, above in pairwise(cluster.links):
        if not below.devices and not below.nodes:
            raise InvalidInput(f"link {below.name!r} joins everything, yet {above.name!r} lies outside it; say how much")
        _check_nesting(below, above)
    for link in cluster.links:
        for run in cluster.nodes:
            if link.devices and run.devices % link.devices:
                text = f"link {link.name!r} joins {link.devices} devices, nodes of {run.device!r} have {run.devices}"
                raise InvalidInput(f"{text}; use a divisor")
    _check_joined(cluster)


def _check_nesting(below: Link, above: Link) -> None:
    if below.nodes and above.devices:
        text = f"link {above.name!r} joins devices of a node, {below.name!r} inside it whole nodes"
        raise InvalidInput(f"{text}; order links from the innermost out")
    for unit, inner, outer in (("devices", below.devices, above.devices), ("nodes", below.nodes, above.nodes)):
        if inner and outer and (outer <= inner or outer % inner):
            text = f"link {above.name!r} joins {outer} {unit}, {below.name!r} inside it {inner}"
            raise InvalidInput(f"{text}; use a larger multiple")


def _check_joined(cluster: Cluster) -> None:
    most = max(run.devices for run in cluster.nodes)
    if cluster.capacity == 1:
        return
    if not cluster.links:
        raise InvalidInput(f"cluster {cluster.name!r} has {cluster.capacity} devices and no link between them; describe one")
    last = cluster.links[-1]
    if last.nodes and last.nodes < cluster.node_count:
        text = f"{cluster.node_count} nodes, but the outermost link {last.name!r} joins {last.nodes}"
        raise InvalidInput(f"{text}; add a link outside it")
    if last.devices and (cluster.node_count > 1 or last.devices < most):
        text = f"{cluster.capacity} devices, but the outermost link {last.name!r} joins {last.devices}"
        raise InvalidInput(f"{text}; add a link outside it")
