"""How an op may be split, described as a nest of loops. Every op rule returns one.

An op is a set of loops over its index space, as in an einsum: a convolution is ``n f c`` and one loop per spatial dim. Each
dim of each operand and result is a product of loops, or a window onto one. Splitting an op over a mesh axis means splitting
one loop. The nest determines what every operand must hold and what every result becomes:

- an operand that has the loop is sharded along it, one that lacks it is replicated and its gradient is partial;
- a result that has the loop is sharded, one that lacks it is partial (a `sum` loop) or the same everywhere (`joint`).

Nothing here knows meshes or layouts; `plans.lowering.op_layouts` joins the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fourfold.graph import Graph, Op, TensorSpec
from fourfold.index import IndexSet

Kind = Literal["map", "sum", "joint", "whole"]
"""map: independent; sum: contracted, results add up; joint: split only with collectives inside the kernel; whole: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One loop of a nest.

    `labels` are the splits that mean this loop (``batch``, ``filter``, ``channel``, ``domain:0``...). `unit` and `outer` say
    where it may be cut: the loop is `outer` equal blocks, each cut at multiples of `unit`. Loops with the same `tie` are split
    together, by the same axes.
    """

    name: str
    size: int
    labels: tuple[str, ...] = ()
    kind: Kind = "map"
    unit: int = 1
    outer: int = 1
    tie: str = ""


class Need(Protocol):
    """Which input indices a window reads for given output indices. Hashable, so that results can be cached."""

    def __call__(self, outputs: IndexSet) -> IndexSet: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Window:
    """An operand dim read through a window: output indices ``o`` of `loop` read the input indices ``need(o)``."""

    loop: str
    need: Need


@dataclass(frozen=True, slots=True)
class Concat:
    """A dim made of the dims of several loops, one after another."""

    loops: tuple[str, ...]


Term = str | int | Window | Concat
"""A loop by name, an unsplittable factor by size, a window, or a concatenation."""
Dim = tuple[Term, ...]
"""Factors of one tensor dim, outermost first; the empty tuple is a dim of size one."""


@dataclass(frozen=True, slots=True)
class SavedExtra:
    """Memory an op saves for backward besides its operands and results. `item`: bytes of an element, by default those of the
    first result. `page`: its bytes are rounded up to a multiple of this."""

    dims: tuple[Dim, ...]
    item: int = 0
    page: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """The loops of one op, and the dims of its operands and results in terms of them.

    `linear`: operands in which the op is jointly linear, so that partial values may pass. `kernel`: the runtime's kernel for a
    shard, where the plain ATen call does not do. `anchor`: the op has a split of its own; others follow their inputs.
    `saved`: operands (``0, 1...``) and results (``-1, -2...``) that autograd saves for backward; `saved_if`: operands it saves
    only if one of these operands needs a gradient; `saved_extra`: what else it saves. All three describe the op itself: where a
    kernel with collectives takes its place, `plans.lists.saved_tensors` knows what that saves.
    """

    loops: tuple[Loop, ...]
    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    linear: tuple[int, ...] = ()
    kernel: str = "plain"
    anchor: bool = False
    flops: int = 0
    saved: tuple[int, ...] = ()
    saved_if: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    saved_extra: tuple[SavedExtra, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)

    def loop(self, name: str) -> Loop:
        return next(loop for loop in self.loops if loop.name == name)

    def loops_with_label(self, label: str) -> tuple[Loop, ...]:
        """The loops that a split with this label may divide."""
        return tuple(loop for loop in self.loops if label in loop.labels and loop.kind != "whole")


Rule = Callable[[Op, Graph], Nest | None]
"""A rule returns None for a call it does not cover; the op then runs replicated."""

_RULES: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen targets, given as ``name`` (all overloads) or ``name.overload``."""

    def register(function: Rule) -> Rule:
        for target in targets:
            _RULES[f"aten.{target}"] = function
        return function

    return register


def find_rule(op: Op) -> Rule | None:
    exact = _RULES.get(op.target)
    if exact is not None:
        return exact
    by_name = _RULES.get(op.target.rsplit(".", 1)[0])
    if by_name is not None:
        return by_name
    return _RULES["aten.<pointwise>"] if op.pointwise else None


def nest_of(op: Op, graph: Graph) -> Nest:
    """The nest that the op's rule returns, or else one that runs it whole on every rank."""
    memo: dict[str, Nest] = graph.memo.setdefault("nests", {})
    if op.name not in memo:
        op_rule = find_rule(op)
        nest = op_rule(op, graph) if op_rule else None
        memo[op.name] = intern_nest(nest if nest is not None else replicated_nest(op, graph), graph)
    return memo[op.name]


def intern_nest(nest: Nest, graph: Graph) -> Nest:
    """The first nest of the graph that equals this one. Layers repeat; with one object for equal nests, results derived from it
    are cached once."""
    known: dict[tuple[Any, ...], Nest] = graph.memo.setdefault("kinds of nests", {})
    key = (
        nest.loops,
        nest.operands,
        nest.results,
        nest.linear,
        nest.kernel,
        nest.anchor,
        nest.flops,
        nest.saved,
        tuple(nest.saved_if.items()),
        nest.saved_extra,
        repr(nest.detail),
    )
    return known.setdefault(key, nest)


def replicated_nest(op: Op, graph: Graph) -> Nest:
    """A nest without splits: operands are gathered, and every rank runs the op."""

    def whole(names: tuple[str, ...]) -> tuple[tuple[Dim, ...], ...]:
        return tuple(tuple((int(size),) for size in graph.values[name].shape) for name in names)

    return Nest(loops=(), operands=whole(op.operands), results=whole(op.results), kernel="replicated")


class Call:
    """The arguments of an op by name, whether positional or by keyword, and the shapes of its tensors."""

    def __init__(self, op: Op, graph: Graph, names: str) -> None:
        self.op, self.graph = op, graph
        self.names = names.split()

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        at = self.names.index(name)
        if at < len(self.op.args):
            return self.op.args[at]
        return self.op.kwargs.get(name, default)

    def spec(self, name: str) -> TensorSpec:
        return self.graph.values[self[name].name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spec(name).shape

    @property
    def result(self) -> tuple[int, ...]:
        return self.graph.values[self.op.results[0]].shape


def whole_dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Every dim unsplit."""
    return tuple((size,) for size in shape)


def spatial_label(index: int) -> tuple[str, ...]:
    return (f"domain:{index}",)
