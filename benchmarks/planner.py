"""The planner: seconds of its searches, and how often what it expects to be best is not what the replay says.

Searches of the sizes that users bring, and of those for which other planners' times are known: named as such, on whatever
machine they were taken. Then, over many models and clusters, all splits that the surrogate finds best on their grid are
replayed in full: how often another one than its first comes out ahead, and what its first would have cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from records import RESULTS, write_record

from fourfold.api.settings import freeze_gc, setting_of
from fourfold.planner import SearchTask, search
from fourfold.planner.search import replay_plan
from fourfold.planner.splits.split_search import SplitPlan, SplitSearch
from fourfold.workload.workload import load_workload

TIMES = 3


@dataclass(frozen=True)
class Case:
    """A search, and what is known of it: a limit of our own, or another planner's time."""

    model: str
    cluster: str
    devices: int
    batch: int
    limit: float
    whose: str = "our own limit"


SEARCHES = (
    Case("vgg16", "abci", 64, 2048, 2.0),
    Case("resnet152", "abci", 1024, 16384, 15.0),
    Case("gpt2,layers=48", "dgx-h100", 1024, 1024, 15.0),
    Case("unet3d,size=512", "dgx-h100", 256, 64, 10.0),
    Case("vgg16", "ethernet-1g", 8, 256, 0.5, "PipeDream's optimizer, 4 x 2 devices"),
    Case("resnet50", "ethernet-1g", 8, 256, 2.2, "PipeDream's optimizer, 8 devices"),
    Case("gpt2,layers=28", "dgx-h100", 8, 64, 13.8, "Hetu-Galvatron, 28 layers on 8 devices"),
    Case("gpt2,layers=2", "dgx-h100", 8, 64, 47.0, "AutoParallel, 2 blocks on a 2 x 4 mesh, one core"),
    Case("gpt2,layers=32,width=4096,heads=32,length=2048,vocabulary=128256", "dgx-h100", 8, 8, 46.8, "AutoParallel, LLaMA-8B"),
)
MODELS = (
    ("alexnet", 256),
    ("vgg16", 128),
    ("resnet50", 256),
    ("unet3d,size=64", 8),
    ("cosmoflow", 16),
    ("gpt2,layers=6", 32),
    ("gnmt,layers=4", 64),
    ("vgg16-cifar", 128),
)
CLUSTERS = (("ethernet-1g", 4), ("ethernet-10g-gpu", 8), ("ethernet-25g-gpu", 16), ("abci", 8), ("abci", 32), ("dgx-h100", 16))


def task_of(model: str, cluster: str, devices: int, batch: int) -> SearchTask:
    workload = load_workload(model, batch=batch, data=False)
    chosen = setting_of(cluster, devices)
    freeze_gc()
    return SearchTask(graph=workload.graph, batch=batch, setting=chosen)


def searches() -> Iterator[dict[str, object]]:
    for case in SEARCHES:
        task = task_of(case.model, case.cluster, case.devices, case.batch)
        times = []
        for _ in range(TIMES):
            begun = time.perf_counter()
            found = search(task)
            times.append(time.perf_counter() - begun)
        best = found.best
        text = f"{best.plan.strategy} on {best.plan.mesh}, {len(best.plan.stages)} stages" if best else "nothing fits"
        middle = statistics.median(times)
        print(
            f"{case.model} on {case.devices} of {case.cluster}, batch {case.batch}: {middle:.2f} s "
            f"({case.limit} s, {case.whose}); {text}",
            flush=True,
        )
        yield {**asdict(case), "seconds": times, "found": text}


def splits() -> Iterator[dict[str, object]]:
    """Of each case the plans by the surrogate's cost, with their replayed steps."""
    for (model, batch), (cluster, devices) in itertools.product(MODELS, CLUSTERS):
        task = task_of(model, cluster, devices, batch)
        splitting = SplitSearch(task, task.graph)
        found = [f for grid in splitting.grids() for f in splitting.plans(grid) if isinstance(f, SplitPlan) and f.fits]
        found.sort(key=lambda f: f.cost)
        steps = [replay_plan(task, f.plan).step_seconds for f in found]
        if not steps:
            continue
        print(
            f"{model} on {devices} of {cluster}: {len(steps)} plans, best is number {steps.index(min(steps)) + 1}, "
            f"the first takes {steps[0] / min(steps):.3f} of it",
            flush=True,
        )
        yield {
            "model": model,
            "cluster": cluster,
            "devices": devices,
            "batch": batch,
            "expected": [f.cost for f in found],
            "replayed": steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("searches", "splits"))
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / f"{time.strftime('%Y-%m-%d')}-planner.json")
    options = parser.parse_args()
    data = json.loads(options.output.read_text()) if options.output.is_file() else {}
    data |= {"date": time.strftime("%Y-%m-%d %H:%M"), "method": " ".join(__doc__.split()), "cores": os.cpu_count()}
    if options.only != "splits":
        data["searches"] = list(searches())
    if options.only != "searches":
        rows = data["splits"] = list(splits())
        ratios = [row["replayed"][0] / min(row["replayed"]) for row in rows]
        other = sum(r > 1 for r in ratios)
        within = sum(min(row["replayed"][:3]) == min(row["replayed"]) for row in rows)
        print(
            f"another than the surrogate's first is best in {other} of {len(rows)}; the first takes "
            f"{statistics.mean(ratios):.3f} of the best's time on average, {max(ratios):.3f} at most; "
            f"the best is among the first three in {within}"
        )
    write_record(options.output, data)


if __name__ == "__main__":
    main()
