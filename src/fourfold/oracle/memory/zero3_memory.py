"""Memory of divided weights (ZeRO-3) as the actions of a list take and drop it: messages, gathered weights, gradients that
their owners wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fourfold.oracle.memory.allocator import Allocator, Block
from fourfold.plans.layout.exchange import ExchangeStep
from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lowering.program import Move


@dataclass(eq=False)
class DividedWeights:
    """One rank's share of a stage. `item`: bytes of an element of a value; `on_shard`: called with each
    shard's gradient that has arrived."""

    heap: Allocator
    rank: int
    item: Callable[[str], int]
    on_shard: Callable[[Move, Block], None]
    messages: dict[str, Block] = field(default_factory=dict)  # received into, by key
    gathered: dict[tuple[str, Move], Block] = field(default_factory=dict)  # weights of messages, until they are fetched
    for_backward: dict[Move, Block] = field(default_factory=dict)
    grads: dict[Move, Block] = field(default_factory=dict)  # of gathered weights, just made
    waiting: dict[Move, Block] = field(default_factory=dict)  # gradients, until their message is sent
    sent: deque[tuple[Bunch, list[Block], Block]] = field(default_factory=deque)

    def launch(self, bunch: Bunch) -> None:
        if bunch.gradients:
            self._send(bunch)
            return
        self.messages[bunch.key] = self.heap.take(self._message_bytes(bunch), "exchange")
        for move, step in zip(bunch.moves, bunch.steps, strict=True):
            self.gathered[bunch.key, move] = self.heap.take(self._local_bytes(step, move), "gathered weights")

    def arrive(self, bunch: Bunch) -> None:
        self.heap.drop(self.messages.pop(bunch.key))

    def fetch(self, move: Move, source: Bunch | None) -> Block:
        """A gathered weight, for forward."""
        if source is None:
            return self.heap.take(self._local_bytes(move.exchange.steps[0], move), "gathered weights")
        return self.gathered.pop((source.key, move))

    def refill(self, move: Move, source: Bunch | None) -> None:
        """For backward."""
        self.for_backward[move] = self.fetch(move, source)

    def release(self, move: Move) -> None:
        self.heap.drop(self.for_backward.pop(move))

    def give(self, move: Move, target: Bunch | None) -> None:
        """The gradient of a weight: this rank's part goes to its shard, the others' to shared memory or into a message."""
        grad = self.grads.pop(move)
        if target is not None and move not in self.waiting:
            self.waiting[move] = grad
            return
        if target is None:
            self.on_shard(move, self.heap.take(self._local_bytes(move.exchange.adjoint.steps[0], move), "gradients"))
        self.heap.drop(grad)

    def _send(self, bunch: Bunch) -> None:
        message = self.heap.take(self._message_bytes(bunch), "exchange")
        pairs = zip(bunch.moves, bunch.steps, strict=True)
        shards = [self.heap.take(self._local_bytes(step, move), "gradients") for move, step in pairs]
        for move in bunch.moves:
            if move in self.waiting:
                self.heap.drop(self.waiting.pop(move))
        self.sent.append((bunch, shards, message))

    def limit(self, most: int) -> None:
        while len(self.sent) > most:
            bunch, shards, message = self.sent.popleft()
            self.heap.drop(message)
            for move, shard in zip(bunch.moves, shards, strict=True):
                self.on_shard(move, shard)

    def _message_bytes(self, bunch: Bunch) -> int:
        """Bytes packed and received."""
        pairs = zip(bunch.moves, bunch.steps, strict=True)
        return sum(
            self.item(m.value) * (step.received_elements(self.rank) + step.sent_elements(self.rank)) for m, step in pairs
        )

    def _local_bytes(self, step: ExchangeStep, move: Move) -> int:
        """Bytes of what an exchange gives this rank."""
        return math.prod(step.target.local_shape(step.mesh.coords(self.rank))) * self.item(move.value)
