"""Memory of divided weights (ZeRO-3): messages with them, gathered copies, and gradients on their way to their owners, taken
and dropped as the actions of a list say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fourfold.oracle.memory.allocator import Allocator, Block
from fourfold.plans.layout.exchange import Step
from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lowering.program import Move


@dataclass(eq=False)
class DividedWeights:
    """One rank's share of a stage. `item`: bytes of an element of a value; `land`: called with each shard's gradient that has
    arrived."""

    heap: Allocator
    rank: int
    item: Callable[[str], int]
    land: Callable[[Move, Block], None]
    flying: dict[str, Block] = field(default_factory=dict)  # messages, by key
    here: dict[tuple[str, Move], Block] = field(default_factory=dict)  # their weights, until they are fetched
    full: dict[Move, Block] = field(default_factory=dict)  # those backward works with
    grads: dict[Move, Block] = field(default_factory=dict)  # of gathered weights, just made
    came: dict[Move, Block] = field(default_factory=dict)  # waiting for the others of their message
    flights: deque[tuple[Bunch, list[Block], Block]] = field(default_factory=deque)

    def launch(self, bunch: Bunch) -> None:
        if bunch.gradients:
            self._send(bunch)
            return
        self.flying[bunch.key] = self.heap.take(self._message(bunch), "exchange")
        for move, step in zip(bunch.moves, bunch.steps, strict=True):
            self.here[bunch.key, move] = self.heap.take(self._local(step, move), "gathered weights")

    def arrive(self, bunch: Bunch) -> None:
        self.heap.drop(self.flying.pop(bunch.key))

    def fetch(self, move: Move, source: Bunch | None) -> Block:
        """A gathered weight, for forward."""
        if source is None:
            return self.heap.take(self._local(move.exchange.steps[0], move), "gathered weights")
        return self.here.pop((source.key, move))

    def refill(self, move: Move, source: Bunch | None) -> None:
        """For backward."""
        self.full[move] = self.fetch(move, source)

    def release(self, move: Move) -> None:
        self.heap.drop(self.full.pop(move))

    def give(self, move: Move, target: Bunch | None) -> None:
        """The gradient of a weight: this rank's part goes to its shard, the others' to shared memory or into a message."""
        grad = self.grads.pop(move)
        if target is not None and move not in self.came:
            self.came[move] = grad
            return
        if target is None:
            self.land(move, self.heap.take(self._local(move.exchange.adjoint.steps[0], move), "gradients"))
        self.heap.drop(grad)

    def _send(self, bunch: Bunch) -> None:
        message = self.heap.take(self._message(bunch), "exchange")
        pairs = zip(bunch.moves, bunch.steps, strict=True)
        shards = [self.heap.take(self._local(step, move), "gradients") for move, step in pairs]
        for move in bunch.moves:
            if move in self.came:
                self.heap.drop(self.came.pop(move))
        self.flights.append((bunch, shards, message))

    def limit(self, most: int) -> None:
        while len(self.flights) > most:
            bunch, shards, message = self.flights.popleft()
            self.heap.drop(message)
            for move, shard in zip(bunch.moves, shards, strict=True):
                self.land(move, shard)

    def _message(self, bunch: Bunch) -> int:
        """Bytes packed and received."""
        pairs = zip(bunch.moves, bunch.steps, strict=True)
        return sum(
            self.item(m.value) * (step.received_elements(self.rank) + step.sent_elements(self.rank)) for m, step in pairs
        )

    def _local(self, step: Step, move: Move) -> int:
        """Bytes of what an exchange gives this rank."""
        return math.prod(step.target.local_shape(step.mesh.coords(self.rank))) * self.item(move.value)
