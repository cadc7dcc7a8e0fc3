"""Divided weights (ZeRO-3) on a rank, and the interface of their two transports: shared memory (`zero3_shared`) and collectives
(`zero3_collective`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fourfold.plans.layout.exchange import ExchangeStep
from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lowering.program import Move


@dataclass(eq=False)
class GatheredWeight:
    """One weight: the move that gathers it, its gathered shape, this rank's shard, and the gathered tensor while backward uses
    it."""

    move: Move
    shape: tuple[int, ...]
    shard: Tensor
    full: Tensor | None = None

    @property
    def name(self) -> str:
        return self.move.value

    @property
    def gather_step(self) -> ExchangeStep:
        """The exchange that gathers the weight."""
        return self.move.exchange.steps[0]

    @property
    def reduce_step(self) -> ExchangeStep:
        """The exchange that sums its gradient into the shards."""
        return self.move.exchange.adjoint.steps[0]


class WeightTransport(Protocol):
    """Executes a list's actions on divided weights (`Fetch`, `Give`, `Limit`); all ranks call in the order of their lists."""

    @property
    def buffers(self) -> list[Tensor]:
        """Memory that stays between steps, beside the shards."""

    def fetch(self, weight: GatheredWeight, source: Bunch | None) -> Tensor:
        """The gathered weight: out of a message that has arrived, or from shared memory."""

    def give(self, weight: GatheredWeight, grad: Tensor, target: Bunch | None) -> None:
        """Reduce the gradient of a gathered weight: each rank's part of the sum is added to its shard's gradient."""

    def limit(self, most: int) -> None:
        """Wait until at most `most` messages with gradients are in flight."""


def add_gradient(shard: Tensor, grad: Tensor) -> None:
    """Add to the gradient of a shard; the first is stored without a copy."""
    if shard.grad is None:
        shard.grad = grad
    else:
        shard.grad += grad
