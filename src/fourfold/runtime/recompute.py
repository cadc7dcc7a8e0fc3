"""Segments whose activations are dropped after forward and computed again when backward reaches them.

Autograd saves numbers instead of tensors; when the first gradient arrives at a segment's results, its steps run once more
and give the tensors in the same order. Not left to the first tensor asked for: a rank with an empty shard may ask later than
the others, and the exchanges inside the segment must meet in one order on all ranks. What the second run writes to
buffers is thrown away, and its random masks are those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Body = Callable[[bool], Sequence[Any]]
"""Runs the segment; told whether it is the second time."""


def recomputed(body: Body) -> Sequence[Any]:
    """The results of a function of tensors at hand, whose activations are not kept."""
    if not torch.is_grad_enabled():
        return body(False)
    segment = _Segment(body)
    with saved_tensors_hooks(segment.pack, segment.unpack):
        results = body(False)
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(segment.refill)
    return results


class _Segment:
    """One run of a segment: how many tensors it saved and, from its backward on, the tensors."""

    def __init__(self, body: Body) -> None:
        self.body, self.count = body, 0
        self.saved: dict[int, Tensor] = {}
        self.filled = False

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        assert self.filled, "backward reached a segment without its results' gradients"
        return self.saved[number]

    def refill(self, _: Tensor) -> None:
        """Run the segment again and keep what it saves."""
        if self.filled:
            return
        self.filled = True
        with torch.enable_grad(), saved_tensors_hooks(self._keep, _never):
            self.body(True)
        assert len(self.saved) == self.count, f"a segment saved {self.count} tensors first and {len(self.saved)} now"

    def _keep(self, tensor: Tensor) -> int:
        self.saved[len(self.saved)] = tensor
        return -1


def _never(number: int) -> Tensor:
    raise AssertionError("the graph of a second run has no backward")
