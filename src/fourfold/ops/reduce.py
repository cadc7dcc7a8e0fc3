"""Reductions over dims: sums and means add up over shards; others keep the reduced dims whole."""

from __future__ import annotations

import math
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Dim, Kind, Loop, Nest, rule


def _reduced(op: Op, graph: Graph) -> set[int]:
    """The dims reduced, from the arguments."""
    x = graph.values[op.operands[0]].shape
    dims: Any = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    if dims is None or dims == () or (op.target.endswith(".default") and not isinstance(dims, (tuple, int))):
        return set(range(len(x)))
    return {d % len(x) for d in ((dims,) if isinstance(dims, int) else dims)} if x else set()


def _nest(op: Op, graph: Graph, kind: Kind, kernel: str, linear: tuple[int, ...]) -> Nest | None:
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    gone = _reduced(op, graph)
    keeps = len(y) == len(x) and bool(gone)
    loops = tuple(Loop(name=f"i{d}", size=size, kind=kind if d in gone else "map") for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    result: tuple[Dim, ...] = tuple(() if d in gone else (f"i{d}",) for d in range(len(x)) if d not in gone or keeps)
    count = math.prod(x[d] for d in gone)
    return Nest(
        loops=loops,
        operands=(dims,),
        results=(result,) * len(op.results),
        linear=linear,
        kernel=kernel,
        flops=math.prod(x),
        detail={"count": count, "dims": tuple(sorted(gone)), "keepdim": keeps},
    )


@rule("sum")
def sum_(op: Op, graph: Graph) -> Nest | None:
    return _nest(op, graph, "sum", "plain", (0,))


@rule("mean")
def mean(op: Op, graph: Graph) -> Nest | None:
    return _nest(op, graph, "sum", "mean", (0,))


@rule("amax", "amin", "max.dim", "min.dim", "argmax", "argmin", "var", "std", "logsumexp", "any", "all", "prod",
      "linalg_vector_norm", "norm", "var_mean", "max.default", "min.default")  # fmt: skip
def whole(op: Op, graph: Graph) -> Nest | None:
    if op.target.split(".")[1] in ("linalg_vector_norm", "norm", "var", "std", "var_mean"):
        return None if not isinstance(op.args[-1], (tuple, bool)) else _vector(op, graph)
    return _nest(op, graph, "whole", "plain", ())


def _vector(op: Op, graph: Graph) -> Nest | None:
    """var, std and norms take their dims at varying places: keep only the dims that surely survive."""
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    kept = 0
    while kept < min(len(x), len(y)) - (len(x) == len(y)) and x[kept] == y[kept]:
        kept += 1
    dims: Any = next((a for a in op.args[1:] if isinstance(a, tuple)), None)
    if dims is None or any(d % len(x) < kept for d in dims):
        return None
    loops = tuple(Loop(name=f"i{d}", size=x[d]) for d in range(kept))
    lead: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    inputs: tuple[Dim, ...] = (*lead, *((size,) for size in x[kept:]))
    result: tuple[Dim, ...] = (*lead, *((size,) for size in y[kept:]))
    return Nest(loops=loops, operands=(inputs,), results=(result,) * len(op.results), flops=math.prod(x))
