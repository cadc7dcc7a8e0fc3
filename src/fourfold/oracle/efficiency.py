"""How much of a device's peak its kernels reach, as curves over the amount of work: small kernels leave it idle.

A kernel's time is ``max(floor, work / (peak e(work)))``: for families bound by arithmetic, work is FLOPs and the peak a rate;
for the others, bytes and bandwidth; forward and backward apart. e is the median efficiency of measured kernels in bins of
like work, made to rise; the floor is what the smallest kernels of a family take (launching them, on the host). Wrong
where shapes matter more than size: a narrow convolution reaches less than a wide one of the same FLOPs.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fourfold.cluster import efficiency_data
from fourfold.oracle.curves import rising
from fourfold.oracle.kernels import Kernel

FAMILIES = {
    "attention": ("scaled_dot_product",),
    "recurrent": ("lstm", "gru", "rnn"),
    "conv3d": ("conv3d", "conv_transpose3d"),
    "conv": ("conv",),
    "matmul": ("linear", "matmul", "addmm", ".mm", "bmm", "einsum"),
    "norm": ("norm",),
    "pool": ("pool",),
    "loss": ("loss", "softmax"),
    "lookup": ("embedding", "index", "gather"),
}
"""By words in the target, the first family that has one; anything else is pointwise."""
ARITHMETIC = ("attention", "recurrent", "conv3d", "conv", "matmul")
BINS_PER_DECADE = 2
WAYS = {"forward": ("flops", "bytes"), "backward": ("backward_flops", "backward_bytes")}
CLEAR = 1.3  # times the floor: shorter kernels tell nothing of efficiency


def family_of(kernel: Kernel) -> str:
    """The family a kernel's efficiency is looked up in; a 3-D convolution is told by its weight."""
    if "conv" in kernel.target and len(kernel.results[0].shape) == 5:
        return "conv3d"
    return next((name for name, words in FAMILIES.items() if any(word in kernel.target for word in words)), "pointwise")


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency over work (FLOPs or bytes), both rising."""

    work: tuple[float, ...]
    efficiency: tuple[float, ...]

    def at(self, work: float) -> float:
        """Between the points by logarithms; beyond them the first or last."""
        if work <= self.work[0]:
            return self.efficiency[0]
        if work >= self.work[-1]:
            return self.efficiency[-1]
        right = bisect_right(self.work, work)
        share = math.log(work / self.work[right - 1]) / math.log(self.work[right] / self.work[right - 1])
        return self.efficiency[right - 1] * (self.efficiency[right] / self.efficiency[right - 1]) ** share


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The curves of one kind of device, by precision, family and way (forward or backward)."""

    device: str
    curves: Mapping[tuple[str, ...], Curve]  # precision, family, way
    floors: Mapping[tuple[str, ...], float]  # family, way
    source: str

    def seconds(self, kernel: Kernel, way: str, *, precision: str, rate: float, bandwidth: float) -> float | None:
        """The time of a kernel, or None if nothing like it was measured."""
        family = family_of(kernel)
        curve = self.curves.get((precision, family, way))
        flops, moved = (kernel.flops, kernel.moved) if way == "forward" else (kernel.backward_flops, kernel.backward_moved)
        work, peak = (flops, rate) if family in ARITHMETIC else (moved, bandwidth)
        if curve is None or work <= 0:
            return None
        return max(self.floors.get((family, way), 0.0), work / (peak * curve.at(work)))


def fit(rows: Iterable[Mapping[str, Any]], *, rates: Mapping[str, float], bandwidth: float) -> dict[str, Any]:
    """Floors and curves from measured rows (see benchmarks/device_kernels.py), as plain data for a file."""
    rows = [row for row in rows if row["bytes"] > 0]
    floors: dict[tuple[str, str], float] = {}
    for family, way in {(row["family"], way) for row in rows for way in WAYS}:
        found = sorted(row[way] for row in rows if row["family"] == family and row[way] > 0)
        if found:
            floors[family, way] = found[len(found) // 20]
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        for way, (flops, moved) in WAYS.items():
            arithmetic = row["family"] in ARITHMETIC
            work = row[flops] if arithmetic else row[moved]
            peak = rates[row["precision"]] if arithmetic else bandwidth
            if work > 0 and row[way] > CLEAR * floors.get((row["family"], way), 0.0):
                points.setdefault((row["precision"], row["family"], way), []).append((work, work / peak / row[way]))
    return {
        "floor_seconds": {"/".join(key): float(f"{value:.4g}") for key, value in sorted(floors.items())},
        "curves": {"/".join(key): _binned(found) for key, found in sorted(points.items())},
    }


def _binned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    bins: dict[int, list[tuple[float, float]]] = {}
    for work, efficiency in points:
        bins.setdefault(math.floor(BINS_PER_DECADE * math.log10(work)), []).append((work, efficiency))
    middle = [
        (statistics.geometric_mean(w for w, _ in bins[k]), statistics.median(e for _, e in bins[k])) for k in sorted(bins)
    ]
    levels = rising(tuple(min(e, 1.0) for _, e in middle))
    return [(float(f"{w:.4g}"), float(f"{e:.4g}")) for (w, _), e in zip(middle, levels, strict=True)]


@lru_cache
def shipped(device: str) -> Efficiency | None:
    """The curves that come with Fourfold for a kind of device, if any do."""
    data = efficiency_data(device)
    if data is None:
        return None
    curves = {
        tuple(key.split("/")): Curve(tuple(w for w, _ in points), tuple(e for _, e in points))
        for key, points in data["curves"].items()
    }
    floors = {tuple(key.split("/")): float(value) for key, value in data["floor_seconds"].items()}
    return Efficiency(device=device, curves=curves, floors=floors, source=data["source"])
