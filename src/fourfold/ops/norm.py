"""Normalisations: batch, group, instance, layer and RMS norm.

Dims that a statistic runs over are `joint` loops: the kernel sums the statistics over the axes that split them, forward
and backward, so that a shard sees the statistics of the whole.
"""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, SavedExtra, rule


def _nest(
    call: Call,
    loops: tuple[Loop, ...],
    x: tuple[Dim, ...],
    operands: list[tuple[Dim, ...]],
    kernel: str,
    saved_extra: tuple[SavedExtra, ...],
    weights: tuple[str, ...],
) -> Nest:
    """`weights`: the names of the affine operands that torch's backward reads, if the call has them."""
    given = [name for name in ("weight", "bias") if name in call.names and call[name] is not None]
    saved = (0, *(1 + given.index(name) for name in weights if name in given))
    return Nest(
        loops=loops,
        operands=(x, *operands),
        results=(x,),
        kernel=kernel,
        flops=8 * math.prod(call.result),
        saved=saved,
        saved_extra=saved_extra,
    )


@rule("batch_norm", "instance_norm")
def batch_norm(op: Op, graph: Graph) -> Nest | None:
    names = "input weight bias running_mean running_var training momentum eps"
    call = Call(op, graph, names)
    x = call.shape("input")
    whole_batch, joint = op.target.startswith("aten.batch_norm"), bool(call["training"])
    given = [name for name in names.split()[1:5] if call[name] is not None]
    # instance norm is per sample, but its running statistics are means over all samples; eval mode is pointwise
    samples = joint and (whole_batch or "running_mean" in given)
    loops = [Loop(name="n", size=x[0], kind="joint" if samples else "map")]
    loops.append(Loop(name="c", size=x[1]))
    loops += [Loop(name=f"d{i}", size=size, kind="joint" if joint else "map") for i, size in enumerate(x[2:])]
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    stats: list[tuple[Dim, ...]] = [(("c",),) for _ in given]
    if whole_batch:
        return _nest(call, tuple(loops), dims, stats, "batch_norm", (SavedExtra((("c",),)),) * 2 if joint else (), ("weight",))
    rows = SavedExtra((("n",), ("c",)))  # of moments, weight and running moments, each repeated for every sample
    count = 2 * joint + ("weight" in given) + 2 * ("running_mean" in given)
    return _nest(call, tuple(loops), dims, stats, "instance_norm", (rows,) * count, ())


@rule("group_norm")
def group_norm(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input groups weight bias eps")
    x, groups = call.shape("input"), call["groups"]
    loops = (
        Loop(name="n", size=x[0]),
        Loop(name="g", size=groups),
        Loop(name="c", size=x[1] // groups, kind="joint"),
        *(Loop(name=f"d{i}", size=size, kind="joint") for i, size in enumerate(x[2:])),
    )
    dims: tuple[Dim, ...] = (("n",), ("g", "c"), *((f"d{i}",) for i in range(len(x) - 2)))
    affine: list[tuple[Dim, ...]] = [(("g", "c"),) for name in ("weight", "bias") if call[name] is not None]
    return _nest(call, loops, dims, affine, "group_norm", (SavedExtra((("n",), ("g",))),) * 2, ("weight",))


@rule("layer_norm", "rms_norm")
def layer_norm(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input normalized weight bias eps")
    if op.target.startswith("aten.rms"):
        call = Call(op, graph, "input normalized weight eps")
    x = call.shape("input")
    first = len(x) - len(call["normalized"])
    loops = tuple(Loop(name=f"i{d}", size=size, kind="joint" if d >= first else "map") for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    names = ("weight",) if op.target.startswith("aten.rms") else ("weight", "bias")
    affine: list[tuple[Dim, ...]] = [dims[first:] for name in names if call[name] is not None]
    moments = SavedExtra(dims[:first])
    saved_extra = (moments, moments)
    if op.target.startswith("aten.rms"):  # the normalised rows too, where a weight multiplies them
        saved_extra = (moments, *((SavedExtra(dims),) if affine else ()))
    return _nest(call, loops, dims, affine, "layer_norm", saved_extra, names)
