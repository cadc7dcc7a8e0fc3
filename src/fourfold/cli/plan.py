"""The command that finds the best plan, or says how a named strategy splits a model; both with what it would cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import (
    Batch,
    Cluster,
    CostModel,
    Json,
    Microbatches,
    Model,
    Optimizer,
    Plot,
    Precision,
    Recompute,
    Schedule,
    Stages,
    Strategy,
    Trace,
    Zero,
    freeze_gc,
    options_from_args,
    priced,
    setting,
)
from fourfold.cli.output import check_place, check_trace, draw_step, write_plan, write_trace
from fourfold.cli.report import SECONDS, WhatIf
from fourfold.cli.search import Search
from fourfold.errors import InvalidInput

MEASURE = "Time the kernels of the best plans on this machine, or on the ranks of torchrun, and search again by them."
FIX = "Ops, a pattern as layers.3.*, that shall be split so on some axis; may be given several times."


def plan(
    model: Model,
    devices: Annotated[int, typer.Option("--devices", help="How many ranks to plan for.")],
    cluster: Cluster = None,
    strategy: Strategy = None,
    batch: Batch = None,
    precision: Precision = "fp32",
    optimizer: Optimizer = "sgd",
    cost_model: CostModel = "fourfold",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    recompute: Recompute = None,
    zero: Zero = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    trace: Trace = None,
    plot: Plot = None,
    top: Annotated[int, typer.Option("--top", help="How many plans to show, if no strategy is named.")] = 8,
    fix: Annotated[list[str] | None, typer.Option("--fix", metavar="OPS=SPLIT", help=FIX, show_default=False)] = None,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Seconds to search at most.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help=MEASURE)] = False,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page about the plans to this HTML file.")] = None,
    what_if: WhatIf = SECONDS,
    as_json: Json = False,
) -> int:
    """Finds the best plan or, with --strategy, says how that splits a model; what it would cost; `-o` writes the plan.

    Exit code 1 if nothing fits. Without --cluster the costs are those on this machine.
    """
    voice = Console(json=as_json)
    if strategy is None:
        wanted = (stages, microbatches, schedule, recompute, zero)
        if any(value is not None for value in wanted):
            raise InvalidInput(
                "--stages, --microbatches, --schedule, --recompute and --zero belong to a --strategy; name one, "
                "or leave them to the search"
            )
        if cost_model != "fourfold":
            raise InvalidInput(
                f"the search replays plans, it knows no {cost_model}; leave --cost-model out or name a --strategy"
            )
        from fourfold.cluster import LOCAL

        return Search(
            model=model,
            devices=devices,
            cluster=cluster or LOCAL,
            batch=batch,
            precision=precision,
            optimizer=optimizer,
            output=output,
            trace=trace,
            plot=plot,
            report=report,
            what_if=what_if,
            top=top,
            fix=tuple(fix or ()),
            limit=time_limit,
            measure=measure,
        ).run(voice)
    if fix or time_limit is not None or measure or report is not None:
        raise InvalidInput("--fix, --time-limit, --measure and --report are for the search; leave --strategy out")
    with voice.working(f"capturing {model}") as say:
        from fourfold.cluster import LOCAL
        from fourfold.cluster.local import suits
        from fourfold.oracle.cost_model import forecast
        from fourfold.plans import lower_plan, named
        from fourfold.plans.spec.schedule import FUSED
        from fourfold.plans.strategies.named import parse
        from fourfold.report.pictures import check_picture
        from fourfold.report.plans import Outlook, plan_record, plan_text
        from fourfold.workload.graph_cache import model_graph

        parse(strategy)
        options = options_from_args(stages, microbatches, schedule, recompute, zero)
        where = cluster or (LOCAL if suits(devices) else None)
        asked_for = setting(where, devices, precision, optimizer, cost_model) if where is not None else None
        check_place(output)
        check_trace(trace, asked_for)
        check_trace(plot, asked_for)
        check_picture(plot)
        seen = model_graph(model, batch=batch)
        freeze_gc()
        say(f"planning {strategy}")
        begun = time.perf_counter()
        made = seen.plan(strategy, ranks=devices, options=options)
        program = lower_plan(seen.graph, made)
        outlook = None
        if asked_for is not None and made.schedule not in FUSED:
            graph = priced(seen.graph, asked_for)
            same = graph is seen.graph
            told = (
                program if same else lower_plan(graph, named(strategy, graph, ranks=devices, batch=seen.batch, options=options))
            )
            outlook = Outlook(forecast=forecast(told, asked_for), setting=asked_for)
        seconds = time.perf_counter() - begun
        if output is not None:
            write_plan(made, seen.graph, output, made_for=_made_for(where, precision, optimizer))
        traced = write_trace(outlook.forecast if outlook is not None else None, trace)
        draw_step(outlook.forecast if outlook is not None else None, plot, f"{model} by {strategy}")
    file = str(output) if output is not None else None
    record = plan_record(made, program, outlook, seconds=seconds, file=file, trace=traced)
    voice.answer(record, lambda: plan_text(made, program, outlook, files=[path for path in (file, traced) if path]))
    return 0 if outlook is None or outlook.forecast.feasible else 1


def _made_for(cluster: str | None, precision: str, optimizer: str) -> dict[str, str] | None:
    return {"cluster": cluster, "precision": precision, "optimizer": optimizer} if cluster is not None else None
