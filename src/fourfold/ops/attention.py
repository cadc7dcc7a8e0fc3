"""Softmax and scaled-dot-product attention.

Heads are `filter`, the query positions are `domain:0` (keys and values are then gathered), samples are `batch`. With
grouped heads the key-value heads are divided and each rank keeps the query heads that belong to them.
"""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, SavedExtra, rule


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
        saved_extra=_saved_extra(head, (q, k, v), tuple(operands[3:]), call),
        detail={
            "causal": bool(call.get("is_causal", False)),
            "dropout": call.get("dropout_p", 0.0),
            "scale": call["scale"],
            "group": heads // shared,
        },
    )


def _saved_extra(
    head: Dim, shapes: tuple[tuple[int, ...], ...], masks: tuple[tuple[Dim, ...], ...], call: Call
) -> tuple[SavedExtra, ...]:
    """The fused kernel saves the log-sum-exps, and a boolean mask as numbers. With dropout, torch computes attention op by op
    and saves the weights, the mask and their product. Where values are of another width than queries, the fused kernel does not
    apply either, and torch saves the weights and copies of query and key."""
    q, k, v = shapes
    weights: tuple[Dim, ...] = (("n",), head, ("t",), (k[2],))
    if call.get("dropout_p", 0.0):
        return (SavedExtra(weights), SavedExtra(weights), SavedExtra(weights))
    if v[3] != q[3]:
        return (SavedExtra(weights), SavedExtra((("n",), head, ("t",), (q[3],))), SavedExtra((("n",), head, (k[2],), (q[3],))))
    boolean = bool(masks) and call.spec("attn_mask").dtype == "bool"
    return (SavedExtra((("n",), head, ("t",))), *(SavedExtra(mask) for mask in masks if boolean))
