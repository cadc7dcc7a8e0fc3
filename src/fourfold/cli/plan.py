"""The command that finds the best plan, or says how a named strategy splits a model; both with what it would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import (
    SECONDS,
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
    WhatIf,
    Zero,
    options_from_args,
)
from fourfold.cli.output import check_trace, draw_step, write_trace
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
    console = Console(json=as_json)
    own = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "recompute": recompute, "zero": zero}
    if strategy is None:
        _check_search(own, cost_model)
        return Search(
            model=model,
            devices=devices,
            cluster=cluster,
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
        ).run(console)
    if fix or time_limit is not None or measure or report is not None:
        raise InvalidInput("--fix, --time-limit, --measure and --report are for the search; leave --strategy out")
    return StrategyCommand(
        model=model,
        devices=devices,
        strategy=strategy,
        cluster=cluster,
        batch=batch,
        precision=precision,
        optimizer=optimizer,
        cost_model=cost_model,
        options=own,
        output=output,
        trace=trace,
        plot=plot,
    ).run(console)


def _check_search(options: Mapping[str, object], cost_model: str) -> None:
    """Refuse options that belong to a strategy."""
    if any(value is not None for value in options.values()):
        raise InvalidInput(
            "--stages, --microbatches, --schedule, --recompute and --zero belong to a --strategy; name one, "
            "or leave them to the search"
        )
    if cost_model != "fourfold":
        raise InvalidInput(f"the search replays plans, it knows no {cost_model}; leave --cost-model out or name a --strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCommand:
    """The arguments of `plan --strategy`. `options`: those of `options_from_args`, by name."""

    model: str
    devices: int
    strategy: str
    cluster: str | None
    batch: int | None
    precision: str
    optimizer: str
    cost_model: str
    options: Mapping[str, object]
    output: Path | None
    trace: Path | None
    plot: Path | None

    def run(self, console: Console) -> int:
        """Plan, answer and write; the exit code."""
        with console.working(f"capturing {self.model}") as say:
            from fourfold.api.output import check_place, write_plan
            from fourfold.api.planning import graph_of, parse, plan_strategy
            from fourfold.api.settings import default_cluster, freeze_gc, setting_of
            from fourfold.report.pictures import check_picture
            from fourfold.report.plans import Outlook, plan_record, plan_text

            parse(self.strategy)
            options = options_from_args(**self.options)  # type: ignore[arg-type]
            cluster = self.cluster or default_cluster(self.devices)
            by_name = {"precision": self.precision, "optimizer": self.optimizer}
            setting = None
            if cluster is not None:
                setting = setting_of(cluster, self.devices, **by_name, cost_model=self.cost_model)
            check_place(self.output)
            check_trace(self.trace, setting)
            check_trace(self.plot, setting)
            check_picture(self.plot)
            source = graph_of(self.model, batch=self.batch)
            freeze_gc()
            say(f"planning {self.strategy}")
            result = plan_strategy(source, self.strategy, self.devices, setting=setting, options=options)
            if self.output is not None:
                made_for = {"cluster": cluster, **by_name} if cluster is not None else None
                write_plan(result.plan, source.graph, self.output, made_for=made_for)
            trace_file = write_trace(result.cost, self.trace)
            draw_step(result.cost, self.plot, f"{self.model} by {self.strategy}")
        outlook = Outlook(forecast=result.cost, setting=setting) if result.cost is not None and setting is not None else None
        file = str(self.output) if self.output is not None else None
        record = plan_record(result.plan, result.lowered, outlook, seconds=result.seconds, file=file, trace=trace_file)
        files = [path for path in (file, trace_file) if path]
        console.answer(record, lambda: plan_text(result.plan, result.lowered, outlook, files=files))
        return 0 if result.cost is None or result.cost.feasible else 1
