"""Table look-ups. `filter` divides the features. `channel` divides the vocabulary: rows that a rank does not own count as zero,
and the result is Partial.
"""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, Window, rule
from fourfold.ops.window import ShiftedWindow


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
        loops=loops,
        operands=((("v",), ("f",)), dims),
        results=((*dims, ("f",)),),
        kernel="embedding",
        anchor=True,
        flops=math.prod(call.result),
        saved=(1,),
        detail={"padding": call.get("padding_idx", -1)},
    )


@rule("index_select")
def index_select(op: Op, graph: Graph) -> Nest | None:
    x, ids = (graph.values[name].shape for name in op.operands)
    dim = op.args[1] % len(x)
    if not ids:
        return None
    loops = tuple(Loop(name=f"i{d}", size=ids[0] if d == dim else size) for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((x[d],) if d == dim else (f"i{d}",) for d in range(len(x)))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(loops=loops, operands=(dims, ((f"i{dim}",),)), results=(result,), saved=(1,))


@rule("gather")
def gather(op: Op, graph: Graph) -> Nest | None:
    """Along the gathered dim every result row may read any row: the source is whole there, the indices may be divided."""
    if len(op.operands) != 2:
        return None
    x, ids = (graph.values[name].shape for name in op.operands)
    dim = op.args[1] % len(x) if x else 0
    if not x or not ids:
        return None
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(ids) if d == dim or size == x[d])
    names = {loop.name for loop in loops}
    source: tuple[Dim, ...] = tuple((f"i{d}",) if f"i{d}" in names and d != dim else (n,) for d, n in enumerate(x))
    result: tuple[Dim, ...] = tuple((f"i{d}",) if f"i{d}" in names else (n,) for d, n in enumerate(ids))
    return Nest(loops=loops, operands=(source, result), results=(result,), saved=(0, 1))


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(op: Op, graph: Graph) -> Nest | None:
    """``x[i, :, j]``: indexed dims are read whole, the others and the indices' own dims may be divided.

    An index that counts up by one (an ``arange`` in some shape) reads row k for result row k, so both dims are divided alike.
    """
    x, indices = graph.values[op.operands[0]].shape, op.args[1]
    at = [d for d, item in enumerate(indices) if item is not None]
    specs = [graph.values[indices[d].name] for d in at]
    if not at or any(spec.dtype in ("bool", "uint8") for spec in specs):
        return None
    shape = _broadcast_shape([spec.shape for spec in specs])
    width = len(shape)
    rest = [d for d in range(len(x)) if d not in at]
    loops = [Loop(name=f"b{k}", size=size) for k, size in enumerate(shape)]
    loops += [Loop(name=f"i{d}", size=x[d]) for d in rest]
    source: dict[int, Dim] = {d: (f"i{d}",) for d in rest} | {d: (x[d],) for d in at}
    source |= _row_by_row(graph, x, {d: indices[d].name for d in at}, width)
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0  # where the indices' dims go: in place of adjacent dims, else first
    before, after = ([(f"i{d}",) for d in rest if (d < first) == is_before] for is_before in (True, False))
    return Nest(
        loops=tuple(loops),
        operands=(tuple(source[d] for d in range(len(x))), *(_index_dims(spec.shape, shape) for spec in specs)),
        results=((*before, *((f"b{k}",) for k in range(width)), *after),),
        linear=(0,),
        kernel="index",
        saved=tuple(range(1, len(specs) + 1)),
        detail={"dims": tuple(at)},
    )


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the indices together, aligned at the right."""
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(shape)) + shape for shape in shapes]
    return tuple(map(max, zip(*padded, strict=True)))


def _index_dims(own: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """The dims of one index along the loops of all indices."""
    skip = len(shape) - len(own)
    return tuple((f"b{skip + j}",) if size == shape[skip + j] else () for j, size in enumerate(own))


def _row_by_row(graph: Graph, x: tuple[int, ...], indices: dict[int, str], width: int) -> dict[int, Dim]:
    """The dims of x that are read row by row along a dim of the result; of several along one, the first."""
    out: dict[int, Dim] = {}
    taken: set[int] = set()
    for d, name in indices.items():
        shape, counts = graph.values[name].shape, _counting_dim(graph, name)
        if counts is None or not 0 <= counts[1] <= x[d] - max(shape):
            continue
        k = counts[0] + width - len(shape)
        if k not in taken:
            taken.add(k)
            out[d] = (Window(f"b{k}", ShiftedWindow(size=x[d], start=counts[1], count=max(shape))),)
    return out


_SAME_VALUES = ("unsqueeze", "view", "reshape", "squeeze", "to", "_to_copy", "alias", "clone", "contiguous", "detach", "add")


def _counting_dim(graph: Graph, name: str) -> tuple[int, int] | None:
    """The dim along which a tensor counts up by one, all others being of size one, and its first value."""
    shape, start = graph.values[name].shape, 0
    long = [d for d, size in enumerate(shape) if size > 1]
    if len(long) != 1:
        return None
    while (op := graph.producer.get(name)) is not None:
        kind = op.target.split(".")[1]
        if kind == "arange":
            begin, step = (op.args[0], op.args[2] if len(op.args) > 2 else 1) if len(op.args) > 1 else (0, 1)
            return (long[0], start + begin) if step == 1 and isinstance(begin, int) else None
        if kind not in _SAME_VALUES or len(op.operands) != 1 or graph.values[op.operands[0]].numel != shape[long[0]]:
            return None
        if kind == "add":
            if not isinstance(op.args[1], int) or op.kwargs:
                return None
            start += op.args[1]
        name = op.operands[0]
    return None
