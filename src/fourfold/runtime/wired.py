"""Weights and gradients of ZeRO-3 by collectives, several in one, started while ops before them compute.

In forward the next bunch of weights is on its way while this one is used. For backward a rank must not wait for a weight
that others never ask for (where a rank has no rows, autograd may save nothing). So after the first forward the ranks agree
on which op's backward wants which weights, and bunches are asked for as the backward of those ops begins, by all ranks alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.plans import buckets
from fourfold.runtime.carrier import Gathered, add_gradient
from fourfold.runtime.parcel import Arrived, Parcel
from fourfold.runtime.world import World


class Bunch:
    """Weights that travel together: on their way, here, or gone again."""

    def __init__(self, members: Sequence[Gathered], world: World, *, back: bool = False) -> None:
        self.members = list(members)
        self.parcel = Parcel([g.back if back else g.there for g in members], world)
        self.flying: Arrived | None = None
        self.launched = False
        self.here: dict[Gathered, Tensor] = {}

    def launch(self) -> None:
        """Start, unless that was done since the last `reset`."""
        if not self.launched:
            self.launched = True
            self.flying = self.parcel.launch([g.shard.detach() for g in self.members])

    def take(self, gathered: Gathered) -> Tensor | None:
        """A member, once; the others stay until they are asked for, and a frozen one until `reset`: several ops may ask for it,
        not as many on every rank."""
        if self.flying is not None:
            self.here.update(zip(self.members, self.flying(), strict=True))
            self.flying = None
        return self.here.pop(gathered, None) if gathered.shard.requires_grad else self.here.get(gathered)

    def reset(self) -> None:
        if self.flying is not None:
            self.flying()
        self.flying, self.launched = None, False
        self.here.clear()


def bunched(members: Sequence[Gathered], world: World, *, back: bool = False) -> list[Bunch]:
    steps = [g.back if back else g.there for g in members]
    dtypes = [g.shard.dtype for g in members]
    groups = buckets.bunched(steps, [dtype.itemsize for dtype in dtypes], dtypes)
    return [Bunch([members[k] for k in group], world, back=back) for group in groups]


class Refills:
    """What the backward of one program wants: its ops in forward's order, each with its bunches."""

    def __init__(self, wants: Sequence[tuple[str, list[Gathered]]], world: World) -> None:
        last = {g: k for k, (_, found) in enumerate(wants) for g in found}
        self.bunches = bunched(sorted(last, key=lambda g: (last[g], g.number)), world)
        self.home = {g: bunch for bunch in self.bunches for g in bunch.members}
        self.users = [user for user, _ in wants]
        self.wants = [list(dict.fromkeys(self.home[g] for g in found)) for _, found in wants]

    def coming(self, number: int) -> None:
        """The backward of an op begins: ask for its weights, and for those of the op before."""
        if number == len(self.users) - 1:
            for bunch in self.bunches:
                bunch.reset()
        for bunch in (*self.wants[number], *(self.wants[number - 1] if number else ())):
            bunch.launch()


class Sums:
    """Gradients on their way to the shards' owners."""

    def __init__(self, members: Sequence[Gathered], world: World) -> None:
        self.bunches = bunched(members, world, back=True)
        self.home = {g: bunch for bunch in self.bunches for g in bunch.members}
        self.came: dict[Bunch, dict[Gathered, Tensor]] = {}
        self.flights: deque[tuple[Bunch, Arrived]] = deque()

    @torch.no_grad()
    def give(self, gathered: Gathered, grad: Tensor) -> None:
        bunch = self.home[gathered]
        came = self.came.setdefault(bunch, {})
        came[gathered] = came[gathered] + grad if gathered in came else grad
        if len(came) == len(bunch.members):
            self._launch(bunch)

    def _launch(self, bunch: Bunch) -> None:
        came = self.came.pop(bunch)
        grads = [came[g] if g in came else g.shard.new_zeros(g.shape) for g in bunch.members]
        self.flights.append((bunch, bunch.parcel.launch(grads)))
        while len(self.flights) > buckets.SUMS_AHEAD:
            self._land()

    def _land(self) -> None:
        bunch, arrived = self.flights.popleft()
        for gathered, grad in zip(bunch.members, arrived(), strict=True):
            add_gradient(gathered.shard, grad)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch what some backward has left incomplete, the same on all ranks, and wait for all."""
        for bunch in self.bunches:
            if bunch in self.came:
                self._launch(bunch)
        while self.flights:
            self._land()


class Wired:
    """The carrier of ranks that do not share a host, or have other devices than CPUs."""

    def __init__(self, orders: Mapping[int, list[Gathered]], world: World) -> None:
        self.world, everyone = world, list(dict.fromkeys(g for order in orders.values() for g in order))
        self.numbered = {g.number: g for g in everyone}
        self.ahead = {size: bunched(list(dict.fromkeys(order)), world) for size, order in orders.items()}
        self.place = {size: {g: k for k, b in enumerate(found) for g in b.members} for size, found in self.ahead.items()}
        self.alone = {g: Parcel([g.there], world) for g in everyone}
        self.sums = Sums([g for g in everyone if g.shard.requires_grad], world)
        self.everyone = world.group(world.wide, "gradients")
        self.refills: dict[int, Refills] = {}
        self.size = self.backward = 0
        self.nodes: dict[str, Any] = {}  # by op, in the order they ran: where its backward begins
        self.seen: list[tuple[str, int]] = []

    @property
    def kept(self) -> list[Tensor]:
        return []

    def begin(self) -> None:
        """Nothing to wait for: what others send is what they have updated."""

    def finish(self) -> None:
        self.sums.finish()
        for refills in self.refills.values():
            for bunch in refills.bunches:
                bunch.reset()

    def forward(self, size: int) -> None:
        self.size, self.nodes, self.seen = size, {}, []
        for bunch in self.ahead[size]:
            bunch.reset()
        if self.ahead[size]:
            self.ahead[size][0].launch()

    def forward_done(self, size: int) -> None:
        if size not in self.refills:
            self.refills[size] = Refills(self._agreed(), self.world)
        for number, user in enumerate(self.refills[size].users):
            node = self.nodes.get(user)
            if node is not None:
                node.register_prehook(partial(self._coming, size, number))
        self.nodes = {}

    def _agreed(self) -> list[tuple[str, list[Gathered]]]:
        """Which op's backward wants which weights, on any rank."""
        found: list[Any] = [None] * self.world.mesh.size
        dist.all_gather_object(found, self.seen, group=self.everyone)
        wants: dict[str, set[int]] = {}
        for user, number in (pair for seen in found for pair in seen):
            wants.setdefault(user, set()).add(number)
        return [(user, [self.numbered[n] for n in sorted(wants[user])]) for user in self.nodes if user in wants]

    def _coming(self, size: int, number: int, _: Any) -> None:
        self.backward = size
        self.refills[size].coming(number)

    def ran(self, user: str, out: Any) -> None:
        if not _in_backward():
            outs = [out] if isinstance(out, Tensor) else list(out)
            self.nodes[user] = next((t.grad_fn for t in outs if isinstance(t, Tensor) and t.grad_fn is not None), None)

    def saved(self, gathered: Gathered, user: str) -> None:
        if self.size not in self.refills:
            self.seen.append((user, gathered.number))

    @torch.no_grad()
    def fetch(self, gathered: Gathered) -> Tensor:
        if _in_backward():  # of a recomputed segment
            return self._alone(gathered)
        bunches, k = self.ahead[self.size], self.place[self.size][gathered]
        for bunch in bunches[k : k + 2]:
            bunch.launch()
        found = bunches[k].take(gathered)
        return found if found is not None else self._alone(gathered)

    @torch.no_grad()
    def refill(self, gathered: Gathered, user: str) -> Tensor:
        home = self.refills[self.backward].home.get(gathered)
        found = home.take(gathered) if home is not None else None
        return found if found is not None else self._alone(gathered)

    def _alone(self, gathered: Gathered) -> Tensor:
        return self.alone[gathered].launch([gathered.shard.detach()])()[0]

    def give(self, gathered: Gathered, grad: Tensor) -> None:
        self.sums.give(gathered, grad)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
