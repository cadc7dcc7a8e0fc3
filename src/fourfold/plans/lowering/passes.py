"""A run of ops that is gone through once per pass: what enters and leaves it, and whether it can be gone through so at all."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph import Graph, Op, Size
from fourfold.ops.nest import nest_of
from fourfold.plans.spec.plan import Passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Ops one after the other; the one tensor that enters them, and those that leave, each with its batch dim."""

    ops: tuple[Op, ...]
    entry: str
    dim: int
    exits: tuple[tuple[str, int], ...]


def run_of(region: Passes, at: int, graph: Graph, symbolic: Graph, *, known: Set[str]) -> Run:
    """The run that begins with the op at this place. `known`: values made before it; `symbolic`: with an open batch."""
    ops = graph.ops
    end = next((i for i in range(at, len(ops)) if ops[i].path == region.last), None)
    if end is None:
        raise InvalidInput(f"passes end at '{region.last}', which does not follow '{region.first}'")
    inside = ops[at : end + 1]
    made = {name for op in inside for name in op.results}
    entries = [n for n in dict.fromkeys(n for op in inside for n in op.operands) if n in known and n not in made]
    used = {graph.loss, *graph.outputs, *(n for op in ops[end + 1 :] for n in op.operands)}
    exits = [n for op in inside for n in op.results if n in used]
    _check(region, inside, graph, symbolic)
    if len(entries) != 1:
        raise Infeasible(f"passes from {region.first} need one tensor to enter, {len(entries)} do; use count=1")
    dim, *outs = (symbolic.batch_dim(name) for name in (*entries, *exits))
    if dim is None or None in outs:
        raise Infeasible(f"passes from {region.first} need tensors with a batch dim of its own; use count=1")
    leaves = tuple((name, d) for name, d in zip(exits, outs, strict=True) if d is not None)
    return Run(ops=inside, entry=entries[0], dim=dim, exits=leaves)


def _check(region: Passes, inside: tuple[Op, ...], graph: Graph, symbolic: Graph) -> None:
    """Refuse passes over ops that see several examples at once, or that write buffers."""
    made = {name for op in inside for name in op.results}
    for buffer, value in graph.writes:
        if value in made:
            raise Infeasible(f"passes from {region.first} cover a write to buffer {buffer}; use count=1")
    for op in inside:
        nest = nest_of(op, graph)
        kinds = {loop.name: loop.kind for loop in nest.loops}
        for name, dims in zip((*op.operands, *op.results), (*nest.operands, *nest.results), strict=True):
            sized = [d for d, size in enumerate(symbolic.values[name].shape) if isinstance(size, Size)]
            if any(kinds.get(t if isinstance(t, str) else "") != "map" for d in sized for t in dims[d]):
                raise Infeasible(f"passes from {region.first} cover {op.path}, which mixes examples; use count=1")
