"""Statistics of repeated timings that one slow moment does not move: the interquartile mean, which repeats better than the
median of a few, and the interquartile range. Timings may be weighted; the middle half is then half of the weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat

KNOWN = 0.03  # relative error of a time beyond which it is taken again


def interquartile_mean(times: Iterable[float], weights: Iterable[float] = repeat(1.0)) -> float:
    """The mean of the middle half."""
    ordered = sorted(zip(times, weights, strict=False))
    whole = sum(weight for _, weight in ordered)
    total = below = 0.0
    for time, weight in ordered:
        total += time * max(0.0, min(below + weight, 0.75 * whole) - max(below, 0.25 * whole))
        below += weight
    return total / (0.5 * whole)


def interquartile_range(times: Iterable[float]) -> float:
    """The distance of the quartiles."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter]


def strays(times: Sequence[float], known: float = KNOWN) -> bool:
    """Whether the interquartile mean is not yet known to the relative error `known`. The quartiles of a few timings lie about
    one standard deviation apart."""
    return interquartile_range(times) > known * math.sqrt(len(times)) * interquartile_mean(times)
