"""Convolutions, plain and transposed, in one to three dims.

| split | x | w | y |
|---|---|---|---|
| batch | Shard(N) | Replicate | Shard(N) |
| filter | Replicate | Shard(out) | Shard(C) |
| channel | Shard(C) | Shard(in) | Partial |
| domain | fetched range | Replicate | Shard(d) |

With groups, `filter` divides the groups first: then x is divided too, and nothing is exchanged between such layers.
"""

from __future__ import annotations

import math
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Loop, Nest, Window, rule, spatial_label
from fourfold.ops.window import SlidingWindow, TransposedWindow


def _tuple(value: Any, count: int, default: int) -> tuple[int, ...]:
    if value is None or value == ():
        return (default,) * count
    items = (value,) if isinstance(value, int) else tuple(value)
    return items * count if len(items) == 1 else items


def _channels(groups: int, filters: int, channels: int) -> tuple[tuple[Loop, ...], Dim, Dim]:
    """Loops of the channel dims, and the terms of input and output channels."""
    out, inside = filters // groups, channels // groups
    loops: tuple[Loop, ...]
    if groups == 1:
        loops = (
            Loop(name="f", size=out, labels=("filter",)),
            Loop(name="c", size=inside, labels=("channel",), kind="sum"),
        )
        return loops, ("c",), ("f",)
    loops = (
        Loop(name="g", size=groups, labels=("filter", "channel")),
        Loop(name="f", size=out, labels=("filter",)),
        Loop(name="c", size=inside, labels=("channel",), kind="sum"),
    )
    return loops, ("g", "c"), ("g", "f")


def _padding(value: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Padding before and after each spatial dim; ``same`` pads the odd element after, as torch does."""
    if value == "valid":
        return tuple((0, 0) for _ in kernel)
    if value == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    if isinstance(value, str):
        return None
    return tuple((p, p) for p in _tuple(value, len(kernel), 0))


@rule("conv1d", "conv2d", "conv3d", "convolution")
def conv(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input weight bias stride padding dilation groups")
    if op.target.startswith("aten.convolution"):
        call = Call(op, graph, "input weight bias stride padding dilation transposed output_padding groups")
    return _nest(call, transposed=bool("transposed" in call.names and call["transposed"]))


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(op: Op, graph: Graph) -> Nest | None:
    return _nest(Call(op, graph, "input weight bias stride padding output_padding groups dilation"), transposed=True)


def _nest(call: Call, *, transposed: bool) -> Nest | None:
    """Plain and transposed convolutions differ in the layout of the weight, in the windows and in the count of FLOPs."""
    x, w, y = call.shape("input"), call.shape("weight"), call.result
    count = len(w) - 2
    if len(x) != count + 2:
        return None  # no batch dim
    kernel, groups = w[2:], call.get("groups", 1)
    stride, dilation = _tuple(call["stride"], count, 1), _tuple(call["dilation"], count, 1)
    padding = _padding(call.get("padding", 0), kernel, dilation)
    if padding is None:
        return None
    channels, inside, outside = _channels(groups, w[1] * groups if transposed else w[0], x[1])
    loops = [Loop(name="n", size=x[0], labels=("batch",)), *channels]
    windows: list[Dim] = []
    for i, (pad, _) in enumerate(padding):
        loops.append(Loop(name=f"d{i}", size=y[2 + i], labels=spatial_label(i)))
        window = TransposedWindow if transposed else SlidingWindow
        need = window(size=x[2 + i], kernel=kernel[i], stride=stride[i], pad=pad, dilation=dilation[i])
        windows.append((Window(f"d{i}", need),))
    filters: tuple[Dim, Dim] = (inside, ("f",)) if transposed else (outside, ("c",))
    operands: list[tuple[Dim, ...]] = [(("n",), inside, *windows), (*filters, *((k,) for k in kernel))]
    if call["bias"] is not None:
        operands.append((outside,))
    return Nest(
        loops=tuple(loops),
        operands=tuple(operands),
        results=((("n",), outside, *((f"d{i}",) for i in range(count))),),
        kernel="conv_transpose" if transposed else "conv",
        anchor=True,
        flops=2 * math.prod(x if transposed else y) * w[1] * math.prod(kernel),
        saved=(0, 1),
        detail={
            "stride": stride,
            "padding": tuple(pad for pad, _ in padding) if transposed else padding,
            "dilation": dilation,
            "kernel": kernel,
        },
    )
