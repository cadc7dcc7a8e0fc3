"""The command that writes the page of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import (
    SECONDS,
    Cluster,
    Json,
    Planned,
    PlanOptimizer,
    PlanPath,
    PlanPrecision,
    WhatIf,
)

RUNS = "What `train --record` or `verify --record` wrote: predicted against measured."


def report(
    file: PlanPath,
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN...", help=RUNS, show_default=False)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    model: Planned = None,
    cluster: Cluster = None,
    precision: PlanPrecision = None,
    optimizer: PlanOptimizer = None,
    what_if: WhatIf = SECONDS,
    as_json: Json = False,
) -> None:
    """A page about a plan: its rivals, layers, memory, one step in time, scaling, what-ifs, and runs beside predictions."""
    console = Console(json=as_json)
    with console.counting(f"reading {file}") as progress:
        from fourfold.api.explanation import price_plan, request_plan
        from fourfold.api.output import check_place
        from fourfold.api.page import read_runs, report_priced
        from fourfold.api.settings import freeze_gc

        check_place(output)
        request = request_plan(file, cluster=cluster, precision=precision, optimizer=optimizer)
        measured = read_runs(runs or (), request)
        priced = price_plan(request, model)
        freeze_gc()
        report_priced(priced, output, runs=measured, what_if=what_if, progress=progress)
    console.answer({"model": priced.model, "file": str(output)}, lambda: f"written to {output}")
