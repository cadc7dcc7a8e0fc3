"""The command that predicts how strategies scale on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import (
    CLUSTER,
    STRATEGY,
    Batch,
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
    Trace,
    Zero,
    options_from_args,
)
from fourfold.cli.output import check_trace, write_trace
from fourfold.errors import InvalidInput

DEVICES = "Numbers of devices, as 1,2,4,8."
WEAK = "Keep the batch of each device, or that of all together."
SAMPLES = "Samples of an epoch; without it no time of an epoch is given."
STRATEGIES_HELP = f"{STRATEGY} May be given several times; by default all there are."


def simulate(
    model: Model,
    cluster: Annotated[str, typer.Option("--cluster", metavar="CLUSTER", help=CLUSTER)],
    devices: Annotated[str, typer.Option("--devices", metavar="N,N,...", help=DEVICES)],
    strategy: Annotated[list[str] | None, typer.Option("--strategy", help=STRATEGIES_HELP, show_default=False)] = None,
    weak: Annotated[bool, typer.Option("--weak/--strong", help=WEAK)] = False,
    batch: Batch = None,
    samples: Annotated[int | None, typer.Option("--samples", help=SAMPLES)] = None,
    precision: Precision = "fp32",
    optimizer: Optimizer = "sgd",
    cost_model: CostModel = "fourfold",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    recompute: Recompute = None,
    zero: Zero = None,
    trace: Trace = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Predicted steps over numbers of devices and strategies, weak or strong. Exit code 1 if nothing is feasible.

    The batch is that of all devices; with --weak, that of each.
    """
    console = Console(json=as_json)
    counts = _counts(devices)
    with console.counting(f"capturing {model}") as progress:
        from fourfold.api.output import check_place
        from fourfold.api.planning import graph_of
        from fourfold.api.scaling import request_scaling, scaling_table
        from fourfold.api.settings import freeze_gc
        from fourfold.report.pictures import check_picture, scaling_picture
        from fourfold.report.scaling import scaling_record, scaling_text

        request = request_scaling(
            cluster,
            counts,
            strategies=strategy or (),
            weak=weak,
            samples=samples,
            precision=precision,
            optimizer=optimizer,
            cost_model=cost_model,
            options=options_from_args(stages, microbatches, schedule, recompute, zero),
        )
        cells = len(request.cells)
        if trace is not None and cells > 1:
            raise InvalidInput(f"--trace shows one step, {cells} are asked for; give one of --devices and one --strategy")
        check_trace(trace, request.settings[1])
        check_place(plot)
        check_picture(plot)
        source = graph_of(model, batch=batch)
        freeze_gc()
        table = scaling_table(request, source, progress)
        rows = table.rows
        file = write_trace(rows[0].forecast, trace)
        if plot is not None:
            scaling_picture(rows, plot, title=f"{model} on {cluster}", weak=weak)
    record = scaling_record(table.study, rows, table.largest, model=model, trace=file)
    console.answer(record, lambda: scaling_text(table.study, rows, table.largest, model=model, trace=file))
    return 0 if table.feasible else 1


def _counts(text: str) -> tuple[int, ...]:
    """Numbers of devices, each once, rising."""
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not int(word):
            raise InvalidInput(f"--devices {text}: '{word.strip()}' is no number of devices; write them as 1,2,4")
        counts.append(int(word))
    return tuple(sorted(set(counts)))
