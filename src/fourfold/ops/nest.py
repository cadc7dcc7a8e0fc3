"""How an op may be split, said as a nest of loops: the one form every op rule takes.

An op is read as loops over its index space, as in an einsum: a convolution is ``n f c`` and one loop per spatial dim.
Each dim of each operand and result is a product of loops, or a window onto one. Splitting an op over a mesh axis means
splitting one loop; from the nest alone follows what every operand must hold and what every result becomes:

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
    where it may be cut: the loop is `outer` equal blocks, each cut at multiples of `unit`. Loops with the same `tied` name are
    split together, by the same axes.
    """

    name: str
    size: int
    labels: tuple[str, ...] = ()
    kind: Kind = "map"
    unit: int = 1
    outer: int = 1
    tied: str = ""


class Need(Protocol):
    """What a window reads: input indices from output indices. A value, so that answers can be kept."""

    def __call__(self, outputs: IndexSet) -> IndexSet: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Window:
    """An operand dim read through a window: output indices of `loop` need the input indices `need` gives."""

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
class Kept:
    """Memory an op keeps for backward that is none of its operands or results: its dims, and bytes of an element.

    Without `item` an element is as large as one of the first result. `page`: it is rounded up to a multiple of this.
    """

    dims: tuple[Dim, ...]
    item: int = 0
    page: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """The loops of one op and how its tensors lie along them.

    `linear`: operands in which the op is jointly linear, so that partial values may pass. `kernel`: the runtime's way to run a
    shard, where the plain ATen call does not do. `anchor`: the op has a split of its own; others follow their inputs.
    `saved`: operands (``0, 1...``) and results (``-1, -2...``) autograd keeps for backward; `when`: operands it keeps only if
    one of these operands needs a gradient; `kept`: what else it keeps. All three are of the op itself: where a kernel with
    collectives takes its place, `plans.lists.saved_tensors` knows what that keeps.
    """

    loops: tuple[Loop, ...]
    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    linear: tuple[int, ...] = ()
    kernel: str = "plain"
    anchor: bool = False
    flops: int = 0
    saved: tuple[int, ...] = ()
    when: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)

    def loop(self, name: str) -> Loop:
        return next(loop for loop in self.loops if loop.name == name)

    def labelled(self, label: str) -> tuple[Loop, ...]:
        return tuple(loop for loop in self.loops if label in loop.labels and loop.kind != "whole")


Rule = Callable[[Op, Graph], Nest | None]
"""A rule may answer None: this call has a form it does not cover, and the op runs replicated."""

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
    """The nest of an op: by its rule, or one that runs it whole on every rank."""
    memo: dict[str, Nest] = graph.memo.setdefault("nests", {})
    if op.name not in memo:
        found = find_rule(op)
        nest = found(op, graph) if found else None
        memo[op.name] = same(nest if nest is not None else replicated(op, graph), graph)
    return memo[op.name]


def same(nest: Nest, graph: Graph) -> Nest:
    """The first nest of a graph that equals this one: layers repeat, and what is derived of one holds for all."""
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
        tuple(nest.when.items()),
        nest.kept,
        repr(nest.detail),
    )
    return known.setdefault(key, nest)


def replicated(op: Op, graph: Graph) -> Nest:
    """No split at all: operands gathered, the op run on every rank."""

    def whole(names: tuple[str, ...]) -> tuple[tuple[Dim, ...], ...]:
        return tuple(tuple((int(size),) for size in graph.values[name].shape) for name in names)

    return Nest(loops=(), operands=whole(op.operands), results=whole(op.results), kernel="replicated")


class Call:
    """Arguments of an op by position or keyword, with the shapes of its tensors: what rules read."""

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
