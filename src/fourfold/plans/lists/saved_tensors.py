"""What a rank's share of an op keeps from its forward to its backward, in bytes.

For most ops the rule says it (`Nest.saved`, `saved_if`, `saved_extra`). Where a kernel of the runtime stands in for the op,
because a loop is divided that its collectives must join or whose border must be padded, this knows what that kernel keeps;
the names are those of `runtime.kernels`.

Left out: single numbers, and tensors that a kernel makes once when it is bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fourfold.ops.nest import SavedExtra, Window
from fourfold.ops.rule_tables import rule_for
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lowering.program import Compute

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saving:
    """Operands (``0, 1...``) and results (``-1, -2...``) an op keeps, and bytes of other tensors."""

    tensors: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Share:
    """One op on one rank: its local shapes, and bytes of an element of each tensor."""

    step: Compute
    coords: Coords
    items: tuple[int, ...]  # of the operands
    result_items: tuple[int, ...]

    @cached_property
    def operands(self) -> tuple[Shape, ...]:
        return tuple(layout.local_shape(self.coords) for layout in self.step.needs)

    @cached_property
    def results(self) -> tuple[Shape, ...]:
        return tuple(layout.local_shape(self.coords) for layout in self.step.gives)

    def operand_bytes(self, k: int) -> int:
        return math.prod(self.operands[k]) * self.items[k]

    def result_bytes(self, k: int) -> int:
        return math.prod(self.results[k]) * self.result_items[k]

    @cached_property
    def empty(self) -> bool:
        """Whether the rank has nothing to do: then no kernel runs."""
        idle = bool(self.step.op.operands) and not self.step.axes_of("joint")
        return idle and all(math.prod(shape) == 0 for shape in self.results)

    def divided(self, *loops: str) -> bool:
        """Whether an axis divides one of the loops."""
        return any(name in loops for name in self.step.choice.values())

    def kept_bytes(self, kept: SavedExtra) -> int:
        count = 1
        for dim in kept.dims:
            for term in dim:
                assert isinstance(term, (int, str))
                count *= term if isinstance(term, int) else len(self.step.loops[term].at(self.coords))
        size = count * (kept.item or self.result_items[0])
        return -(-size // kept.page) * kept.page

    def padded(self) -> Shape | None:
        """The first operand with the border it is given where windows reach beyond the whole tensor; None without one.

        A convolution pads dims that are not divided by itself, unless unevenly; a divided pool leaves nothing to torch, and
        drops what is past the last window.
        """
        shape, grown, own = list(self.operands[0]), False, self.step.nest.kernel == "conv"
        windows = [dim[0] for dim in self.step.nest.operands[0][2:]]
        if not own and not self.divided(*(w.loop for w in windows if isinstance(w, Window))):
            return None
        for i, term in enumerate(windows):
            assert isinstance(term, Window)
            low, high = term.need.reach(self.step.gives[0].box(self.coords)[2 + i])  # type: ignore[attr-defined]
            size, padding = self.step.needs[0].dims[2 + i].size, self.step.nest.detail["padding"][i]
            more = max(0, -low) + max(0, high - size)
            if not self.divided(term.loop):
                if own:
                    more = sum(padding) if padding[0] != padding[1] else 0
                else:
                    shape[2 + i] = min(high, shape[2 + i])
            shape[2 + i], grown = shape[2 + i] + more, grown or more > 0
        return tuple(shape) if grown else None


Rule = Callable[[Share, Sequence[bool]], Saving | None]
_KERNELS: dict[str, Rule] = {}
_kernel = rule_for(_KERNELS)


def saving(share: Share, gradients: Sequence[bool]) -> Saving:
    """What is kept if these operands need gradients."""
    nest = share.step.nest
    if share.empty or not any(gradients):
        return Saving()
    special = _KERNELS.get(nest.kernel)
    found = special(share, gradients) if special is not None else None
    if found is None:
        found = Saving(nest.saved, tuple(map(share.kept_bytes, nest.saved_extra)))
    wanted = (
        k for k in found.tensors if k not in nest.saved_if or any(gradients[j] for j in nest.saved_if[k] if j < len(gradients))
    )
    return Saving(tuple(wanted), found.buffers)


@_kernel("conv", "max_pool", "avg_pool")
def _windows(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Windows over a border: the padded copy is kept, not the operand."""
    nest, padded = share.step.nest, share.padded()
    kept = tuple(map(share.kept_bytes, nest.saved_extra))
    spatial = range(len(nest.detail["kernel"]))
    if nest.kernel == "avg_pool" and share.divided(*(f"d{i}" for i in spatial)) and not nest.detail["divisor"]:
        kept = tuple(share.results[0][2 + i] * share.items[0] for i in spatial)  # what rows are divided by
    if padded is None:
        return Saving(nest.saved, kept)
    return Saving(tuple(k for k in nest.saved if k != 0), (math.prod(padded) * share.items[0], *kept))


@_kernel("batch_norm")
def _batch_norm(share: Share, gradients: Sequence[bool]) -> Saving | None:
    if not share.step.axes_of("joint"):
        return None
    return Saving(share.step.nest.saved, (2 * share.operands[0][1] * share.items[0],))


@_kernel("layer_norm", "group_norm", "instance_norm")
def _normalize(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """The normalised rows, which are the result where no weight or bias follows, and their scales."""
    if not share.step.axes_of("joint"):
        return None
    whole = share.operand_bytes(0)
    scales = math.prod(share.operands[0][: _first(share)]) * share.items[0]
    if share.step.nest.kernel == "group_norm":
        scales = share.operands[0][0] * len(share.step.loops["g"].at(share.coords)) * share.items[0]
    weight = (1,) if len(share.operands) > 1 else ()
    return Saving(weight, (whole, scales)) if weight else Saving((-1,), (scales,))


def _first(share: Share) -> int:
    """The first dim that a statistic runs over."""
    loops = share.step.nest.loops
    return 2 if share.step.nest.kernel == "instance_norm" else next(d for d, loop in enumerate(loops) if loop.kind == "joint")


@_kernel("cross_entropy")
def _cross_entropy(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Classes divided: the log-softmax and, by target, its place, whether it is here, and its weight. Of half-precision
    logits: the log-softmax in their precision, and once more in the loss's."""
    detail = share.step.nest.detail
    if not share.step.axes_of("joint"):
        if detail["soft"] or not detail["logits"] or share.items[0] >= share.result_items[0]:
            return None
        return Saving(share.step.nest.saved, (share.operand_bytes(0), full_bytes(share)))
    rows, item = math.prod(share.operands[0]) // max(share.operands[0][1], 1), share.items[0]
    if detail["soft"]:
        return Saving((1,), (share.operand_bytes(0),))
    picked = (rows * 8, rows, rows * item)
    return Saving((), (share.operand_bytes(0), *picked)) if detail["logits"] else Saving((0,), picked)


def full_bytes(share: Share) -> int:
    """Bytes of the first operand in the result's precision."""
    return math.prod(share.operands[0]) * share.result_items[0]


@_kernel("embedding")
def _embedding(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Vocabulary divided: places and whether they are here."""
    count = math.prod(share.operands[1])
    return Saving((), (count * 8, count)) if share.divided("v") else None


@_kernel("attention")
def _attention(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Query rows divided: what each may see is a mask of its own, kept as numbers."""
    detail, nest = share.step.nest.detail, share.step.nest
    q, k = share.operands[:2]
    if len(gradients) > 3 and gradients[3]:  # torch writes it out
        return Saving((2,), tuple(math.prod(s) * share.items[0] for s in (q, k, (*q[:3], k[2]))))
    if not (detail["causal"] and share.divided("t")) or detail["dropout"] or len(share.operands) > 3:
        return None
    mask = q[2] * k[2] * share.items[0]
    return Saving(nest.saved, (*map(share.kept_bytes, nest.saved_extra), mask))


@_kernel("extreme", "moments", "logsumexp", "picked", "adaptive_max")
def _joined(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Reductions over divided dims: which elements count, their deviations, their exponentials or their places."""
    if not share.step.axes_of("joint"):
        return None
    kernel = share.step.nest.kernel
    if kernel in ("picked", "adaptive_max"):
        return Saving((), (math.prod(share.results[0]) * 8,))
    return Saving((), (math.prod(share.operands[0]) * (1 if kernel == "extreme" else share.items[0]),))


@_kernel("resample")
def _resample(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Divided rows: the weights of the rows a rank has; at most, because where rows are copied their places do."""
    if not share.divided(*(loop.name for loop in share.step.nest.loops[2:])):
        return None
    windows = [2 + i for i, dim in enumerate(share.step.nest.operands[0][2:]) if isinstance(dim[0], Window)]
    return Saving((), tuple(share.results[0][d] * max(share.operands[0][d], 2) * share.items[0] for d in windows))


@_kernel("rows")
def _rows(share: Share, gradients: Sequence[bool]) -> Saving | None:
    """Divided rows are picked by places made once."""
    windows = [dim[0].loop for dim in share.step.nest.operands[0] if dim and isinstance(dim[0], Window)]
    return Saving() if share.divided(*windows) else None
