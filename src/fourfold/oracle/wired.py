"""Weights of ZeRO-3 that travel by collectives, several in one: those of a bunch are all there when the first is wanted, the
next bunch is on its way, and gradients wait until their bunch is complete. As `runtime.wired`, in blocks of memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fourfold.oracle.heap import Block, Heap
from fourfold.plans import buckets
from fourfold.plans.buckets import SUMS_AHEAD
from fourfold.plans.exchange import Step
from fourfold.plans.program import Move


@dataclass(frozen=True, slots=True)
class Member:
    """One weight: bytes gathered, and bytes of the messages there and back."""

    move: Move
    size: int
    shard: int
    message: int
    back: int
    item: int


def member(move: Move, rank: int, item: int) -> Member:
    """A gathered weight on a rank."""
    (there,), (back,) = move.exchange.steps, move.exchange.adjoint.steps
    coords = there.mesh.coords(rank)
    sizes = [math.prod(layout.local_shape(coords)) * item for layout in (there.target, there.source)]
    return Member(move, sizes[0], sizes[1], _message(there, rank, item), _message(back, rank, item), item)


def _message(step: Step, rank: int, item: int) -> int:
    return item * (step.received(rank) + step.given(rank))


def bunched(members: list[Member]) -> list[list[Member]]:
    """Those that travel together."""
    items = [each.item for each in members]
    groups = buckets.bunched([each.move.exchange.steps[0] for each in members], items, items)
    return [[members[k] for k in group] for group in groups]


def homes(bunches: list[list[Member]]) -> dict[Move, int]:
    """Which bunch each weight is in: the first that has it."""
    return {each.move: k for k in reversed(range(len(bunches))) for each in bunches[k]}


@dataclass
class Bunches:
    """Weights on their way or here; `ahead`: which bunch follows, +1 in forward and -1 in backward."""

    heap: Heap
    bunches: list[list[Member]]
    ahead: int
    here: dict[Move, Block] = field(default_factory=dict)
    flying: dict[int, Block] = field(default_factory=dict)
    launched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.homes = homes(self.bunches)

    def fetch(self, move: Move, size: int) -> Block:
        k = self.homes[move]
        for number in (k, k + self.ahead):
            if 0 <= number < len(self.bunches) and number not in self.launched:
                self._launch(number)
        if k in self.flying:
            self.heap.drop(self.flying.pop(k))
        return self.here.pop(move, None) or self.heap.take(size, "gathered weights")

    def _launch(self, number: int) -> None:
        self.launched.add(number)
        some = self.bunches[number]
        self.flying[number] = self.heap.take(sum(m.message for m in some), "exchange")
        self.here.update({m.move: self.heap.take(m.size, "gathered weights") for m in some})

    def reset(self) -> None:
        for block in (*self.here.values(), *self.flying.values()):
            self.heap.drop(block)
        self.here, self.flying, self.launched = {}, {}, set()


@dataclass
class Sums:
    """Gradients on their way to their owners. `land` is told of each that has come: its weight, and the shard's gradient."""

    heap: Heap
    bunches: list[list[Member]]
    land: Callable[[Move, Block], None]
    came: dict[Move, Block] = field(default_factory=dict)
    flights: deque[tuple[list[Member], list[Block], Block]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.homes = homes(self.bunches)

    def give(self, move: Move, grad: Block) -> None:
        if move in self.came:
            self.heap.drop(grad)
            return
        self.came[move] = grad
        some = self.bunches[self.homes[move]]
        if all(m.move in self.came for m in some):
            self._launch(some)

    def _launch(self, some: list[Member]) -> None:
        message = self.heap.take(sum(m.back for m in some), "exchange")
        shards = [self.heap.take(m.shard, "gradients") for m in some]
        for m in some:
            if m.move in self.came:
                self.heap.drop(self.came.pop(m.move))
        self.flights.append((some, shards, message))
        while len(self.flights) > SUMS_AHEAD:
            self._arrive()

    def _arrive(self) -> None:
        some, shards, message = self.flights.popleft()
        self.heap.drop(message)
        for each, shard in zip(some, shards, strict=True):
            self.land(each.move, shard)

    def finish(self) -> None:
        for some in self.bunches:
            if any(m.move in self.came for m in some):
                self._launch(some)
        while self.flights:
            self._arrive()
