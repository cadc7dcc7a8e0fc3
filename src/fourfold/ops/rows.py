"""Ops whose result consists of rows of their operand: slices, flips, rolls, pads. Where the dim is divided, each rank fetches
the rows it needs from the ranks that own them.
"""

from __future__ import annotations

from dataclasses import replace

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, Window, rule
from fourfold.ops.shape import permuted_dims
from fourfold.ops.window import RowMap, ShiftedWindow


def _row_map(op: Op, graph: Graph, taps: dict[int, tuple[int, ...]], fill: float | None = None) -> Nest:
    """The nest whose result row o of dim d is operand row taps[d][o] (-1: a row of `fill`)."""
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(y))
    inputs: list[Dim] = []
    for d, size in enumerate(x):
        if d in taps:
            inputs.append((Window(f"i{d}", RowMap(size=size, taps=tuple((t,) for t in taps[d]))),))
        else:
            inputs.append((f"i{d}",))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    linear = (0,) if not fill else ()
    return Nest(
        loops=loops, operands=(tuple(inputs),), results=(result,), linear=linear, kernel="rows", detail={"fill": fill or 0.0}
    )


@rule("slice.Tensor")
def slice_(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input dim start end step")
    x = call.shape("input")
    dim = call.get("dim", 0) % len(x)
    start, stop, step = slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(x[dim])
    if step != 1:
        return _row_map(op, graph, {dim: tuple(range(start, stop, step))})
    count = max(stop - start, 0)
    if count == x[dim]:
        return permuted_dims(op, graph, list(range(len(x))), kernel="identity")
    loops = tuple(Loop(name=f"i{d}", size=count if d == dim else size) for d, size in enumerate(x))
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    window = Window(f"i{dim}", ShiftedWindow(size=x[dim], start=start, count=count))
    dims: tuple[Dim, ...] = tuple((window,) if d == dim else (f"i{d}",) for d in range(len(x)))
    return Nest(loops=loops, operands=(dims,), results=(result,), linear=(0,), kernel="slice", detail={"dim": dim})


@rule("narrow")
def narrow(op: Op, graph: Graph) -> Nest | None:
    dim, start, length = op.args[1:4]
    if not isinstance(start, int):
        return None
    sliced = Op(
        name=op.name,
        target="aten.slice.Tensor",
        args=(op.args[0], dim, start, start + length),
        kwargs={},
        results=op.results,
        module=op.module,
    )
    return slice_(sliced, graph)


@rule("flip")
def flip(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    dims = [d % len(x) for d in op.args[1]]
    return _row_map(op, graph, {d: tuple(reversed(range(x[d]))) for d in dims})


@rule("roll")
def roll(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    shifts = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    dims = op.args[2] if len(op.args) > 2 else ()
    if not dims:
        return None
    total: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        total[dim % len(x)] = total.get(dim % len(x), 0) + shift
    return _row_map(op, graph, {d: tuple((o - s) % x[d] for o in range(x[d])) for d, s in total.items()})


@rule(
    "pad",
    "constant_pad_nd",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
)
def pad(op: Op, graph: Graph) -> Nest | None:
    x, amounts = graph.values[op.operands[0]].shape, op.args[1]
    name = op.target.split(".")[1]
    mode, fill = "constant", 0.0
    if name == "pad":
        call = Call(op, graph, "input pad mode value")
        mode, fill = call.get("mode", "constant"), call.get("value") or 0.0
    elif name == "constant_pad_nd":
        fill = op.args[2] if len(op.args) > 2 else 0.0
    else:
        mode = "reflect" if name.startswith("reflection") else "replicate"
    taps = {}
    for k in range(len(amounts) // 2):
        before, after = amounts[2 * k : 2 * k + 2]
        if before or after:
            size = x[len(x) - 1 - k]
            taps[len(x) - 1 - k] = tuple(_source_row(o, size, mode) for o in range(-before, size + after))
    nest = _row_map(op, graph, taps, fill if mode == "constant" else 0.0)
    return replace(nest, saved=(0,)) if mode in ("reflect", "replicate") else nest


def _source_row(o: int, size: int, mode: str) -> int:
    """Which row a padded index copies; -1 for a constant."""
    if 0 <= o < size:
        return o
    if mode == "constant":
        return -1
    if mode == "circular":
        return o % size
    if mode == "replicate":
        return min(max(o, 0), size - 1)
    return -o if o < 0 else 2 * (size - 1) - o
