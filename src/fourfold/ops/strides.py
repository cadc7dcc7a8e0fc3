"""The strides of results, computed as torch computes them: they decide whether a reshape is a view or a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """The strides of a tensor in row-major order."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = contiguous_strides(shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, expected, strict=True)) or math.prod(shape) == 0


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether its elements fill a block of memory, in whatever order."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def dense_strides_like(shape: Shape, strides: Shape) -> Shape:
    """Strides of a new dense tensor whose dims are ordered in memory as those of another."""
    order = sorted(range(len(shape)), key=lambda d: (strides[d], -d))
    out, step = [0] * len(shape), 1
    for d in order:
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """The strides of a tensor viewed under another shape, or None where the elements must be copied."""
    if is_contiguous(shape, strides):
        return contiguous_strides(new)
    if math.prod(shape) != math.prod(new) or math.prod(shape) == 0:
        return None
    out: list[int] = []
    at, chunk, base = len(new) - 1, 1, strides[-1] if strides else 1
    for d in reversed(range(len(shape))):
        chunk *= shape[d]
        if d and (shape[d - 1] == 1 or strides[d - 1] == chunk * base):
            continue
        covered = 1
        while at >= 0 and (covered < chunk or new[at] == 1):
            out.append(covered * base)
            covered *= new[at]
            at -= 1
        if covered != chunk:
            return None
        if d:
            chunk, base = 1, strides[d - 1]
    return tuple(reversed(out)) if at < 0 else None
