"""What brings gathered weights to a rank and its gradients to the shards' owners: the words both ways of doing so share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fourfold.plans.exchange import Step


@dataclass(eq=False)
class Gathered:
    """One parameter in the layout an op wants: the exchange there, that of the gradient back, and this rank's shard."""

    number: int
    name: str
    there: Step
    back: Step
    shape: tuple[int, ...]
    shard: Tensor
    full: Tensor | None = None  # while backward uses it


class Carrier(Protocol):
    """Calls come in the same order on all ranks, but for `refill`, which a rank may need that others do not."""

    @property
    def kept(self) -> list[Tensor]:
        """Memory that stays between steps, beside the shards."""

    def begin(self) -> None:
        """A step begins: the updates of all ranks are done when this returns."""

    def finish(self) -> None:
        """All backwards are over: gradients are complete and nobody reads weights any more when this returns."""

    def forward(self, size: int) -> None:
        """A forward begins."""

    def forward_done(self, size: int) -> None:
        """It has ended."""

    def ran(self, user: str, out: Any) -> None:
        """An op has run and given this."""

    def saved(self, gathered: Gathered, user: str) -> None:
        """An op's backward will want a weight."""

    def fetch(self, gathered: Gathered) -> Tensor:
        """A weight, gathered, for forward."""

    def refill(self, gathered: Gathered, user: str) -> Tensor:
        """A weight, gathered, for the backward of an op."""

    def give(self, gathered: Gathered, grad: Tensor) -> None:
        """The gradient of a gathered weight: what is each rank's goes to its shard."""


def add_gradient(shard: Tensor, grad: Tensor) -> None:
    """Add to the gradient of a shard; the first is taken as it is."""
    if shard.grad is None:
        shard.grad = grad
    else:
        shard.grad += grad
