"""The command that finds the best plan, or says how a named strategy splits a model; both with what it would cost."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import (
    Batch,
    Cluster,
    CostModel,
    Json,
    Microbatches,
    Model,
    Optimizer,
    Precision,
    Recompute,
    Schedule,
    Stages,
    Strategy,
    Trace,
    Zero,
    asked,
    priced,
    setting,
    settle,
)
from fourfold.cli.output import check_place, check_trace, write_trace, written
from fourfold.cli.report import SECONDS, WhatIf, write_page
from fourfold.cli.voice import Voice
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
    voice = Voice(json=as_json)
    if strategy is None:
        wanted = (stages, microbatches, schedule, recompute, zero)
        if any(value is not None for value in wanted):
            raise InvalidInput("--stages, --microbatches, --schedule, --recompute and --zero belong to a --strategy; name one, "
                               "or leave them to the search")  # fmt: skip
        return _searched(voice, model, devices, cluster, batch, precision, optimizer, cost_model, output, trace, top, fix or [],
                         time_limit, measure, report, what_if)  # fmt: skip
    if fix or time_limit is not None or measure or report is not None:
        raise InvalidInput("--fix, --time-limit, --measure and --report are for the search; leave --strategy out")
    with voice.working(f"capturing {model}") as say:
        from fourfold.cluster import LOCAL
        from fourfold.cluster.local import suits
        from fourfold.oracle.figures import predicted
        from fourfold.plans import named, pipeline, save_plan
        from fourfold.plans.schedule import FUSED
        from fourfold.plans.strategies import parse
        from fourfold.report.plans import Outlook, plan_record, plan_text
        from fourfold.runtime.subject import subject

        parse(strategy)
        options = asked(stages, microbatches, schedule, recompute, zero)
        where = cluster or (LOCAL if suits(devices) else None)
        asked_for = setting(where, devices, precision, optimizer, cost_model) if where is not None else None
        check_place(output)
        check_trace(trace, asked_for)
        seen = subject(model, batch=batch, data=False)
        settle()
        say(f"planning {strategy}")
        begun = time.perf_counter()
        made = seen.plan(strategy, ranks=devices, options=options)
        program = pipeline(seen.graph, made)
        outlook = None
        if asked_for is not None and made.schedule not in FUSED:
            graph = priced(seen.graph, asked_for)
            same = graph is seen.graph
            told = (
                program if same else pipeline(graph, named(strategy, graph, ranks=devices, batch=seen.batch, options=options))
            )
            outlook = Outlook(figures=predicted(told, asked_for), setting=asked_for)
        seconds = time.perf_counter() - begun
        if output is not None:
            written(lambda: save_plan(made, output, made_for=_made_for(where, precision, optimizer)), output)
        traced = write_trace(outlook.figures if outlook is not None else None, trace)
    file = str(output) if output is not None else None
    record = plan_record(made, program, outlook, seconds=seconds, file=file, trace=traced)
    voice.answer(record, lambda: plan_text(made, program, outlook, files=[path for path in (file, traced) if path]))
    return 0 if outlook is None or outlook.figures.feasible else 1


def _searched(
    voice: Voice, model: str, devices: int, cluster: str | None, batch: int | None, precision: str, optimizer: str,
    cost_model: str, output: Path | None, trace: Path | None, top: int, fix: list[str], time_limit: float | None,
    measure: bool, report: Path | None, what_if: float,
) -> int:  # fmt: skip
    """The plan the planner finds."""
    if cost_model != "fourfold":
        raise InvalidInput(f"the search replays plans, it knows no {cost_model}; leave --cost-model out or name a --strategy")
    with voice.working(f"capturing {model}") as say, ExitStack() as stack:
        from fourfold.cluster import LOCAL
        from fourfold.oracle.figures import figures_of
        from fourfold.planner import Task, search
        from fourfold.plans import save_plan
        from fourfold.report.ranking import ranking_record, ranking_text
        from fourfold.runtime.crew import crew, is_leader
        from fourfold.runtime.subject import subject

        asked_for = setting(cluster or LOCAL, devices, precision, optimizer, cost_model)
        fixed = tuple(_fixed(text) for text in fix)
        check_place(output)
        check_place(report)
        check_trace(trace, asked_for)
        seen = subject(model, batch=batch, data=False)
        settle()
        graph = priced(seen.graph, asked_for)
        limit = time_limit if time_limit is not None else float("inf")
        timed = None
        if measure:
            from fourfold.gauge.measuring import timing

            say(f"starting {devices} ranks")
            team = crew(devices)
            stack.enter_context(team)
            timed = timing(asked_for.cluster, team, asked_for.prices.precision)
        found = search(Task(graph=graph, batch=seen.batch, setting=asked_for, fixed=fixed, limit=limit, measure=timed), say)
        best = found.best
        if output is not None and best is not None and is_leader():
            made_for = _made_for(cluster or LOCAL, precision, optimizer)
            written(lambda: save_plan(seen.adopted(best.plan), output, made_for=made_for), output)
        traced = write_trace(figures_of(best.prediction), trace) if best is not None else None
        if report is not None and is_leader():
            write_page(report, found, model=model, cluster=cluster or LOCAL, limit=what_if, told=lambda words, *_: say(words))
    file = str(output) if output is not None and best is not None else None
    files = [path for path in (file, traced, str(report) if report is not None else None) if path]
    record = {**ranking_record(found, model=model, top=top, file=file, trace=traced), "report": str(report) if report else None}
    voice.answer(record, lambda: ranking_text(found, model=model, top=top, files=files))
    return 0 if best is not None else 1


def _fixed(text: str) -> tuple[str, str]:
    pattern, sign, split = text.partition("=")
    if not (pattern and sign and split):
        raise InvalidInput(f"--fix {text}: write OPS=SPLIT, as 'classifier.*=filter'")
    return pattern, split


def _made_for(cluster: str | None, precision: str, optimizer: str) -> dict[str, str] | None:
    return {"cluster": cluster, "precision": precision, "optimizer": optimizer} if cluster is not None else None
