"""Memory an op takes for itself on a GPU and gives back, and what it keeps otherwise than on a processor.

cuDNN chooses its algorithms by itself, and with `cudnn.benchmark` by trying them. What can be known is what tensor cores
want: input, weight and result with channels last, which are copies; backward the same for the larger of its two halves,
and a few megabytes for partial sums. Of 332 convolutions on one H200 (torch 2.11, cuDNN 9.19, tf32 and bf16) 205 took that
forward (within 5 %), 116 less, as algorithms without copies do, and 11 more, two thirds at most; backward 186 within 10 %,
140 less, 6 more, twice as much at most. It is assumed of all, so as to be high rather than low.

The other figures are those of ATen's kernels, compared with what they took there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fourfold.ops.rule_tables import rule_for
from fourfold.oracle.memory import workspace as processor
from fourfold.oracle.memory.workspace import Workspace
from fourfold.plans.lists.saved_tensors import Saving, Share

MOST_ELEMENTS = 2**31 - 1
"""Tensors with more are convolved a few samples at a time."""
PARTIAL_BYTES = 8 * 2**20
PARTIAL_WEIGHTS = 16
"""Partial sums of a weight's gradient: so many bytes at most, and so many times the weight."""
ALIGNED_BYTES = 16
REDUCED_BYTES = 133 * 2**20
"""The most that sums over rows were seen to take."""

Rule = Callable[[Share, Sequence[bool]], Workspace]
_KERNELS: dict[str, Rule] = {}
_kernel = rule_for(_KERNELS)


def workspace(share: Share, gradients: Sequence[bool]) -> Workspace:
    """What the op takes on this rank, if these operands need gradients; as on a processor where nothing else is known."""
    rule = _KERNELS.get(share.step.nest.kernel)
    if rule is None or share.empty or share.step.axes_of("joint"):
        return processor.workspace(share, gradients, 0)
    return rule(share, gradients)


def kept(share: Share, found: Saving) -> Saving:
    """What an op keeps here: of dropout a mask of booleans."""
    if share.step.nest.kernel == "random" and found.buffers:
        return Saving(found.tensors, tuple(size // share.result_items[0] for size in found.buffers))
    return found


@_kernel("conv", "conv_transpose")
def _conv(share: Share, gradients: Sequence[bool]) -> Workspace:
    padded = share.padded() if share.step.nest.kernel == "conv" else None
    x, w, y = padded or share.operands[0], share.operands[1], share.results[0]
    samples = min(x[0], max(1, MOST_ELEMENTS // max(math.prod(x[1:]), math.prod(y[1:]), 1)))
    weight = math.prod(w) * share.items[1]
    copies = samples * (_sample(x, share.items[0]) + _sample(y, share.result_items[0])) + weight
    border = math.prod(padded) * share.items[0] - share.operand_bytes(0) if padded is not None and gradients[0] else 0
    return Workspace(copies, copies + min(PARTIAL_WEIGHTS * weight, PARTIAL_BYTES) + border)


def _sample(shape: tuple[int, ...], item: int) -> int:
    """Bytes of one sample with channels last, which lie in steps of 16 bytes."""
    return math.prod(shape[2:]) * -(-shape[1] * item // ALIGNED_BYTES) * ALIGNED_BYTES


@_kernel("linear", "addmm")
def _linear(share: Share, gradients: Sequence[bool]) -> Workspace:
    """The bias's gradient is summed over rows in parts: two float32 for each element."""
    biased = len(gradients) > 2 and gradients[2]
    return Workspace(backward=min(8 * math.prod(share.results[0]), REDUCED_BYTES) if biased else 0)


@_kernel("batch_norm", "instance_norm")
def _norm(share: Share, gradients: Sequence[bool]) -> Workspace:
    return Workspace()


@_kernel("embedding")
def _embedding(share: Share, gradients: Sequence[bool]) -> Workspace:
    """The gradient's rows in the order of their places."""
    return Workspace(backward=share.result_bytes(0))


@_kernel("attention")
def _attention(share: Share, gradients: Sequence[bool]) -> Workspace:
    """The queries' gradient in float32; written out with dropout, as on a processor."""
    if share.step.nest.detail["dropout"]:
        return processor.workspace(share, gradients, 0)
    return Workspace(backward=4 * math.prod(share.operands[0]))


@_kernel("resample")
def _resample(share: Share, gradients: Sequence[bool]) -> Workspace:
    divided = share.divided(*(loop.name for loop in share.step.nest.loops[2:]))
    return processor.workspace(share, gradients, 0) if divided else Workspace()
