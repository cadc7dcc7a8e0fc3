"""Max, average and adaptive pooling.

Windows are those of a convolution; adaptive windows follow from the output index. A global average is a sum loop: its result is
Partial, and only one number per channel is exchanged.
"""

from __future__ import annotations

import math
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, SavedExtra, Window, rule, spatial_label
from fourfold.ops.window import RowMap, SlidingWindow


def _tuple(value: Any, count: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if value is None or value == ():
        return default
    items = (value,) if isinstance(value, int) else tuple(value)
    return items * count if len(items) == 1 else items


@rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
)
def pool(op: Op, graph: Graph) -> Nest | None:
    if len(op.results) > 1 and graph.consumers[op.results[1]]:
        return None  # the indices are used: they count positions in the whole tensor
    is_max = op.target.startswith("aten.max")
    extra = "dilation ceil" if is_max else "ceil count_include_pad divisor"
    call = Call(op, graph, f"input kernel stride padding {extra}")
    x, y = call.shape("input"), call.result
    count = int(op.target.split("pool")[1][0])
    if len(x) != count + 2:
        return None
    kernel = _tuple(call["kernel"], count, ())
    stride = _tuple(call["stride"], count, kernel)
    padding = _tuple(call["padding"], count, (0,) * count)
    dilation = _tuple(call["dilation"], count, (1,) * count) if is_max else (1,) * count
    loops = [Loop(name="n", size=x[0], labels=("batch",)), Loop(name="c", size=x[1], labels=("filter",))]
    windows: list[Dim] = []
    for i in range(count):
        loops.append(Loop(name=f"d{i}", size=y[2 + i], labels=spatial_label(i)))
        need = SlidingWindow(size=x[2 + i], kernel=kernel[i], stride=stride[i], pad=padding[i], dilation=dilation[i])
        windows.append((Window(f"d{i}", need),))
    result: tuple[Dim, ...] = (("n",), ("c",), *((f"d{i}",) for i in range(count)))
    return Nest(
        loops=tuple(loops),
        operands=((("n",), ("c",), *windows),),
        results=(result,) * len(op.results),
        kernel="max_pool" if is_max else "avg_pool",
        flops=math.prod(y) * math.prod(kernel),
        saved=(0, -2) if len(op.results) > 1 else (0,),
        saved_extra=(SavedExtra(result, 8),) if is_max and len(op.results) == 1 else (),  # the places of the maxima
        detail={
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "count_include_pad": not is_max and call.get("count_include_pad", True),
            "divisor": None if is_max else call["divisor"],
        },
    )


@rule(
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
)
def adaptive_pool(op: Op, graph: Graph) -> Nest | None:
    if len(op.results) > 1 and graph.consumers[op.results[1]]:
        return None
    is_max = "max" in op.target
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    count = int(op.target.split("pool")[1][0])
    if len(x) != count + 2:
        return None
    loops = [Loop(name="n", size=x[0], labels=("batch",)), Loop(name="c", size=x[1], labels=("filter",))]
    inputs: list[Dim] = []
    outputs: list[Dim] = []
    for i in range(count):
        size, out = x[2 + i], y[2 + i]
        if out == 1:
            loops.append(Loop(name=f"d{i}", size=size, kind="joint" if is_max else "sum"))
            inputs.append((f"d{i}",))
            outputs.append(())
            continue
        taps = tuple(tuple(range(o * size // out, -(-(o + 1) * size // out))) for o in range(out))
        weights = tuple(tuple(1.0 / len(t) for _ in t) for t in taps)
        loops.append(Loop(name=f"d{i}", size=out, labels=spatial_label(i)))
        inputs.append((Window(f"d{i}", RowMap(size=size, taps=taps, weights=weights)),))
        outputs.append((f"d{i}",))
    result: tuple[Dim, ...] = (("n",), ("c",), *outputs)
    return Nest(
        loops=tuple(loops),
        operands=((("n",), ("c",), *inputs),),
        results=(result,) * len(op.results),
        kernel="adaptive_max" if is_max else "resample",
        flops=math.prod(x),
        saved=(0, -2) if len(op.results) > 1 else (0,) if is_max or any(outputs) else (),  # a global average is a mean
    )
