"""Which way a message takes. This is the one place that decides it, for predictions and for runs:

- ``shared``: through memory that the ranks of a host share;
- ``direct``: point-to-point messages between hosts, receives posted before sends (`runtime.comm.gloo_p2p` says why);
- ``collective``: the library's own algorithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fourfold.plans.layout.exchange import ExchangeStep
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.policy import Policy

Path = Literal["shared", "direct", "collective"]
DIRECT_ELEMENTS = 2**15
"""Elements a rank receives from others, from which on gloo's collectives between hosts are slower than point-to-point messages
(1 KiB: 1.1 against 1.4 ms; 8 MiB each way at 1 Gbit/s: 121 against 75 ms). A property of gloo, so not a field of the policy."""


@dataclass(frozen=True)
class Paths:
    """The ways between the ranks of one stage. `ranks`: those of its mesh, in order."""

    mesh: Mesh
    ranks: tuple[int, ...]
    placement: Placement
    policy: Policy
    _shared: dict[tuple[str, ...], bool] = field(default_factory=dict, compare=False, repr=False)
    _hosts: dict[tuple[tuple[str, ...], int], int] = field(default_factory=dict, compare=False, repr=False)

    def share_memory(self, axes: tuple[str, ...]) -> bool:
        """Whether every group along the axes shares memory."""
        if axes not in self._shared:
            self._shared[axes] = all(self._shares(group) for group in self.mesh.groups(axes))
        return self._shared[axes]

    @property
    def wide(self) -> tuple[str, ...]:
        """The axes of more than one rank."""
        return tuple(axis for axis in self.mesh.names if self.mesh.extent(axis) > 1)

    @property
    def all_share_memory(self) -> bool:
        """Whether all ranks of the stage share memory."""
        return self._shares(range(self.mesh.size))

    @property
    def most_on_a_host(self) -> int:
        """How many ranks the fullest host has."""
        return max(Counter(self.placement.hosts[rank] for rank in self.ranks).values())

    def _shares(self, members: Iterable[int]) -> bool:
        return self.placement.shares_memory(self.ranks[m] for m in members)

    def small(self, axes: tuple[str, ...], size: float) -> bool:
        """Whether sums and gathers of so many bytes per rank go through shared memory."""
        return 0 < size <= self.policy.small_bytes and self.share_memory(axes)

    def of(self, step: ExchangeStep, member: int, item: int) -> Path:
        """The way of one step of an exchange in the group of a member. `item`: bytes of an element."""
        if step.pattern == "all_reduce":
            return "shared" if self.small(step.axes, step.size(member, item)) else "collective"
        if step.pattern == "all_to_all":
            return self.several([step], step.axes, member)
        return self.one_to_all(step.pattern, step.axes, member, step.received_elements(member))

    def several(self, steps: Iterable[ExchangeStep], axes: tuple[str, ...], member: int) -> Path:
        """The way of one or several all-to-all exchanges in one message per peer."""
        if self.hosts(axes, member) < 2:
            return "collective"
        known = list(steps)
        most = max(sum(step.received_elements(peer) for step in known) for peer in self.mesh.group(member, axes))
        return self.all_to_all(axes, member, most)

    def all_to_all(self, axes: tuple[str, ...], member: int, elements: int) -> Path:
        """The way of an all-to-all in which some rank receives so many elements, and no rank more."""
        return "direct" if self.hosts(axes, member) > 1 and elements >= DIRECT_ELEMENTS else "collective"

    def one_to_all(self, pattern: str, axes: tuple[str, ...], member: int, elements: int) -> Path:
        """The way of an all-gather or reduce-scatter in which a rank receives so many elements. Direct messages pay only where
        every rank has a host of its own (where several share one, a ring sends less between hosts), and for an all-gather only
        between two (among more, a ring is as good)."""
        count = self.extent(axes)
        alone = self.hosts(axes, member) == count and (pattern != "all_gather" or count == 2)
        return "direct" if alone and elements >= DIRECT_ELEMENTS else "collective"

    def hosts(self, axes: tuple[str, ...], member: int) -> int:
        """How many hosts a member's group along the axes spans. Libraries of other devices than processors choose their ways
        themselves: 1."""
        group = self.mesh.group(member, axes)
        key = (axes, group[0])
        if key not in self._hosts:
            ranks = [self.ranks[m] for m in group]
            hosts = {self.placement.hosts[rank] for rank in ranks}
            self._hosts[key] = len(hosts) if self.placement.on_processors(ranks) else 1
        return self._hosts[key]

    def extent(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.extent(axis) for axis in axes)
