"""How much of a device's peak its kernels reach, read from kernels that were measured on such a device.

A kernel's time is ``max(flops / rate, bytes / bandwidth) / e``: the roofline over an efficiency (only bytes, for families
that do little arithmetic). ln e is the mean over measured kernels of the same family, weighted by how near they are:
``exp(-d^2 / 2)`` with d the distance between the logarithms of what decides (`features`); another op or number format is far.
Far from all of them the nearest decides, and no kernel is faster than the fastest of its kind. Wrong where a library changes
its algorithm between measured shapes.

The host's seconds to launch a kernel are a number of their own: they do not depend on size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from fourfold.cluster import Precision, efficiency_data
from fourfold.oracle.prices.kernels import Kernel

Way = Literal["forward", "backward"]
WAYS: tuple[Way, ...] = ("forward", "backward")
FAMILIES = {
    "attention": ("scaled_dot_product",),
    "recurrent": ("lstm", "gru", "rnn"),
    "transposed": ("conv_transpose",),
    "conv": ("conv",),
    "matmul": ("linear", "matmul", "addmm", ".mm", "bmm", "einsum"),
    "norm": ("norm",),
    "pool": ("pool",),
    "loss": ("loss", "softmax"),
    "lookup": ("embedding", "index", "gather"),
}
"""By words in the target, the first family that has one; anything else is pointwise."""
ARITHMETIC = ("attention", "recurrent", "transposed", "conv", "matmul")
ROWS = 0.5
"""How much the number of rows of a matrix counts beside its widths: efficiency depends on it little once it is large. Chosen,
as the three distances below, by leaving out each fitted kernel in turn, and all of its shape: the least mean error of ln e."""
NEAR = 0.5  # unit of distance, in powers of two
OTHER_FORMAT, OTHER_OP = 6.0, 8.0  # units


def family_of(kernel: Kernel) -> str:
    return next((name for name, words in FAMILIES.items() if any(word in kernel.target for word in words)), "pointwise")


def name_of(kernel: Kernel) -> str:
    """The op without its overload."""
    return kernel.target.split(".")[1]


def format_of(kernel: Kernel, precision: Precision) -> Precision:
    """The number format a kernel computes in: under autocast, half precision only where its operands are."""
    dtype = next((spec.dtype for spec in kernel.operands if spec.is_float), "float32")
    if dtype == "float32":
        return precision if precision in ("fp32", "tf32") else "tf32"
    return "fp64" if dtype == "float64" else "bf16"


def work(kernel: Kernel, way: Way) -> tuple[float, float]:
    """FLOPs that count for the kernel's family, and bytes."""
    flops, moved = (kernel.flops, kernel.moved) if way == "forward" else (kernel.backward_flops, kernel.backward_moved)
    return (flops if family_of(kernel) in ARITHMETIC else 0.0), moved


def features(kernel: Kernel) -> tuple[float, ...]:
    """What decides a kernel's efficiency, as logarithms: the matrix it is, or its bytes."""
    family, first = family_of(kernel), kernel.operands[0].shape if kernel.operands else ()
    result = kernel.results[0].shape
    if family in ("conv", "transposed"):
        weight = kernel.operands[1].shape
        rows, step = (result, math.prod(first[2:]) / math.prod(result[2:])) if family == "conv" else (first, 1.0)
        taps = (_log(math.prod(weight[2:])), _log(step) / max(len(weight) - 2, 1))
        return (ROWS * _log(rows[0] * math.prod(rows[2:])), _log(weight[0]), _log(weight[1]), *taps)
    if family == "matmul":
        return (ROWS * _log(math.prod(result[:-1])), _log(result[-1] if result else 1), _log(first[-1]))
    if family == "attention":
        return (ROWS * _log(math.prod(first[:-2])), _log(first[-2]), _log(first[-1]))
    size = _log(float(sum(spec.bytes for spec in (*kernel.operands, *kernel.results))))
    if family == "norm":
        return (size, ROWS * _log(first[-1] if "layer" in kernel.target or len(first) < 2 else first[1]))
    return (size,)


def _log(value: float) -> float:
    return math.log2(max(value, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured kernel."""

    op: str
    number: str
    place: tuple[float, ...]
    efficiency: float  # its logarithm

    def squared_distance(self, op: str, number: str, place: tuple[float, ...]) -> float:
        """The distance squared, in units."""
        apart = sum((a - b) ** 2 for a, b in zip(place, self.place, strict=True)) / NEAR**2
        return apart + (OTHER_OP**2 if op != self.op else 0.0) + (OTHER_FORMAT**2 if number != self.number else 0.0)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What is known of one kind of device. `points` by family and way; `least`: seconds of the fastest kernel by op, number
    format and way; `hosts` by op or family and way."""

    device: str
    points: Mapping[tuple[str, str], tuple[Point, ...]]
    least: Mapping[tuple[str, str, str], float]
    hosts: Mapping[tuple[str, str], float]
    source: str
    _known: dict[tuple[Kernel, str, str], float | None] = field(default_factory=dict, compare=False)

    def seconds(self, kernel: Kernel, way: Way, *, precision: Precision, rate: float, bandwidth: float) -> float | None:
        """The time of a kernel on the device, or None if nothing like it was measured."""
        flops, moved = work(kernel, way)
        roofline = max(flops / rate, moved / bandwidth)
        if not roofline:
            return 0.0
        number = format_of(kernel, precision)
        efficiency = self._efficiency(kernel, way, number)
        if efficiency is None:
            return None
        return max(roofline / efficiency, self.least.get((name_of(kernel), number, way), 0.0))

    def _efficiency(self, kernel: Kernel, way: Way, number: str) -> float | None:
        """Cached by kernel."""
        key = kernel, way, number
        if key not in self._known:
            points = self.points.get((family_of(kernel), way))
            self._known[key] = None if points is None else _read(points, name_of(kernel), number, features(kernel))
        return self._known[key]

    def host_seconds(self, kernel: Kernel, way: Way) -> float:
        """Seconds the host needs to launch a kernel; 0 where they could not be measured (LSTMs fill the queue at once)."""
        return self.hosts.get((name_of(kernel), way), self.hosts.get((family_of(kernel), way), 0.0))


def _read(points: tuple[Point, ...], op: str, number: str, place: tuple[float, ...]) -> float:
    """The efficiency between measured points: their weighted mean."""
    far = [point.squared_distance(op, number, place) for point in points]
    nearest = min(far)
    weights = [math.exp((nearest - d) / 2) for d in far]
    return math.exp(sum(w * point.efficiency for w, point in zip(weights, points, strict=True)) / sum(weights))


@lru_cache
def shipped_efficiency(device: str) -> Efficiency | None:
    """What comes with Fourfold for a kind of device, if anything does."""
    data = efficiency_data(device)
    return None if data is None else efficiency_of(device, data)


def efficiency_of(device: str, data: Mapping[str, Any]) -> Efficiency:
    """As `fitting.fit` gives it, and files have it."""
    points: dict[tuple[str, str], list[Point]] = {}
    least: dict[tuple[str, str, str], float] = {}
    for key, rows in data["points"].items():
        family, op, number, way = key.split("/")
        least[op, number, way] = data["least_seconds"][key]
        found = (Point(op=op, number=number, place=tuple(place), efficiency=math.log(e)) for *place, e in rows)
        points.setdefault((family, way), []).extend(found)
    hosts = {(name, way): float(value) for key, value in data["host_seconds"].items() for name, way in [key.split("/")]}
    return Efficiency(
        device=device,
        points={key: tuple(found) for key, found in points.items()},
        least=least,
        hosts=hosts,
        source=data["source"],
    )
