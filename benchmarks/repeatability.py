"""Two calibrations in a row: how far their entries lie apart, and the steps predicted from them.

Each calibration measures rates, collectives and the kernels of every plan anew; the second keeps the first's reference speed,
as every later one on a machine does. An entry is one number of the cluster's file (a rate, a time of a collective at a size) or
one kernel's time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from accuracy import MODELS, PLACES, build_plan, predict_rows
from records import RESULTS, write_record

from fourfold.calibrate.calibration import calibrated
from fourfold.calibrate.collectives import FULL, Effort
from fourfold.calibrate.kernel_table import add_kernels
from fourfold.calibrate.kernels import samples_of
from fourfold.calibrate.measured_prices import here
from fourfold.cluster import Cluster
from fourfold.cluster.cache import cache_folder
from fourfold.plans import lower_plan
from fourfold.runtime.rank_pool import rank_pool
from fourfold.workload.workload import load_workload

PLANS = ("data", "filter", "spatial", "fsdp", "1f1b-so")


def entries(cluster: Cluster) -> dict[str, float]:
    device = cluster.kinds[0]
    out = {f"rate {name}": rate for name, rate in device.rates} | {f"update {name}": speed for name, speed in device.updates}
    out |= {"bandwidth": device.bandwidth, "launch": device.launch}
    for curve in cluster.measured.curves:
        key = f"{curve.collective} {curve.groups}x{curve.ranks}"
        out |= {f"{key} {size:.0f} B": seconds for size, seconds in zip(curve.sizes, curve.seconds, strict=True)}
    return out


@dataclass(frozen=True)
class Outcome:
    """A calibration: its reference speed, its entries, kernel times, and the steps predicted."""

    reference: float
    entries: dict[str, float]
    kernels: dict[str, float]
    steps: dict[str, float]


def once(place: str, models: list[str], effort: Effort) -> Outcome:
    """One calibration on ranks of its own, with the kernels of all plans."""
    shutil.rmtree(cache_folder() / "kernels", ignore_errors=True)
    with rank_pool(int(place)) as team:
        seen = {model: load_workload(text, batch=batch) for model, (text, batch) in MODELS.items() if model in models}
        plans = [lower_plan(one.graph, build_plan(place, plan, one, team)) for one, plan in product(seen.values(), PLANS)]
        wanted = samples_of(plans, {})
        for progress in calibrated(team, effort=effort, kernels=list(wanted.values())):
            print(f"  {progress.done} of {progress.of}: {progress.next:60}", end="\r", file=sys.stderr, flush=True)
        add_kernels(here(progress.cluster).measured.kernels, progress.kernels)
        steps: dict[str, float] = {}
        for model, one in seen.items():
            rows = predict_rows(place, model, list(PLANS), one, progress.cluster, team)
            steps |= {f"{model} {row.plan}": row.predicted for row in rows}
    kernels = {key: t.busy * (t.forward + (t.backward or 0.0)) for key, t in progress.kernels.items()}
    return Outcome(progress.cluster.kinds[0].pace, entries(progress.cluster), kernels, steps)


def distances(one: dict[str, float], other: dict[str, float]) -> list[float]:
    """Relative distances, entry by entry."""
    return sorted(abs(one[key] - other[key]) / min(one[key], other[key]) for key in one)


def say(name: str, limit: float, distances: list[float]) -> None:
    if distances:
        near = statistics.mean(d <= limit for d in distances)
        ninth = distances[int(0.9 * len(distances))]
        middle = statistics.median(distances)
        print(
            f"{name}: {len(distances)}, {near:.0%} within {limit:.0%}; median {middle:.1%}, nine tenths within "
            f"{ninth:.1%}, largest {distances[-1]:.1%}",
            flush=True,
        )


def compare(before: Outcome, after: Outcome) -> None:
    entries, kernels = distances(before.entries, after.entries), distances(before.kernels, after.kernels)
    say("collectives and rates", 0.1, entries)
    say("kernels", 0.1, kernels)
    say("all entries", 0.1, sorted(entries + kernels))
    say("predicted steps", 0.03, distances(before.steps, after.steps))


def record(found: list[Outcome]) -> dict[str, object]:
    """A row for each entry, with its value of every calibration."""
    rows = [
        [kind, name, *(getattr(one, kind)[name] for one in found)]
        for kind in ("entries", "kernels", "steps")
        for name in getattr(found[0], kind)
    ]
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "speed": [one.reference for one in found], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="none: collectives alone")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / f"{time.strftime('%Y-%m-%d')}-repeatability.json")
    options = parser.parse_args()
    place = str(options.ranks)
    assert place in PLACES, f"plans are known for {', '.join(PLACES)} ranks"
    effort = Effort(rounds=options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FOURFOLD_CACHE"] = folder
        found = [once(place, options.models, effort) for _ in range(options.times)]
    for before, after in pairwise(found):
        print(f"reference speeds {before.reference * 1e3:.2f} ms and {after.reference * 1e3:.2f} ms:")
        compare(before, after)
    write_record(options.output, record(found))


if __name__ == "__main__":
    main()
