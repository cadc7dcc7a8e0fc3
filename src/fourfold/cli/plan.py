"""The command that lowers a named strategy and says what it would cost."""

from __future__ import annotations

import time
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
from fourfold.cli.voice import Voice
from fourfold.errors import InvalidInput


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
    as_json: Json = False,
) -> int:
    """How a named strategy splits a model, and what it would cost; `-o` writes the plan. Exit code 1 if it does not fit.

    Without --cluster the costs are those on this machine, unless it has far too few cores for so many ranks.
    """
    voice = Voice(json=as_json)
    if strategy is None:
        raise InvalidInput("name a --strategy, as data, filter or spatial; the planner that finds one does not exist yet")
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
            written(lambda: save_plan(made, output), output)
        traced = write_trace(outlook.figures if outlook is not None else None, trace)
    file = str(output) if output is not None else None
    record = plan_record(made, program, outlook, seconds=seconds, file=file, trace=traced)
    voice.answer(record, lambda: plan_text(made, program, outlook, files=[path for path in (file, traced) if path]))
    return 0 if outlook is None or outlook.figures.feasible else 1
