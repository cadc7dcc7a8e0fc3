"""Softmax and scaled-dot-product attention.

Heads are `filter`, the query positions are `domain:0` (keys and values are then gathered), samples are `batch`. With
grouped heads the key-value heads are divided and each rank keeps the query heads that belong to them.
"""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Kept, Loop, Nest, rule


@rule("softmax.int", "log_softmax.int", "_softmax", "_log_softmax")
def softmax(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    dim = op.args[1] % len(x)
    loops = tuple(Loop(name=f"i{d}", size=size, kind="joint" if d == dim else "map") for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(
        loops=loops,
        operands=(dims,),
        results=(dims,),
        kernel="softmax",
        flops=5 * math.prod(x),
        saved=(-1,),
        detail={"dim": dim, "log": "log_softmax" in op.target},
    )


@rule("scaled_dot_product_attention")
def attention(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "query key value attn_mask dropout_p is_causal scale enable_gqa")
    q, k, v = call.shape("query"), call.shape("key"), call.shape("value")
    if not len(q) == len(k) == len(v) == 4 or q[0] != k[0] or q[0] != v[0]:
        return None
    heads, shared = q[1], k[1]
    if heads % shared or v[1] != shared or (heads != shared and not call.get("enable_gqa", False)):
        return None
    loops = [
        Loop(name="n", size=q[0], labels=("batch",)),
        Loop(name="h", size=shared, labels=("filter",)),
        Loop(name="t", size=q[2], labels=("domain:0",)),
    ]
    head: Dim = ("h",)
    if heads != shared:
        loops.append(Loop(name="g", size=heads // shared, labels=("filter",)))
        head = ("h", "g")
    operands: list[tuple[Dim, ...]] = [
        (("n",), head, ("t",), (q[3],)),
        (("n",), ("h",), (k[2],), (k[3],)),
        (("n",), ("h",), (v[2],), (v[3],)),
    ]
    if call["attn_mask"] is not None:
        mask = call.shape("attn_mask")
        full: tuple[Dim, ...] = (("n",), head, ("t",), (k[2],))
        sizes = (q[0], heads, q[2], k[2])
        first = 4 - len(mask)
        operands.append(tuple(full[first + d] if size == sizes[first + d] else () for d, size in enumerate(mask)))
    return Nest(
        loops=tuple(loops),
        operands=tuple(operands),
        results=((("n",), head, ("t",), (v[3],)),),
        kernel="attention",
        anchor=True,
        flops=2 * q[0] * heads * q[2] * k[2] * (q[3] + v[3]),
        saved=(0, 1, 2, -1) if q[3] == v[3] else (2,),
        kept=_kept(head, (q, k, v), tuple(operands[3:]), call),
        detail={
            "causal": bool(call.get("is_causal", False)),
            "dropout": call.get("dropout_p", 0.0),
            "scale": call["scale"],
            "group": heads // shared,
        },
    )


def _kept(head: Dim, shapes: tuple[tuple[int, ...], ...], masks: tuple[tuple[Dim, ...], ...], call: Call) -> tuple[Kept, ...]:
    """The logarithms of the sums; a mask of booleans as numbers. Written out, with dropout: weights, mask and their product.

    Where the fast kernel does not apply (other widths of values, a mask with a gradient) torch keeps the weights and copies of
    query and key too.
    """
    q, k, v = shapes
    weights: tuple[Dim, ...] = (("n",), head, ("t",), (k[2],))
    if call.get("dropout_p", 0.0):
        return (Kept(weights), Kept(weights), Kept(weights))
    if v[3] != q[3]:
        return (Kept(weights), Kept((("n",), head, ("t",), (q[3],))), Kept((("n",), head, (k[2],), (q[3],))))
    boolean = bool(masks) and call.spec("attn_mask").dtype == "bool"
    return (Kept((("n",), head, ("t",))), *(Kept(mask) for mask in masks if boolean))
