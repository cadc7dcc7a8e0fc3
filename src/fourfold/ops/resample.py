"""Interpolation (nearest, linear, bilinear, trilinear, bicubic, antialiased or not) as weights of input rows for each output
row of a dim."""

from __future__ import annotations

import math
import struct
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Dim, Loop, Nest, Window, rule, spatial_label, whole_dims
from fourfold.ops.window import RowMap

_CUBIC = -0.75  # torch's coefficient of the cubic convolution kernel
_ANTIALIAS_CUBIC = -0.5  # and the one it antialiases with


@rule(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
def interpolate(op: Op, graph: Graph) -> Nest | None:
    x, y = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    name = op.target.split(".")[1]
    nearest = "nearest" in name
    align = bool(op.args[2]) if not nearest and len(op.args) > 2 else bool(op.kwargs.get("align_corners", False))
    scales = _scales(op, len(x) - 2, nearest)
    loops = [Loop(name="n", size=x[0], labels=("batch",)), Loop(name="c", size=x[1], labels=("filter",))]
    if any(_backward_reads_other_rows(name, *sizes) for sizes in zip(x[2:], y[2:], scales, strict=True)):
        before, after = ((("n",), ("c",), *whole_dims(shape[2:])) for shape in (x, y))
        return Nest(loops=tuple(loops), operands=(before,), results=(after,), linear=(0,))
    inputs: list[Dim] = [("n",), ("c",)]
    for i in range(len(x) - 2):
        size, out = x[2 + i], y[2 + i]
        rows = [_taps(name, o, size, out, align, scales[i]) for o in range(out)]
        window = RowMap(size=size, taps=tuple(r[0] for r in rows), weights=tuple(r[1] for r in rows))
        loops.append(Loop(name=f"d{i}", size=out, labels=spatial_label(i)))
        inputs.append((Window(f"d{i}", window),))
    result: tuple[Dim, ...] = (("n",), ("c",), *((f"d{i}",) for i in range(len(x) - 2)))
    return Nest(
        loops=tuple(loops),
        operands=(tuple(inputs),),
        results=(result,),
        linear=(0,),
        kernel="resample",
        flops=2 * math.prod(y) * len(x),
    )


def _backward_reads_other_rows(name: str, size: int, out: int, scale: float | None) -> bool:
    """Whether torch's backward reads other rows than its forward, as it does for nearest by a fraction that leaves or doubles
    the size. The gradient is then not the forward's adjoint, so such a dim stays whole and torch's own kernel runs."""
    if name.split("nearest")[-1] not in ("1d", "2d", "3d") or scale is None or out not in (size, 2 * size):
        return False
    return any(_taps(name, o, size, out, False, scale)[0] != (o * size // out,) for o in range(out))


def _scales(op: Op, count: int, nearest: bool) -> list[float | None]:
    """Scale factors given by the caller, per dim (``vec`` overloads carry them in the last argument)."""
    given: Any = op.args[-1] if op.target.endswith("vec") else None
    if given is None and op.target.endswith("vec"):
        given = op.kwargs.get("scale_factors")
    if not op.target.endswith("vec"):
        tail = op.args[2 if nearest else 3 :]
        return [tail[i] if i < len(tail) and isinstance(tail[i], float) else None for i in range(count)]
    return list(given) if isinstance(given, tuple) and len(given) == count and isinstance(given[0], float) else [None] * count


def _taps(
    name: str, o: int, size: int, out: int, align: bool, scale: float | None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ratio = 1.0 / scale if scale else size / out
    if name.endswith("_aa"):
        return _antialias_taps(o, size, (size - 1) / (out - 1) if align and out > 1 else ratio, cubic="cubic" in name)
    if "nearest" in name:
        at = _to_float32(_to_float32(o + 0.5 * ("exact" in name)) * _to_float32(ratio))
        return (min(int(at), size - 1),), (1.0,)
    position = (o * (size - 1) / (out - 1) if out > 1 else 0.0) if align else (o + 0.5) * ratio - 0.5
    if "cubic" in name:
        return _cubic_taps(position, size)
    position = max(position, 0.0)
    low = min(int(position), size - 1)
    high = min(low + 1, size - 1)
    part = min(max(position - low, 0.0), 1.0)
    return ((low,), (1.0,)) if high == low else ((low, high), (1.0 - part, part))


def _to_float32(value: float) -> float:
    """A value rounded to float32: torch computes nearest rows in it, whatever the tensor's dtype."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _antialias_taps(o: int, size: int, ratio: float, *, cubic: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """When an image shrinks, antialiasing stretches the filter over all input rows that fall on an output row."""
    stretch = max(ratio, 1.0)
    centre, support = ratio * (o + 0.5), (2.0 if cubic else 1.0) * stretch
    first, last = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), size)
    raw = [_filter(abs(i - centre + 0.5) / stretch, cubic) for i in range(first, last)]
    total = sum(raw)
    return tuple(range(first, last)), tuple(w / total for w in raw)


def _filter(t: float, cubic: bool) -> float:
    if not cubic:
        return max(0.0, 1.0 - t)
    return _cubic(t, _ANTIALIAS_CUBIC) if t < 2 else 0.0


def _cubic_taps(position: float, size: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    base = math.floor(position)
    part = position - base
    taps = tuple(min(max(base + k, 0), size - 1) for k in (-1, 0, 1, 2))
    return taps, tuple(_cubic(abs(part - k)) for k in (-1, 0, 1, 2))


def _cubic(t: float, a: float = _CUBIC) -> float:
    if t <= 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
