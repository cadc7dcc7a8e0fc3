"""The command that writes the page of a plan, and what `plan --report` shares with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.explain import FILE, judged_for
from fourfold.cli.options import Cluster, Json, Planned, freeze_gc, priced, setting
from fourfold.cli.output import check_place
from fourfold.errors import InvalidInput
from fourfold.files import write_file

if TYPE_CHECKING:
    from fourfold.cluster import Cluster as Machines
    from fourfold.oracle.predict import Prediction
    from fourfold.oracle.scaling import Row
    from fourfold.planner import Ranking
    from fourfold.report.runs import Run

RUNS = "What `train --record` or `verify --record` wrote: predicted against measured."
WHAT_IF = "Seconds for the page's other batches, links and numbers of devices."
SECONDS = 20.0
STRATEGIES = 6  # whose scaling is shown
ALIKE = 0.9  # of the best plan's measured kernels: steps that rest on fewer are not to be compared with it

WhatIf = Annotated[float, typer.Option("--what-if", metavar="SECONDS", help=WHAT_IF)]
Told = Callable[[str, int, int], None]


def report(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help=FILE, show_default=False)],
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN...", help=RUNS, show_default=False)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    model: Planned = None,
    cluster: Cluster = None,
    precision: Annotated[str | None, typer.Option("--precision", help="By default the plan's.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="By default the plan's.")] = None,
    what_if: WhatIf = SECONDS,
    as_json: Json = False,
) -> None:
    """A page about a plan: its rivals, layers, memory, one step in time, scaling, what-ifs, and runs beside predictions."""
    voice = Console(json=as_json)
    with voice.counting(f"reading {file}") as told:
        from fourfold.planner import SearchTask, search
        from fourfold.planner.search import replay_plan
        from fourfold.plans.spec.plan_file import read_plan
        from fourfold.report.runs import read_run
        from fourfold.workload.graph_cache import graph_of_plan

        check_place(output)
        plan, made_for = read_plan(file)
        made = judged_for(file, made_for, cluster, precision, optimizer)
        measured = [read_run(path, of=plan) for path in runs or ()]
        graph, name = graph_of_plan(file, plan, model)
        asked_for = setting(made["cluster"], plan.size, made["precision"], made["optimizer"], "fourfold")
        freeze_gc()
        task = SearchTask(graph=priced(graph, asked_for), batch=plan.batch, setting=asked_for)
        ranking = search(task, lambda words: told(words, 0, 1))
        mine = replay_plan(task, plan)
        write_page(output, ranking, model=name, cluster=made["cluster"], chosen=mine, runs=measured, limit=what_if, told=told)
    voice.answer({"model": name, "file": str(output)}, lambda: f"written to {output}")


def write_page(
    path: Path,
    ranking: Ranking,
    *,
    model: str,
    cluster: str,
    chosen: Prediction | None = None,
    runs: Sequence[Run] = (),
    limit: float,
    told: Told,
) -> None:
    """Work out what the page shows besides the ranking, half of the time for each, and write it."""
    from fourfold.planner.what_if import what_if_grid
    from fourfold.report.costs import assumed
    from fourfold.report.page.page import page

    if limit < 0:
        raise InvalidInput(f"--what-if {limit:g}; give it 0 seconds or more")
    sized = partial(_sized, cluster, assumed(ranking.task.cluster))
    around = what_if_grid(ranking, sized, limit=limit / 2, say=told)
    rows = _scaling(ranking, sized, limit / 2, told)
    text = page(ranking, model=model, chosen=chosen, grid=around, scaling=rows, runs=runs)
    write_file(path, text)


def _sized(cluster: str, guessed: bool, devices: int) -> Machines:
    """The cluster with so many devices in use; refused where its rates are known otherwise: measured and assumed ones cannot
    be compared."""
    from fourfold.cluster import cluster_named
    from fourfold.report.costs import assumed

    found = cluster_named(cluster, devices=devices)
    if assumed(found) != guessed:
        raise InvalidInput(f"{cluster} is not calibrated with {devices} ranks; run `fourfold calibrate --ranks {devices}`")
    return found


def _scaling(ranking: Ranking, sized: Callable[[int], Machines], limit: float, told: Told) -> list[Row]:
    """The best strategies on fewer and twice as many devices, as far as there is time: all on few devices first."""
    from fourfold.errors import Error
    from fourfold.oracle.scaling import Study
    from fourfold.planner.search_task import AUTO

    task = ranking.task
    names = list(dict.fromkeys(c.plan.strategy.partition(":")[0] for c in ranking.candidates if c.plan.strategy != AUTO))
    settings = {}
    for count in sorted({1, *(2**k for k in range(20) if 2**k <= 2 * task.devices), task.devices}):
        try:
            settings[count] = task.setting.on(sized(count))
        except Error:  # the cluster has not so many, or its rates are not known alike
            continue
    if 1 not in settings:
        return []
    study, rows, begun = Study(graph=task.graph, settings=settings, batch=task.batch), [], time.perf_counter()
    cells = [(name, count) for count in settings for name in names[:STRATEGIES]]
    for done, (name, count) in enumerate(cells):
        if time.perf_counter() - begun > limit:
            break
        told(f"{name} on {count}", done, len(cells))
        rows.append(study.row(name, count))
    known = max((c.estimate.measured_share for c in ranking.candidates[:1]), default=0.0)
    return [row for row in rows if row.forecast is None or row.forecast.known_from.get("measured", 0.0) >= ALIKE * known]
