"""The page of a plan: its rivals, layers, memory, one step in time, other batches and clusters, scaling, and measured runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.api.explanation import PlanRequest, PricedPlan, price_plan, request_plan
from fourfold.api.output import check_place
from fourfold.api.settings import cluster_of
from fourfold.cluster import Cluster
from fourfold.errors import Error, InvalidInput
from fourfold.files import write_file
from fourfold.oracle.predict import Prediction
from fourfold.oracle.scaling import Row, Study
from fourfold.planner import Ranking, search
from fourfold.planner.search import replay_plan
from fourfold.planner.search_task import AUTO
from fourfold.planner.what_if import what_if_grid
from fourfold.report.costs import assumed
from fourfold.report.page.page import page
from fourfold.report.runs import Run, read_run

if TYPE_CHECKING:
    from fourfold.plans import Plan
    from fourfold.workload.workload import Workload

SECONDS = 20.0  # for other batches, links and numbers of devices
STRATEGIES = 6  # whose scaling is shown
COMPARABLE = 0.9  # of the best plan's measured kernels: steps that rest on fewer are not to be compared with it

Progress = Callable[[str, int, int], None]
"""Takes words, how much is done, and of how much."""


def no_progress(words: str, done: int, total: int) -> None:
    """For callers who show none."""


def report(
    plan: Plan | Path | str,
    runs: Sequence[Path | str] = (),
    *,
    output: Path | str = "report.html",
    model: str | Workload | None = None,
    cluster: str | Cluster | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    what_if: float = SECONDS,
) -> Path:
    """Write a page about a plan, beside records of its `runs`, and return its path. `what_if`: seconds spent on other batches,
    links and numbers of devices; the other arguments are those of `explain`."""
    path = Path(output)
    check_place(path)
    request = request_plan(plan, cluster=cluster, precision=precision, optimizer=optimizer)
    measured = read_runs(runs, request)
    report_priced(price_plan(request, model), path, runs=measured, what_if=what_if)
    return path


def read_runs(files: Sequence[Path | str], request: PlanRequest) -> list[Run]:
    """The records of a plan's runs."""
    return [read_run(Path(file), of=request.plan) for file in files]


def report_priced(
    priced: PricedPlan, path: Path, *, runs: Sequence[Run] = (), what_if: float, progress: Progress = no_progress
) -> None:
    """Write the page of a plan whose graph is at hand."""
    ranking = search(priced.task, lambda words: progress(words, 0, 1))
    chosen = replay_plan(priced.task, priced.plan)
    write_page(
        path,
        ranking,
        model=priced.model,
        cluster=priced.request.cluster,
        chosen=chosen,
        runs=runs,
        limit=what_if,
        progress=progress,
    )


def write_page(
    path: Path,
    ranking: Ranking,
    *,
    model: str,
    cluster: str | Cluster,
    chosen: Prediction | None = None,
    runs: Sequence[Run] = (),
    limit: float,
    progress: Progress = no_progress,
) -> None:
    """Work out what the page shows besides the ranking, half of the time for each part, and write it."""
    if limit < 0:
        raise InvalidInput(f"--what-if {limit:g}; give it 0 seconds or more")
    resized = partial(_comparable_cluster, cluster, assumed(ranking.task.cluster))
    grid = what_if_grid(ranking, resized, limit=limit / 2, say=progress)
    rows = _scaling(ranking, resized, limit / 2, progress)
    write_file(path, page(ranking, model=model, chosen=chosen, grid=grid, scaling=rows, runs=runs))


def _comparable_cluster(cluster: str | Cluster, is_assumed: bool, devices: int) -> Cluster:
    """The cluster with so many devices in use; refused where its rates are known otherwise: measured and assumed ones cannot
    be compared."""
    resized = cluster_of(cluster, devices)
    if assumed(resized) != is_assumed:
        raise InvalidInput(f"{cluster} is not calibrated with {devices} ranks; run `fourfold calibrate --ranks {devices}`")
    return resized


def _scaling(ranking: Ranking, resized: Callable[[int], Cluster], limit: float, progress: Progress) -> list[Row]:
    """The best strategies on fewer and twice as many devices, as far as there is time: all on few devices first."""
    task = ranking.task
    names = list(dict.fromkeys(c.plan.strategy.partition(":")[0] for c in ranking.candidates if c.plan.strategy != AUTO))
    settings = {}
    for count in sorted({1, *(2**k for k in range(20) if 2**k <= 2 * task.devices), task.devices}):
        try:
            settings[count] = task.setting.on(resized(count))
        except Error:  # the cluster has fewer devices, or its rates are not known alike
            continue
    if 1 not in settings:
        return []
    study, rows, begun = Study(graph=task.graph, settings=settings, batch=task.batch), [], time.perf_counter()
    cells = [(name, count) for count in settings for name in names[:STRATEGIES]]
    for done, (name, count) in enumerate(cells):
        if time.perf_counter() - begun > limit:
            break
        progress(f"{name} on {count}", done, len(cells))
        rows.append(study.row(name, count))
    known = max((c.estimate.measured_share for c in ranking.candidates[:1]), default=0.0)
    return [row for row in rows if row.forecast is None or row.forecast.known_from.get("measured", 0.0) >= COMPARABLE * known]
