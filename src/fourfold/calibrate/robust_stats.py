"""What counts of times taken at several moments: the middle half. One bad moment does not matter, and a mean of what is left
repeats better than a median of few. Moments may weigh differently: then it is the half by weight."""

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
    """Whether the middle is not known yet; the quartiles of few times lie about one deviation apart."""
    return interquartile_range(times) > known * math.sqrt(len(times)) * interquartile_mean(times)
