"""How much a machine varies: the same work on two processes at once, its median over four seconds, again and again.

Prints, for each kind of work, the medians and half the distance between their tenth and their ninetieth hundredth, relative to
the middle one: what a calibration of seconds cannot know about a run minutes later.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fourfold.calibrate.calibration import drift
from fourfold.runtime.rank_pool import rank_pool

WINDOW = 4.0  # seconds


def workloads() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    matrix, image, weight = torch.randn(384, 384), torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3)
    large, small = torch.randn(8 * 2**20), torch.randn(64, 64)
    return {
        "products of 384": lambda: [matrix @ matrix for _ in range(20)],
        "convolutions": lambda: [torch.conv2d(image, weight, padding=1) for _ in range(8)],
        "32 MiB in place": lambda: [large.add_(1) for _ in range(6)],
        "small ops": lambda: [small.add(1) for _ in range(5000)],
    }


def window_medians(seconds: float) -> dict[str, list[float]]:
    """Medians of windows, by kind of work."""
    kinds = workloads()
    out: dict[str, list[float]] = {name: [] for name in kinds}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        window, times = time.monotonic() + WINDOW, {name: [] for name in kinds}
        while time.monotonic() < window:
            for name, run in kinds.items():
                begun = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - begun)
        for name in kinds:
            out[name].append(statistics.median(times[name]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    with rank_pool(2) as team:
        found = team(window_medians, options.seconds)[0]
    print(time.strftime("%Y-%m-%d %H:%M"), torch.__version__)
    for name, times in found.items():
        print(f"{name}: varies by {drift(times):.1%}; ms: {' '.join(f'{1e3 * t:.1f}' for t in times)}")


if __name__ == "__main__":
    main()
