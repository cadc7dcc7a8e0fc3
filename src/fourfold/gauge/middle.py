"""What counts of times taken at several moments: the middle half. One bad moment does not matter, and a mean of what is left
repeats better than a median of few."""

from __future__ import annotations

import statistics
from collections.abc import Iterable


def _half(times: Iterable[float]) -> list[float]:
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def middle(times: Iterable[float]) -> float:
    """The mean of the middle half."""
    return statistics.mean(_half(times))


def apart(times: Iterable[float]) -> float:
    """The distance of the quartiles."""
    half = _half(times)
    return half[-1] - half[0]
