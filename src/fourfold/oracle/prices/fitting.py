"""From raw times of kernels on a device (benchmarks/device_kernels.py) to the file that `efficiency` reads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from fourfold.cluster import Precision
from fourfold.graph.spec import TensorSpec
from fourfold.oracle.prices.efficiency import WAYS, family_of, features, format_of, name_of, work
from fourfold.oracle.prices.kernels import Kernel

SAME = 0.1
"""Kernels nearer to each other than this (powers of two) are joined: one point for all."""
LEAST_HOST, MOST_HOST = 3e-6, 1e-3
"""Seconds. Above the latter the queue was full and the host had to wait: such a time is not that of a launch (LSTMs)."""
SHORTEST = 3e-7
"""Seconds: a backward that merely hands gradients on shows as less than that between two events."""


def fit(rows: Iterable[Mapping[str, Any]], *, rates: Mapping[str, float], bandwidth: float) -> dict[str, Any]:
    """Points, least seconds and the host's seconds, as plain data for a file."""
    rows = list(rows)
    points: dict[str, list[tuple[tuple[float, ...], float, float]]] = {}
    for row in rows:
        kernel, precision = kernel_of_row(row), row["precision"]
        number: Precision = format_of(kernel, precision)
        for way in WAYS:
            flops, moved = work(kernel, way)
            roofline = max(flops / rates[number], moved / bandwidth)
            if row[way] is None or not roofline or (way == "backward" and not any(kernel.gradients)):
                continue
            key = f"{family_of(kernel)}/{name_of(kernel)}/{number}/{way}"
            seconds = max(row[way], SHORTEST)
            points.setdefault(key, []).append((features(kernel), roofline / seconds, seconds))
    return {
        "points": {key: _joined(found) for key, found in sorted(points.items())},
        "least_seconds": {key: _round(min(s for _, _, s in found)) for key, found in sorted(points.items())},
        "host_seconds": _hosts(rows),
    }


def kernel_of_row(row: Mapping[str, Any]) -> Kernel:
    operands, results = (
        tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in row[side]) for side in ("operands", "results")
    )
    return Kernel(
        target=row["target"],
        way=row["way"],
        arguments=row["arguments"],
        operands=operands,
        results=results,
        gradients=tuple(row["gradients"]),
        flops=row["flops"],
    )


def _joined(found: list[tuple[tuple[float, ...], float, float]]) -> list[list[float]]:
    """Kernels at nearly one place as one, with the mean of their logarithms."""
    places: list[tuple[tuple[float, ...], list[float]]] = []
    for place, efficiency, _ in sorted(found):
        at = next((es for other, es in places if math.dist(place, other) < SAME), None)
        if at is None:
            places.append((place, [efficiency]))
        else:
            at.append(efficiency)
    return [[*map(_round, place), _round(statistics.geometric_mean(es))] for place, es in places]


def _hosts(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds to launch each op, and for those of a family that were not measured: the lower quartile, since whatever else
    the host does only adds. Measured backwards hold what the engine does around each call; a view's backward, which does
    nothing itself, tells how much that is."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        kernel = kernel_of_row(row)
        for way in WAYS:
            seconds = row.get(f"{way}_host")
            if seconds and seconds < MOST_HOST and (way == "forward" or any(kernel.gradients)):
                for name in (name_of(kernel), family_of(kernel)):
                    found.setdefault((name, way), []).append(seconds)
    quartile = {key: sorted(times)[len(times) // 4] for key, times in found.items()}
    around = max(quartile["transpose", "backward"] - quartile["transpose", "forward"], 0.0)
    return {
        "/".join(key): _round(max(seconds - (around if key[1] == "backward" else 0.0), LEAST_HOST))
        for key, seconds in sorted(quartile.items())
    }


def _round(number: float) -> float:
    return float(f"{number:.4g}")
