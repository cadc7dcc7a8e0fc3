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
    freeze_gc,
    options_from_args,
    priced,
    setting,
)
from fourfold.cli.output import check_place, check_trace, write_trace
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
    voice = Console(json=as_json)
    counts = _counts(devices)
    with voice.counting(f"capturing {model}") as told:
        from fourfold.oracle.cost_model import strategies_of
        from fourfold.oracle.scaling import Study
        from fourfold.plans.strategies.named import parse
        from fourfold.report.pictures import check_picture, scaling_picture
        from fourfold.report.scaling import scaling_record, scaling_text
        from fourfold.workload.graph_cache import model_graph

        for name in strategy or ():
            parse(name)
        options = options_from_args(stages, microbatches, schedule, recompute, zero)
        settings = {count: setting(cluster, count, precision, optimizer, cost_model) for count in sorted({1, *counts})}
        names = list(dict.fromkeys(strategy or strategies_of(settings[1].model)))
        cells = [(count, name) for count in counts for name in names]
        if trace is not None and len(cells) > 1:
            raise InvalidInput(f"--trace shows one step, {len(cells)} are asked for; give one of --devices and one --strategy")
        check_trace(trace, settings[1])
        check_place(plot)
        check_picture(plot)
        seen = model_graph(model, batch=batch)
        freeze_gc()
        graph = priced(seen.graph, settings[1])
        study = Study(
            graph=graph,
            settings=settings,
            batch=seen.batch,
            scaling="weak" if weak else "strong",
            samples=samples,
            options=options,
        )
        rows = []
        for done, (count, name) in enumerate(cells):
            told(f"{name} on {count}", done, len(cells))
            rows.append(study.row(name, count))
        file = write_trace(rows[0].forecast, trace)
        if plot is not None:
            scaling_picture(rows, plot, title=f"{model} on {cluster}", weak=weak)
    last = settings[counts[-1]]
    record = scaling_record(study, rows, last, model=model, trace=file)
    voice.answer(record, lambda: scaling_text(study, rows, last, model=model, trace=file))
    return 0 if any(row.feasible for row in rows) else 1


def _counts(text: str) -> tuple[int, ...]:
    """Numbers of devices, each once, rising."""
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not int(word):
            raise InvalidInput(f"--devices {text}: '{word.strip()}' is no number of devices; write them as 1,2,4")
        found.append(int(word))
    return tuple(sorted(set(found)))
