"""Reading a measured curve at any size: made monotone, straight between its points, as start-up plus bytes are.

Measured times jitter, and a planner that finds a larger message cheaper than a smaller one goes astray. So the curve's
times are first replaced by the nearest rising ones (isotonic regression of their logarithms). Beyond the measured sizes
the answer is marked as extrapolated: below them the first time stands (start-up), above them time grows in proportion to
size (bandwidth). Wrong where a library changes its algorithm between two measured sizes: measure more of them there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from fourfold.cluster import Curve


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds at a size, the spread measured around there (None if not recorded), and whether sizes had to be stretched."""

    seconds: float
    spread: float | None
    extrapolated: bool


def reading(curve: Curve, size: float) -> Reading:
    """The time of a message of so many bytes."""
    sizes, seconds = curve.sizes, rising(curve.seconds)
    if size <= sizes[0]:
        return Reading(seconds[0], _spread(curve, 0, 1.0), size < sizes[0])
    if size >= sizes[-1]:
        factor = size / sizes[-1]
        return Reading(seconds[-1] * factor, _spread(curve, -1, factor), size > sizes[-1])
    right = bisect_right(sizes, size)
    share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    time = seconds[right - 1] + share * (seconds[right] - seconds[right - 1])
    point = right if share > 0.5 else right - 1
    return Reading(time, _spread(curve, point, time / seconds[point]), False)


def _spread(curve: Curve, index: int, factor: float) -> float | None:
    return curve.spreads[index] * factor if curve.spreads else None


@lru_cache(maxsize=4096)
def rising(seconds: tuple[float, ...]) -> tuple[float, ...]:
    """The times that never fall and whose logarithms are nearest to those of the given ones (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean logarithm, how many
    for value in seconds:
        pools.append((math.log(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, one), (low, other) = pools[-2:]
            pools[-2:] = [((high * one + low * other) / (one + other), one + other)]
    return tuple(value for mean, count in pools for value in [math.exp(mean)] * count)
