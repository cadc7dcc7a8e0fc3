"""What counts of times taken at several moments: the middle half. One bad moment does not matter, and a mean of what is left
repeats better than a median of few."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

KNOWN = 0.03  # relative error of a time beyond which it is taken again


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


def strays(times: Sequence[float]) -> bool:
    """Whether the middle is not known yet; the quartiles of few times lie about one deviation apart."""
    return apart(times) > KNOWN * math.sqrt(len(times)) * middle(times)
