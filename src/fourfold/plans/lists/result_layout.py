"""How the results of an op lie in memory: new, or views of an operand; and which gradients it merely passes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.ops.strides import contiguous_strides, dense_strides_like, is_contiguous, is_dense, view_strides
from fourfold.plans.lists.saved_tensors import Share

_PERMUTES = ("permute", "transpose", "t", "numpy_T", "mT", "swapaxes", "adjoint", "matrix_H", "movedim")
_SAME = ("alias", "detach", "lift_fresh")
_IF_SAME_TYPE = ("to", "_to_copy", "type_as")


@dataclass(frozen=True, slots=True)
class Strided:
    """Shape and strides; `of`: the operand whose memory it is, None for its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of: int | None = None

    @staticmethod
    def fresh(shape: tuple[int, ...]) -> Strided:
        return Strided(shape, contiguous_strides(shape))


def _name(share: Share) -> str:
    return share.step.op.target.split(".")[1].rstrip("_") or share.step.op.target


def results(share: Share, operands: Sequence[Strided], over: bool) -> list[Strided]:
    """The op's results on this rank; `over`: it is done in place."""
    shapes, name, kernel = share.results, _name(share), share.step.nest.kernel
    if share.empty or not operands:
        return [Strided.fresh(shape) for shape in shapes]
    first = operands[0]
    if over:
        return [Strided(first.shape, first.strides, 0)]
    if kernel == "reshape":
        strides = view_strides(first.shape, first.strides, shapes[0])
        return [Strided.fresh(shapes[0]) if strides is None else Strided(shapes[0], strides, 0)]
    if name in _PERMUTES:
        return [Strided(shapes[0], _permuted(share, first), 0)]
    if kernel in ("identity", "expand") or name in _SAME or _idle(share, name, first):
        strides = first.strides if shapes[0] == first.shape else _expanded(first, shapes[0])
        return [Strided(shapes[0], strides, 0)]
    if kernel in ("split", "slice") or name == "unbind" or (name in ("slice", "select") and not _divided(share)):
        return [Strided(shape, _cut(first, shape, share), 0) for shape in shapes]
    if name == "broadcast_tensors":
        return [Strided(shape, _expanded(o, shape), k) for k, (o, shape) in enumerate(zip(operands, shapes, strict=True))]
    return [_fresh(share, first, shape) for shape in shapes]


def _fresh(share: Share, first: Strided, shape: tuple[int, ...]) -> Strided:
    """New memory: elementwise ops keep their input's order, and so does attention unless torch writes it out."""
    if share.step.nest.kernel == "attention" and not share.step.nest.detail["dropout"]:
        return Strided(shape, dense_strides_like(shape, first.strides))
    pointwise = share.step.nest.kernel == "plain" and share.step.op.pointwise
    if pointwise and shape == first.shape and is_dense(shape, first.strides):
        return Strided(shape, first.strides)
    return Strided.fresh(shape)


def _idle(share: Share, name: str, first: Strided) -> bool:
    """Whether the op gives back its operand: already contiguous, of the type asked for, nothing to drop."""
    if name == "contiguous":
        return is_contiguous(first.shape, first.strides)
    if name in _IF_SAME_TYPE:
        copies = share.step.op.kwargs.get("copy", False) or True in share.step.op.args[2:]
        return not copies and share.items[0] == share.result_items[0]
    return share.step.nest.kernel == "random" and "dropout" in name and not share.step.nest.saved_extra


def _divided(share: Share) -> bool:
    return bool(share.step.split_axes) and share.divided(f"i{share.step.nest.detail.get('dim', -1)}")


def _permuted(share: Share, first: Strided) -> tuple[int, ...]:
    before, after = share.step.nest.operands[0], share.step.nest.results[0]
    return tuple(first.strides[before.index(dim)] for dim in after)


def _expanded(first: Strided, shape: tuple[int, ...]) -> tuple[int, ...]:
    skip = len(shape) - len(first.shape)
    inner = (s if n == m else 0 for s, n, m in zip(first.strides, first.shape, shape[skip:], strict=True))
    return (*(0,) * skip, *inner)


def _cut(first: Strided, shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """Strides of a part: the same, one dim fewer where a row was picked."""
    if len(shape) == len(first.shape):
        return first.strides
    dim = share.step.nest.detail.get("dim")
    if dim is None:
        dim = share.step.op.args[1] if len(share.step.op.args) > 1 else 0
    return tuple(s for d, s in enumerate(first.strides) if d != dim % len(first.shape))


_PASSING = ("add", "clone", "alias", "contiguous", "sub", "cat", "concat", "stack", "sum", "lift_fresh", "lift_fresh_copy")


def passes_gradient(share: Share, k: int) -> bool:
    """Whether the gradient of operand k is the result's, as it is or as a view of it."""
    name, kernel = _name(share), share.step.nest.kernel
    if share.empty:
        return False
    if kernel in ("reshape", "identity") or name in _PERMUTES:
        return True
    if name == "to" or kernel == "random":
        return share.items[0] == share.result_items[0] and not share.step.nest.saved_extra
    if name in ("add", "sub"):
        return share.operands[k] == share.results[0] and (name == "add" or k == 0) and len(share.step.op.kwargs) == 0
    return name in _PASSING


def is_gradient_strided(share: Share, k: int) -> bool:
    """Whether a gradient that is passed on lies otherwise than operand k: a leaf takes a copy of it then."""
    name = _name(share)
    if name in ("cat", "concat", "stack"):
        op = share.step.op
        dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
        return len(share.operands) > 1 and math.prod(share.results[0][: dim % len(share.results[0])]) > 1
    return name in _PERMUTES or name == "sum"
