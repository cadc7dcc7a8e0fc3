"""Divided weights on a rank, and what both ways of carrying them share: through shared memory (`ring`) or by messages
(`wired`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fourfold.plans.layout.exchange import Step
from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lowering.program import Move


@dataclass(eq=False)
class Gathered:
    """One weight: the move that gathers it, its shape when gathered, this rank's shard, and all of it while backward uses
    it."""

    move: Move
    shape: tuple[int, ...]
    shard: Tensor
    full: Tensor | None = None

    @property
    def name(self) -> str:
        return self.move.value

    @property
    def there(self) -> Step:
        """The exchange that gathers it."""
        return self.move.exchange.steps[0]

    @property
    def back(self) -> Step:
        """The exchange of its gradient."""
        return self.move.exchange.adjoint.steps[0]


class WeightTransport(Protocol):
    """Carries out a list's actions on divided weights; all ranks call in the order of their lists."""

    @property
    def kept(self) -> list[Tensor]:
        """Memory that stays between steps, beside the shards."""

    def fetch(self, gathered: Gathered, source: Bunch | None) -> Tensor:
        """A weight, gathered: out of a message that has arrived, or from shared memory."""

    def give(self, gathered: Gathered, grad: Tensor, target: Bunch | None) -> None:
        """The gradient of a gathered weight: what is each rank's part goes to its shard."""

    def limit(self, most: int) -> None:
        """Wait until at most so many messages with gradients are under way."""


def add_gradient(shard: Tensor, grad: Tensor) -> None:
    """Add to the gradient of a shard; the first is taken as it is."""
    if shard.grad is None:
        shard.grad = grad
    else:
        shard.grad += grad
