"""Ops that only move elements: reshapes, permutations, concatenation; and ops that create tensors. Slices and pads, which take
rows of a dim, are in `rows`.

A reshape regroups the factors that its two shapes have in common, so a shard of a factor stays where it is. All are linear:
partial sums pass through.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Concat, Dim, Loop, Nest, replicated_nest, rule


@rule(
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
    "atleast_1d",
    "atleast_2d",
    "ravel",
)
def reshape(op: Op, graph: Graph) -> Nest | None:
    before, after = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    if len(op.operands) > 1 or len(op.results) > 1 or math.prod(before) == 0 or op.target == "aten.view.dtype":
        return None
    loops: list[Loop] = []
    inputs, outputs = common_factors(before, after, loops)
    return Nest(loops=tuple(loops), operands=(inputs,), results=(outputs,), linear=(0,), kernel="reshape")


def common_factors(
    before: tuple[int, ...], after: tuple[int, ...], loops: list[Loop]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Both shapes as products of common factors; factors are added to `loops`."""
    sides: tuple[list[Dim], list[Dim]] = ([], [])
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and before[i] == 1 and not (j < len(after) and after[j] == 1):
            sides[0].append(())
            i += 1
            continue
        if j < len(after) and after[j] == 1 and not (i < len(before) and before[i] == 1):
            sides[1].append(())
            j += 1
            continue
        left, right = i + 1, j + 1
        while math.prod(before[i:left]) != math.prod(after[j:right]):
            if math.prod(before[i:left]) < math.prod(after[j:right]):
                left += 1
            else:
                right += 1
        _add_group(before[i:left], after[j:right], sides, loops)
        i, j = left, right
    return tuple(sides[0]), tuple(sides[1])


def _add_group(a: tuple[int, ...], b: tuple[int, ...], sides: tuple[list[Dim], list[Dim]], loops: list[Loop]) -> None:
    cuts = sorted({math.prod(s[k:]) for s in (a, b) for k in range(len(s) + 1)}, reverse=True)
    if any(high % low for high, low in itertools.pairwise(cuts)):
        common, shared = math.gcd(a[0], b[0]), f"r{len(loops)}"  # they share an outer factor alone
        if common > 1:
            loops.append(Loop(name=shared, size=common))
        for side, shape in zip(sides, (a, b), strict=True):
            side.append((shared, shape[0] // common) if common > 1 else (shape[0],))
            side.extend((size,) for size in shape[1:])
        return
    named: list[tuple[int, str]] = []  # (product of what lies inside, loop)
    for high, low in itertools.pairwise(cuts):
        named.append((low, f"r{len(loops)}"))
        loops.append(Loop(name=f"r{len(loops)}", size=high // low))
    if not named:  # one element on both sides
        named = [(1, f"r{len(loops)}")]
        loops.append(Loop(name=f"r{len(loops)}", size=1))
    for side, shape in zip(sides, (a, b), strict=True):
        for k in range(len(shape)):
            high, low = math.prod(shape[k:]), math.prod(shape[k + 1 :])
            side.append(tuple(name for inner, name in named if low <= inner < high) or ((named[0][1],) if high == 1 else ()))


def permuted_dims(op: Op, graph: Graph, order: list[int], kernel: str = "plain") -> Nest:
    """Result dim k is operand dim order[k]."""
    shape = graph.values[op.operands[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(shape))
    return Nest(
        loops=loops,
        operands=(tuple((loop.name,) for loop in loops),),
        results=(tuple((f"i{d}",) for d in order),),
        linear=(0,),
        kernel=kernel,
    )


@rule("permute", "transpose.int", "t", "numpy_T", "mT", "swapaxes", "adjoint", "matrix_H", "movedim")
def permute(op: Op, graph: Graph) -> Nest | None:
    rank = len(graph.values[op.operands[0]].shape)
    order = list(range(rank))
    name = op.target.split(".")[1]
    if name == "permute":
        order = [d % rank for d in op.args[1]]
    elif name in ("transpose", "swapaxes"):
        a, b = (d % rank for d in op.args[1:3])
        order[a], order[b] = order[b], order[a]
    elif name in ("mT", "adjoint", "matrix_H"):
        order[-2:] = [rank - 1, rank - 2]
    elif name == "movedim":
        sources, targets = (((a,) if isinstance(a, int) else a) for a in op.args[1:3])
        moved = {t % rank: d % rank for d, t in zip(sources, targets, strict=True)}
        rest = iter(d for d in range(rank) if d not in moved.values())
        order = [moved[k] if k in moved else next(rest) for k in range(rank)]
    else:
        order.reverse()
    return permuted_dims(op, graph, order)


@rule("expand", "expand_as", "broadcast_to")
def expand(op: Op, graph: Graph) -> Nest | None:
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(y))
    first = len(y) - len(x)
    dims: tuple[Dim, ...] = tuple((f"i{first + d}",) if size == y[first + d] else () for d, size in enumerate(x))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    like = (result,) * (len(op.operands) - 1)  # the second operand of expand_as
    return Nest(loops=loops, operands=(dims, *like), results=(result,), linear=(0,), kernel="expand")


@rule("repeat")
def repeat(op: Op, graph: Graph) -> Nest | None:
    x, times = graph.values[op.operands[0]].shape, op.args[1]
    if 0 in times:
        return None  # the result is empty
    first = len(times) - len(x)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x))
    result: list[Dim] = [(times[d],) for d in range(first)]
    result += [(times[first + d], f"i{d}") if times[first + d] > 1 else (f"i{d}",) for d in range(len(x))]
    return Nest(loops=loops, operands=(tuple((loop.name,) for loop in loops),), results=(tuple(result),), linear=(0,))


@rule("repeat_interleave.self_int")
def repeat_interleave(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input repeats dim")
    x = call.shape("input")
    if call["dim"] is None:
        return None
    dim = call["dim"] % len(x)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    result: tuple[Dim, ...] = tuple((f"i{d}", call["repeats"]) if d == dim else (f"i{d}",) for d in range(len(x)))
    return Nest(loops=loops, operands=(dims,), results=(result,), linear=(0,))


@rule("cat", "concat", "concatenate")
def cat(op: Op, graph: Graph) -> Nest | None:
    """Along the concatenated dim every piece stays divided as it is: a rank's shard of the result has a span of each piece."""
    shapes = [graph.values[name].shape for name in op.operands]
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % len(shapes[0])
    if any(len(s) != len(shapes[0]) for s in shapes):
        return None
    loops = [Loop(name=f"i{d}", size=size) for d, size in enumerate(shapes[0]) if d != dim]
    loops += [Loop(name=f"k{i}", size=s[dim], tie="k") for i, s in enumerate(shapes)]
    operands = tuple(tuple((f"k{i}",) if d == dim else (f"i{d}",) for d in range(len(s))) for i, s in enumerate(shapes))
    pieces = Concat(tuple(f"k{i}" for i in range(len(shapes))))
    result: tuple[Dim, ...] = tuple((pieces,) if d == dim else (f"i{d}",) for d in range(len(shapes[0])))
    return Nest(loops=tuple(loops), operands=operands, results=(result,), linear=tuple(range(len(shapes))))


@rule("glu")
def glu(op: Op, graph: Graph) -> Nest | None:
    """Row k of one half of a dim times the gate of row k of the other half: a shard has the same rows of both halves."""
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    dim = (op.args[1] if len(op.args) > 1 else -1) % len(x)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(y))
    dims: tuple[Dim, ...] = tuple((2, f"i{d}") if d == dim else (f"i{d}",) for d in range(len(x)))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(loops=loops, operands=(dims,), results=(result,), flops=math.prod(x), saved=(0,))


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def split(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    dim = (op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)) % len(x)
    sizes = [graph.values[name].shape[dim] for name in op.results]
    if sum(sizes) != x[dim]:
        return None
    loops = [Loop(name=f"i{d}", size=size) for d, size in enumerate(x) if d != dim]
    loops += [Loop(name=f"k{i}", size=size, tie="k") for i, size in enumerate(sizes)]
    pieces = Concat(tuple(f"k{i}" for i in range(len(sizes))))
    dims: tuple[Dim, ...] = tuple((pieces,) if d == dim else (f"i{d}",) for d in range(len(x)))
    results = tuple(tuple((f"k{i}",) if d == dim else (f"i{d}",) for d in range(len(x))) for i in range(len(sizes)))
    return Nest(loops=tuple(loops), operands=(dims,), results=results, linear=(0,), kernel="split", detail={"dim": dim})


@rule("unbind")
def unbind(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % len(x)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x) if d != dim)
    dims: tuple[Dim, ...] = tuple((x[dim],) if d == dim else (f"i{d}",) for d in range(len(x)))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(loops=loops, operands=(dims,), results=(result,) * len(op.results), linear=(0,))


@rule("select.int")
def select(op: Op, graph: Graph) -> Nest | None:
    """One row: its owner contributes it, the others zeros."""
    x = graph.values[op.operands[0]].shape
    dim, index = op.args[1] % len(x), op.args[2]
    loops = tuple(Loop(name=f"i{d}", size=size, kind="sum" if d == dim else "map") for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    detail = {"dim": dim, "index": index % x[dim]}
    result = tuple(d for i, d in enumerate(dims) if i != dim)
    return Nest(loops=loops, operands=(dims,), results=(result,), linear=(0,), kernel="select", detail=detail)


@rule("stack")
def stack(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % (len(x) + 1)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    count = len(op.operands)
    result: tuple[Dim, ...] = (*dims[:dim], (count,), *dims[dim:])
    return Nest(loops=loops, operands=(dims,) * count, results=(result,), linear=tuple(range(count)))


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(op: Op, graph: Graph) -> Nest | None:
    x, r = graph.values[op.operands[0]].shape, op.args[1]
    if len(x) != 4:
        return None
    up = op.target.startswith("aten.pixel_shuffle")
    c, h, w = (x[1] // (r * r), x[2], x[3]) if up else (x[1], x[2] // r, x[3] // r)
    loops = (Loop(name="n", size=x[0]), Loop(name="c", size=c), Loop(name="h", size=h), Loop(name="w", size=w))
    small: tuple[Dim, ...] = (("n",), ("c", r, r), ("h",), ("w",))
    large: tuple[Dim, ...] = (("n",), ("c",), ("h", r), ("w", r))
    sides = (small, large) if up else (large, small)
    return Nest(loops=loops, operands=(sides[0],), results=(sides[1],), linear=(0,))


@rule("arange", "full", "zeros", "ones", "scalar_tensor", "eye", "linspace", "empty")
def create(op: Op, graph: Graph) -> Nest | None:
    shape = graph.values[op.results[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(shape))
    return Nest(loops=loops, operands=(), results=(tuple((loop.name,) for loop in loops),), kernel="create")


def _whole_along(op: Op, graph: Graph, dim: int, *, results: int = 1) -> Nest:
    """All dims are independent but one, which stays whole."""
    x = graph.values[op.operands[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x) if d != dim % len(x))
    dims: tuple[Dim, ...] = tuple((x[d],) if d == dim % len(x) else (f"i{d}",) for d in range(len(x)))
    out = graph.values[op.results[0]].shape
    result: tuple[Dim, ...] = tuple((out[d],) if d == dim % len(x) else (f"i{d}",) for d in range(len(x)))
    saved = (-2,) if results > 1 else ()
    return Nest(loops=loops, operands=(dims,), results=(result,) * results, flops=math.prod(x), saved=saved)


@rule("cumsum", "cumprod", "sort", "topk", "argsort")
def scan_or_sort(op: Op, graph: Graph) -> Nest | None:
    name = op.target.split(".")[1]
    position = 2 if name == "topk" else 1
    dim: Any = op.args[position] if len(op.args) > position else op.kwargs.get("dim", -1)
    if not isinstance(dim, int) or isinstance(dim, bool) or not graph.values[op.operands[0]].shape:
        return replicated_nest(op, graph)
    return _whole_along(op, graph, dim, results=len(op.results))


@rule("diff")
def diff(op: Op, graph: Graph) -> Nest | None:
    """Differences along one dim, which stays whole; the others are independent."""
    call = Call(op, graph, "input n dim prepend append")
    x, y = call.shape("input"), call.result
    dim = call.get("dim", -1) % len(x)
    shapes = [graph.values[name].shape for name in op.operands]
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x) if d != dim)

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return tuple((size,) if d == dim else (f"i{d}",) for d, size in enumerate(shape))

    return Nest(
        loops=loops, operands=tuple(map(dims, shapes)), results=(dims(y),), linear=tuple(range(len(shapes))), flops=math.prod(y)
    )


@rule("tril", "triu")
def triangle(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size, kind="whole" if d >= len(x) - 2 else "map") for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(loops=loops, operands=(dims,), results=(dims,), linear=(0,))


@rule("broadcast_tensors")
def broadcast_tensors(op: Op, graph: Graph) -> Nest | None:
    y = graph.values[op.results[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(y))
    operands = []
    for name in op.operands:
        x = graph.values[name].shape
        first = len(y) - len(x)
        operands.append(tuple((f"i{first + d}",) if size == y[first + d] else () for d, size in enumerate(x)))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(loops=loops, operands=tuple(operands), results=(result,) * len(op.results))
