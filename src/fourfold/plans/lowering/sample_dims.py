"""Which values of a graph keep samples apart: what must hold before a batch may be cut into micro-batches.

A value is *spread* if one factor of one of its dims counts samples and every element depends on its own sample alone. Whether
an op keeps that is read from its nest: the samples must lie along one `map` loop, the same one for all operands, and come
out of it in every result. The nests are those of a probe: the graph at a prime batch larger than every other size, so
that a factor is the samples if and only if the prime divides it, and no other dim passes for the batch by accident.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.graph import Graph, Op, Size
from fourfold.ops.nest import Concat, Dim, Loop, Nest, Term, Window, nest_of
from fourfold.ops.window import ShiftedWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The samples are a factor of dim `dim` with `inner` elements inside it; `counting`: the value is their own number."""

    dim: int
    inner: int
    counting: bool = False


@dataclass(frozen=True, slots=True)
class Mixed:
    """Samples met, or the value knows the batch size; `why` begins with the op at fault."""

    why: str


State = Spread | Mixed | None
"""None: the value does not depend on the batch."""

_SHAPED = (
    "view",
    "reshape",
    "_unsafe_view",
    "expand",
    "broadcast_to",
    "zeros",
    "ones",
    "empty",
    "rand",
    "randn",
    "repeat",
    "unflatten",
    "slice",
    "narrow",
    "split",
    "split_with_sizes",
    "arange",
)
"""Ops whose plain numbers are sizes."""
_UNIFORM = ("full", "zeros", "ones", "empty", "rand", "randn", "expand", "broadcast_to", "repeat")
"""Ops that make rows for every sample from none, all alike (or drawn alike)."""
_PIECES = ("cat", "concat", "slice")
_SAME_VALUES = ("view", "reshape", "unsqueeze", "squeeze", "to", "_to_copy", "alias", "clone", "contiguous", "detach")


def kind_of(op: Op) -> str:
    return op.target.split(".")[1]


def probe(graph: Graph) -> Graph:
    """The graph at a prime batch that no other size in it reaches."""
    numbers = [n for spec in graph.values.values() for n in _numbers(spec.shape)]
    numbers += [n for op in graph.ops for n in _numbers((op.args, op.kwargs)) if n < 1 << 24]
    return graph.at(next(n for n in itertools.count(max(numbers, default=1) + 1) if _is_prime(n)))


def probe_batch(graph: Graph, probed: Graph) -> int:
    name = next(n for n in (*graph.inputs, *graph.targets) if graph.batch_dim(n) is not None)
    dim = graph.batch_dim(name)
    assert dim is not None
    return int(probed.values[name].shape[dim])


class Samples:
    """The state of every value of a symbolic graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.probe = graph, probe(graph)
        self.batch = probe_batch(graph, self.probe)
        self.states: dict[str, State] = {}
        self.norms: list[Op] = []  # ops that take statistics over the batch and are let pass
        written = {buffer for buffer, _ in graph.writes}
        for parameter in graph.parameters:
            why = f"buffer {parameter.key} changes with every micro-batch"
            self.states[parameter.name] = Mixed(why) if parameter.name in written else None
        for name in (*graph.inputs, *graph.targets):
            dim = graph.batch_dim(name)
            self.states[name] = None if dim is None else Spread(dim=dim, inner=1)
        self.states |= {constant.name: None for constant in graph.constants}
        for op, at_probe in zip(graph.ops, self.probe.ops, strict=True):
            self._visit(op, at_probe)

    def _visit(self, op: Op, at_probe: Op) -> None:
        given = [self.states[name] for name in op.operands]
        mixed = next((state for state in given if isinstance(state, Mixed)), None)
        found: State | tuple[Loop, int] = mixed or self._piecewise(op, at_probe)
        if found is None:
            found = self._fresh(op) if all(state is None for state in given) else self.loop(op, at_probe)
        states = self._through(op, at_probe, *found) if isinstance(found, tuple) else [found] * len(op.results)
        self.states.update(zip(op.results, states, strict=True))

    def sized(self, name: str) -> bool:
        """Whether the shape of a value depends on the batch."""
        return any(isinstance(size, Size) for size in self.graph.values[name].shape)

    def _fresh(self, op: Op) -> State:
        """The state of a value made of none that depends on the batch."""
        if _batch_numbers(op):
            return Mixed(f"{op.path} uses the batch size as a number")
        if not any(self.sized(name) for name in op.results):
            return None
        places = [(d, size) for d, size in enumerate(self.graph.values[op.results[0]].shape) if isinstance(size, Size)]
        (dim, size), kind = places[0], kind_of(op)
        if len(places) == len(op.results) == 1 and size.const == 0:
            if kind in _UNIFORM:
                return Spread(dim=dim, inner=size.coef)
            if kind == "arange" and size.coef == 1 and (len(op.args) == 1 or (op.args[0] == 0 and len(op.args) == 2)):
                return Spread(dim=dim, inner=1, counting=True)
        return Mixed(f"{op.path} depends on the place of a sample in the batch")

    def _piecewise(self, op: Op, at_probe: Op) -> Spread | None:
        """Whole batches put one after another, or such taken apart again: samples inside stay where they were."""
        given = {self.states[name] for name in op.operands}
        state = next(iter(given), None)
        if kind_of(op) not in _PIECES or len(given) > 1 or not isinstance(state, Spread) or state.counting:
            return None
        starts = [_start(term) for term in nest_of(at_probe, self.probe).operands[0][state.dim] if isinstance(term, Window)]
        sizes = [self.probe.values[name].shape[state.dim] for name in (*op.operands, *op.results)]
        whole = all(n is not None and n % (state.inner * self.batch) == 0 for n in (*starts, *sizes))
        return state if whole else None

    def loop(self, op: Op, at_probe: Op) -> tuple[Loop, int] | Mixed:
        """The loop of an op that holds the samples, and how many of its steps lie from one sample to the next."""
        if _batch_numbers(op):
            return Mixed(f"{op.path} uses the batch size as a number")
        nest = nest_of(at_probe, self.probe)
        if nest.kernel == "replicated":
            return Mixed(f"{op.path} ({op.target}) has no rule that keeps samples apart")
        found: set[tuple[str, int] | None] = set()
        for name, dims in zip(op.operands, nest.operands, strict=True):
            state = self.states[name]
            if isinstance(state, Spread) and not self._counts_along(op, state, nest):
                return Mixed(f"{op.path} depends on the place of a sample in the batch")
            if isinstance(state, Spread):
                found.add(_within(dims[state.dim], state.inner, self.batch, nest))
        one = found.pop()
        if found or one is None:
            return Mixed(f"{op.path} mixes samples")
        if nest.detail.get("causal") and one[0] == "t":
            return Mixed(f"{op.path} depends on the place of a sample in the batch")
        return nest.loop(one[0]), one[1]

    def _counts_along(self, op: Op, state: Spread, nest: Nest) -> bool:
        """Sample numbers may only be passed on, or pick each sample's own row of a value that is spread."""
        if not state.counting or kind_of(op) in _SAME_VALUES:
            return True
        source = self.states[op.operands[0]]
        if kind_of(op) != "index" or not isinstance(source, Spread):
            return False
        return any(isinstance(term, Window) for term in nest.operands[0][source.dim])

    def _through(self, op: Op, at_probe: Op, loop: Loop, inner: int) -> list[State]:
        """The states of an op's results."""
        if loop.kind == "joint" and kind_of(op) in ("batch_norm", "instance_norm"):
            self.norms.append(op)
        elif loop.kind != "map":
            return [Mixed(f"{op.path} mixes samples")] * len(op.results)
        nest = nest_of(at_probe, self.probe)
        counting = kind_of(op) in _SAME_VALUES and any(
            isinstance(state, Spread) and state.counting for state in map(self.states.get, op.operands)
        )
        out: list[State] = []
        for name, dims in zip(op.results, nest.results, strict=True):
            place = _place(dims, loop, inner, nest)
            sizes = [size for size in self.graph.values[name].shape if isinstance(size, Size)]
            alone = place is not None and len(sizes) == 1 and sizes[0].const == 0
            out.append(replace(place, counting=counting) if place and alone else Mixed(f"{op.path} mixes samples"))
        return out


def _within(terms: Dim, inner: int, batch: int, nest: Nest) -> tuple[str, int] | None:
    """The loop that holds the samples, of which one has `inner` elements of the dim, and how many of the loop's steps."""
    inside = 1
    for term in reversed(terms):
        size = _size(term, nest)
        if size is None:
            return None
        if inner % inside == 0 and (inside * size) % (inner * batch) == 0:
            name = term.loop if isinstance(term, Window) else term
            return (name, inner // inside) if isinstance(name, str) else None
        inside *= size
    return None


def _place(dims: tuple[Dim, ...], loop: Loop, inner: int, nest: Nest) -> Spread | None:
    for d, terms in enumerate(dims):
        inside = 1
        for term in reversed(terms):
            size = _size(term, nest)
            if term == loop.name:
                return Spread(dim=d, inner=inside * inner)
            if size is None:
                return None
            inside *= size
    return None


def _size(term: Term, nest: Nest) -> int | None:
    """Elements of a factor; None where rows do not stay in their place."""
    if isinstance(term, Window):
        need = term.need
        return need.size if isinstance(need, ShiftedWindow) and need.start == 0 and need.count == need.size else None
    if isinstance(term, Concat):
        return None
    return term if isinstance(term, int) else nest.loop(term).size


def _start(window: Window) -> int | None:
    """The first row of a slice; None for other windows."""
    return window.need.start if isinstance(window.need, ShiftedWindow) else None


def _batch_numbers(op: Op) -> bool:
    """Whether the batch size enters as a number to compute with, not as a size."""
    kind, args = kind_of(op), op.args
    if kind in _SHAPED:
        return False
    return any(isinstance(leaf, Size) for leaf in leaves((args[1:] if kind == "full" else args, op.kwargs)))


def leaves(literal: Any) -> Iterator[Any]:
    if isinstance(literal, (tuple, list)):
        for item in literal:
            yield from leaves(item)
    elif isinstance(literal, Mapping):
        yield from leaves(tuple(literal.values()))
    else:
        yield literal


def _numbers(literal: Any) -> Iterator[int]:
    for leaf in leaves(literal):
        if isinstance(leaf, Size):
            yield from (abs(leaf.coef), abs(leaf.const))
        elif isinstance(leaf, int):
            yield abs(leaf)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def ancestors(graph: Graph, names: Iterable[str]) -> set[str]:
    """The values and all they are made of."""
    out = set(names)
    for op in reversed(graph.ops):
        if out & set(op.results):
            out.update(op.operands)
    return out
