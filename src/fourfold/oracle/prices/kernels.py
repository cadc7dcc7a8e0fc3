"""The local kernels of a program: what is timed on a device, or priced where nothing was timed.

A kernel is an op with the shapes one rank sees. Its key says everything its time depends on but the device, so that tables
of measured kernels serve every plan and model in which the same work occurs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.graph import Graph, Op, Ref
from fourfold.graph.spec import TensorSpec, map_leaves
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lowering.program import Compute

FREE_TARGETS = (
    "aten.view",
    "aten.reshape",
    "aten.permute",
    "aten.transpose",
    "aten.t.",
    "aten.unsqueeze",
    "aten.squeeze",
    "aten.expand",
    "aten.slice",
    "aten.select",
    "aten.detach",
    "aten.alias",
    "aten.flatten",
    "aten.unbind",
    "aten.split",
    "aten.chunk",
    "aten.unflatten",
)
"""Ops that make views: they move nothing."""
PART_TARGETS = ("aten.slice", "aten.select", "aten.unbind", "aten.split", "aten.chunk", "aten.narrow")
"""Those whose views are parts of the operand."""
MATRIX = ("conv", "linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "attention", "lstm", "gru", "rnn")
"""Kernels and ops bound by arithmetic, for which backward does the work of forward once per operand with a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One op on the shapes of one rank."""

    target: str
    way: str  # how the runtime runs it: the nest's kernel, and the kinds of loops that are split
    arguments: str
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    gradients: tuple[bool, ...]  # which operands backward gives a gradient
    flops: float

    @property
    def key(self) -> str:
        """What a table of measured kernels knows it by."""
        shapes = ["x".join(map(str, spec.shape)) + ":" + spec.dtype for spec in (*self.operands, *self.results)]
        wanted = "".join("g" if g else "-" for g in self.gradients)
        return f"{self.target}|{self.way}|{self.arguments}|{' '.join(shapes)}|{wanted}"

    @property
    def moved(self) -> float:
        """Bytes read and written at least once."""
        return 0.0 if self.target.startswith(FREE_TARGETS) else float(sum(s.bytes for s in (*self.operands, *self.results)))

    @property
    def empty(self) -> bool:
        """Whether the rank has no part of the results."""
        return all(spec.numel == 0 for spec in self.results)

    @property
    def backward_flops(self) -> float:
        wanted = sum(self.gradients)
        return self.flops * (wanted if self.matrix else min(wanted, 1))

    @property
    def backward_moved(self) -> float:
        """Bytes of gradients in and out, and of what was saved. A view of a part costs nothing forward, but backward it is put
        into a gradient of the whole."""
        if not any(self.gradients):
            return 0.0
        out = sum(spec.bytes for spec, wanted in zip(self.operands, self.gradients, strict=True) if wanted)
        if self.target.startswith(PART_TARGETS):
            return float(out + sum(spec.bytes for spec in self.results))
        return self.moved + out if self.moved else 0.0

    @property
    def matrix(self) -> bool:
        return any(word in f"{self.target} {self.way}" for word in MATRIX)


def kernel_of(
    step: Compute, graph: Graph, coords: Coords, gradients: Mapping[str, bool], dtypes: Mapping[str, str] | None = None
) -> Kernel:
    """The kernel of a step on the rank at the given coordinates. `gradients`: which values have one; `dtypes`: by which others
    those of the graph are replaced."""
    swap = dtypes or {}

    def spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
        return TensorSpec(shape, swap.get(dtype, dtype))

    operands = tuple(
        spec(need.local_shape(coords), graph.values[name].dtype)
        for need, name in zip(step.needs, step.op.operands, strict=True)
    )
    results = tuple(spec(give.local_shape(coords), kind) for give, kind in zip(step.gives, step.dtypes, strict=True))
    kinds = {loop.name: loop.kind for loop in step.nest.loops}
    split = sorted({kinds[name] for name in step.choice.values() if name is not None and name in kinds})
    return Kernel(
        target=step.op.target,
        way=":".join([step.nest.kernel, *split]),
        arguments=_arguments(step.op, graph),
        operands=operands,
        results=results,
        gradients=tuple(gradients.get(name, False) and graph.values[name].is_float for name in step.op.operands),
        flops=step.nest.flops * _share(step, coords),
    )


def _share(step: Compute, coords: Coords) -> float:
    """The part of the op's loops that a rank runs."""
    return math.prod(len(own.at(coords)) / own.size for own in step.loops.values() if own.size)


def _arguments(op: Op, graph: Graph) -> str:
    """The call with its tensors numbered instead of named, worked out once."""
    known: dict[str, str] = graph.memo.setdefault("arguments", {})
    if op.name not in known:
        known[op.name] = _numbered(op)
    return known[op.name]


def _numbered(op: Op) -> str:
    numbers: dict[str, int] = {}

    def leaf(value: Any) -> Any:
        return f"${numbers.setdefault(value.name, len(numbers))}" if isinstance(value, Ref) else value

    args, kwargs = map_leaves(op.args, leaf), map_leaves(dict(op.kwargs), leaf)
    return repr((args, sorted(kwargs.items()))).replace(" ", "")
