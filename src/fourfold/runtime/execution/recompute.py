"""Segments whose activations are dropped after forward and computed again when backward reaches them.

Autograd saves numbers instead of tensors. When the first gradient arrives at a segment's results, its steps run once more and
save the tensors in the same order. The first unpacked tensor must not start that run: a rank with an empty shard may unpack
later than the others, and the exchanges inside the segment must run in one order on all ranks. Buffers keep what the first run
wrote, and random masks are those of the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Body = Callable[[bool], Sequence[Any]]
"""Runs the segment; the argument: whether it is the second run."""


def run_without_saving(body: Body) -> Sequence[Any]:
    """Run a segment whose activations autograd does not save, and return its results."""
    if not torch.is_grad_enabled():
        return body(False)
    segment = _Segment(body)
    with saved_tensors_hooks(segment.pack, segment.unpack):
        results = body(False)
    hook = _refill_hook(segment)
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(hook)
    return results


def _refill_hook(segment: _Segment) -> Callable[[Tensor], None]:
    """The hook of all results. It holds the segment until the first of them calls it: a rank that has saved nothing must take
    part in the exchanges of the second run too. Longer it must not: hooks live as long as the graph, a segment only until
    all that was saved for it has been used."""
    waiting = [segment]

    def hook(_: Tensor) -> None:
        if waiting:
            waiting.pop().refill()

    return hook


class _Segment:
    """One run of a segment: how many tensors it saved and, from its backward on, the tensors."""

    def __init__(self, body: Body) -> None:
        self.body, self.count = body, 0
        self.saved: dict[int, Tensor] = {}
        self.has_rerun = False

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        assert self.has_rerun, "backward reached a segment without its results' gradients"
        return self.saved.pop(number)  # an op's backward unpacks it once

    def refill(self) -> None:
        """Run the segment again and keep what it saves."""
        self.has_rerun = True
        with torch.enable_grad(), saved_tensors_hooks(self._store, _refuse_unpack):
            self.body(True)
        assert len(self.saved) == self.count, f"a segment saved {self.count} tensors first and {len(self.saved)} now"

    def _store(self, tensor: Tensor) -> int:
        """Without its history: that holds these hooks, they this segment, and so nothing would ever be freed."""
        self.saved[len(self.saved)] = tensor.detach()
        return -1


def _refuse_unpack(number: int) -> Tensor:
    raise AssertionError("the graph of a second run has no backward")
