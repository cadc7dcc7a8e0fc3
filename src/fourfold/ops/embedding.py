"""Table look-ups. `filter` divides the features, `channel` the vocabulary: rows a rank does not own count as zero, the
result is Partial.
"""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, rule


@rule("embedding")
def embedding(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "weight indices padding_idx scale_grad_by_freq sparse")
    if call.get("scale_grad_by_freq") or call.get("sparse"):
        return None
    table, ids = call.shape("weight"), call.shape("indices")
    lead = [Loop(name=f"b{i}", size=size, labels=("batch",) if i == 0 else (f"domain:{i - 1}",)) for i, size in enumerate(ids)]
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in lead)
    loops = (
        *lead,
        Loop(name="v", size=table[0], labels=("channel",), kind="sum"),
        Loop(name="f", size=table[1], labels=("filter",)),
    )
    return Nest(
        loops=loops, operands=((("v",), ("f",)), dims), results=((*dims, ("f",)),), kernel="embedding", anchor=True,
        flops=math.prod(call.result), saved=(1,), detail={"padding": call.get("padding_idx", -1)},
    )  # fmt: skip


@rule("index_select")
def index_select(op: Op, graph: Graph) -> Nest | None:
    x, ids = (graph.values[name].shape for name in op.operands)
    dim = op.args[1] % len(x)
    loops = tuple(Loop(name=f"i{d}", size=ids[0] if d == dim else size) for d, size in enumerate(x)) if ids else ()
    if not ids:
        return None
    dims: tuple[Dim, ...] = tuple((x[d],) if d == dim else (f"i{d}",) for d in range(len(x)))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(loops=loops, operands=(dims, ((f"i{dim}",),)), results=(result,), saved=(1,))


@rule("gather")
def gather(op: Op, graph: Graph) -> Nest | None:
    x, ids = (graph.values[name].shape for name in op.operands[:2])
    dim = op.args[1] % len(x)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(ids) if d != dim and size == x[d])
    names = {loop.name for loop in loops}

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return tuple((f"i{d}",) if f"i{d}" in names else (size,) for d, size in enumerate(shape))

    if len(op.operands) != 2:
        return None
    return Nest(loops=loops, operands=(dims(x), dims(ids)), results=(dims(ids),), saved=(1,))
