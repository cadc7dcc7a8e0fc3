"""Reductions over dims. Sums and means add up over shards. Extremes, variances, norms and log-sum-exps are `joint`: the
kernel combines the partial results of the ranks, a few numbers each. Products keep the reduced dims whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Kind, Loop, Nest, rule

_ARGUMENTS = {
    "aten.var.default": "input unbiased",
    "aten.std.default": "input unbiased",
    "aten.var_mean.default": "input unbiased",
    "aten.std_mean.default": "input unbiased",
    "aten.var.dim": "input dim unbiased keepdim",
    "aten.std.dim": "input dim unbiased keepdim",
    "aten.var_mean.dim": "input dim unbiased keepdim",
    "aten.std_mean.dim": "input dim unbiased keepdim",
    "aten.var.correction": "input dim correction",
    "aten.std.correction": "input dim correction",
    "aten.var_mean.correction": "input dim correction",
    "aten.std_mean.correction": "input dim correction",
    "aten.linalg_vector_norm.default": "input ord dim keepdim",
    "aten.norm.ScalarOpt_dim": "input ord dim keepdim",
    "aten.norm.Scalar": "input ord",
}


def _reduced_dims(op: Op, graph: Graph) -> set[int]:
    """The dims reduced, from the arguments."""
    x = graph.values[op.operands[0]].shape
    names = _ARGUMENTS.get(op.target, "input dim keepdim").split()
    dims: Any = op.kwargs.get("dim")
    if "dim" in names and names.index("dim") < len(op.args):
        dims = op.args[names.index("dim")]
    if dims is None or dims == () or (op.target.endswith(".default") and not isinstance(dims, (tuple, int))):
        return set(range(len(x)))
    return {d % len(x) for d in ((dims,) if isinstance(dims, int) else dims)} if x else set()


def _nest(
    op: Op,
    graph: Graph,
    kind: Kind,
    kernel: str,
    linear: tuple[int, ...] = (),
    detail: Mapping[str, Any] | None = None,
    saved: tuple[int, ...] = (0, -1),
) -> Nest:
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    reduced_dims = _reduced_dims(op, graph)
    keeps = len(y) == len(x) and bool(reduced_dims)
    loops = tuple(Loop(name=f"i{d}", size=size, kind=kind if d in reduced_dims else "map") for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    result: tuple[Dim, ...] = tuple(
        () if d in reduced_dims else (f"i{d}",) for d in range(len(x)) if d not in reduced_dims or keeps
    )
    count = math.prod(x[d] for d in reduced_dims)
    return Nest(
        loops=loops,
        operands=(dims,),
        results=(result,) * len(op.results),
        linear=linear,
        kernel=kernel,
        flops=math.prod(x),
        saved=() if linear else saved,
        detail={"count": count, "dims": tuple(sorted(reduced_dims)), "keepdim": keeps, **(detail or {})},
    )


@rule("sum")
def sum_(op: Op, graph: Graph) -> Nest | None:
    return _nest(op, graph, "sum", "plain", (0,))


@rule("mean")
def mean(op: Op, graph: Graph) -> Nest | None:
    return _nest(op, graph, "sum", "mean", (0,))


@rule("amax", "amin", "max.default", "min.default")
def extreme(op: Op, graph: Graph) -> Nest | None:
    """Equal extremes share the gradient."""
    return _nest(op, graph, "joint", "extreme", detail={"sign": 1 if "max" in op.target else -1})


@rule("max.dim", "min.dim", "argmax", "argmin")
def extreme_with_index(op: Op, graph: Graph) -> Nest | None:
    """The extreme along one dim and its index in the whole dim; the first of several equal ones gets the gradient."""
    reduced_dims = _reduced_dims(op, graph)
    kind: Kind = "joint" if len(reduced_dims) == 1 and len(graph.values[op.operands[0]].shape) > 1 else "whole"
    values = len(op.results) > 1
    detail = {"sign": 1 if "max" in op.target else -1, "values": values}
    return _nest(op, graph, kind, "picked", detail=detail, saved=(-2,) if values else ())


@rule("var", "std", "var_mean", "std_mean")
def moments(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, _ARGUMENTS[op.target])
    if "correction" in op.target:
        correction = call.get("correction")
        correction = 1 if correction is None else correction
    else:
        correction = int(call.get("unbiased", True))
    name = op.target.split(".")[1]
    detail = {"correction": correction, "root": name.startswith("std"), "mean": name.endswith("mean")}
    return _nest(op, graph, "joint", "moments", detail=detail, saved=(0, -1) if name.startswith("std") else (0,))


@rule("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim")
def vector_norm(op: Op, graph: Graph) -> Nest | None:
    order = Call(op, graph, _ARGUMENTS[op.target]).get("ord", 2)
    order = 2 if order is None else order
    joint = math.isfinite(order) and order >= 1 and op.kwargs.get("dtype") is None
    return _nest(op, graph, "joint" if joint else "whole", "vector_norm", detail={"order": float(order)})


@rule("logsumexp")
def logsumexp(op: Op, graph: Graph) -> Nest | None:
    return _nest(op, graph, "joint", "logsumexp")


@rule("any", "all", "prod")
def whole(op: Op, graph: Graph) -> Nest | None:
    return _nest(op, graph, "whole", "plain")
