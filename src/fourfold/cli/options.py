"""The options that several commands share, with their help.

Nothing heavy is imported here: `--help` must come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fourfold.api import Options

PLANNED = "The plan's MODEL, captured again; by default its graph is looked up in the cache, where `plan -o` left it."
FILE = "A plan file, as `fourfold plan -o` writes it."
WHAT_IF = "Seconds for the page's other batches, links and numbers of devices."
SECONDS = 20.0  # of --what-if
MODEL = "A built-in name (`fourfold models`), package.module:factory or path/file.py:factory; arguments after commas."
STRATEGY = "A named strategy, as data, grid:pr=2, splitbrain:k=2 or data+pipeline."
SCHEDULE = "1f1b-so (the default of pipelines), 1f1b-sno, gpipe or interleaved; only to plan: 1f1b-as, fbp-as."
RECOMPUTE = "Drop activations and compute them again for backward, in so many segments per stage, as 4; 0: keep all."
CLUSTER = "A preset (`fourfold clusters`), a TOML file or `local`, this machine."
COST_MODEL = "fourfold, which replays the program, or paradl, the formulas of that paper."
TRACE = "Write the predicted step to this file, for chrome://tracing or ui.perfetto.dev."
ZERO = "1: divide the optimizer's state over ranks that hold the same weights; 3: the weights too; 0: neither."
CALIBRATED = "The file that `calibrate` wrote for these ranks; by default this machine as it was calibrated."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)]
Planned = Annotated[str | None, typer.Option("--model", metavar="MODEL", help=PLANNED, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Global batch size; by default the model's own.")]
Seed = Annotated[int, typer.Option("--seed", help="Of initial weights and made-up data.")]
Strategy = Annotated[str | None, typer.Option("--strategy", help=STRATEGY)]
PlanFile = Annotated[Path | None, typer.Option("--plan", help=FILE)]
RankCount = Annotated[int | None, typer.Option("--ranks", help="Local processes; by default the plan's. Not under torchrun.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: GPUs if every rank can have one, else cpu.")]
ShareGpu = Annotated[bool, typer.Option("--share-gpu", help="Let ranks share a GPU if there are too few, to try a plan: slow.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="sgd, momentum or adamw.")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help=FILE, show_default=False)]
PlanPrecision = Annotated[str | None, typer.Option("--precision", help="By default the plan's.")]
PlanOptimizer = Annotated[str | None, typer.Option("--optimizer", help="By default the plan's.")]
WhatIf = Annotated[float, typer.Option("--what-if", metavar="SECONDS", help=WHAT_IF)]
Cluster = Annotated[str | None, typer.Option("--cluster", metavar="CLUSTER", help=CLUSTER)]
Precision = Annotated[str, typer.Option("--precision", help="fp32, tf32 (GPUs only), bf16 (autocast) or fp64.")]
CostModel = Annotated[str, typer.Option("--cost-model", help=COST_MODEL)]
Trace = Annotated[Path | None, typer.Option("--trace", help=TRACE)]
Stages = Annotated[int | None, typer.Option("--stages", help="Cut the layers into so many pipeline stages, as 2.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", help="Cut every batch into so many, as 8.")]
Schedule = Annotated[str | None, typer.Option("--schedule", help=SCHEDULE)]
Recompute = Annotated[int | None, typer.Option("--recompute", metavar="N", help=RECOMPUTE)]
Zero = Annotated[int | None, typer.Option("--zero", metavar="1|3", help=ZERO)]

Calibrated = Annotated[str | None, typer.Option("--cluster", help=CALIBRATED)]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it into this .png, .svg or .pdf file (needs matplotlib).")]
Record = Annotated[Path | None, typer.Option("--record", help="Write what --json prints to this file, for `report`.")]
Predict = Annotated[bool, typer.Option("--predict/--no-predict", help="Say beforehand how long a step will take.")]


def options_from_args(
    stages: int | None, microbatches: int | None, schedule: str | None, recompute: int | None, zero: int | None
) -> Options:
    """The options of a strategy; refuses at once what no model could satisfy."""
    from fourfold.api import Options

    return Options(stages=stages, microbatches=microbatches, schedule=schedule, recompute=recompute, zero=zero)
