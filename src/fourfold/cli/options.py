"""The options that several commands share, with their help; and what the five about stages and memory say together.

Nothing heavy is imported here: `--help` must come at once.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fourfold.errors import InvalidInput, nearest

if TYPE_CHECKING:
    from fourfold.graph import Graph
    from fourfold.oracle.cost_model import Setting
    from fourfold.plans import Options, Plan

PLANNED = "The plan's MODEL, captured again; by default its graph is looked up in the cache, where `plan -o` left it."
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
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan file, as `fourfold plan -o` writes it.")]
RankCount = Annotated[int | None, typer.Option("--ranks", help="Local processes; by default the plan's. Not under torchrun.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="sgd, momentum or adamw.")]
Cluster = Annotated[str | None, typer.Option("--cluster", metavar="CLUSTER", help=CLUSTER)]
Precision = Annotated[str, typer.Option("--precision", help="fp32, tf32, bf16 (autocast) or fp64.")]
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
    """What was asked of a strategy; refuses at once what no model could satisfy."""
    from fourfold.plans import Options

    return Options(stages=stages, microbatches=microbatches, schedule=schedule, recompute=recompute, zero=zero)


def load_chosen_plan(file: Path | None, strategy: str | None, batch: int | None, options: Options) -> Plan | None:
    """The plan of a file, or None where a strategy is named; never both."""
    from fourfold.plans import load_plan
    from fourfold.plans.strategies.named import parse

    if (file is None) == (strategy is None):
        raise InvalidInput("give either --plan FILE or --strategy NAME" + (", not both" if file else ""))
    if file is None:
        parse(str(strategy))
        return None
    loaded = load_plan(file)
    if batch is not None and batch != loaded.batch:
        raise InvalidInput(f"plan {file} is for a batch of {loaded.batch}, --batch is {batch}; leave it out or plan again")
    _check_unsaid(file, loaded, options)
    return loaded


def _check_unsaid(file: Path, plan: Plan, options: Options) -> None:
    """A plan file says everything: refuse an option beside it, even one that agrees."""
    says = {
        "stages": f"{len(plan.parts)} stages" if plan.stages else "no stages",
        "microbatches": f"{plan.microbatches} micro-batches",
        "schedule": f"schedule {plan.schedule}",
        "recompute": f"{len(plan.recompute)} segments to recompute",
        "zero": f"zero {plan.zero}",
    }
    for name, words in says.items():
        value = getattr(options, name)
        if value is not None:
            raise InvalidInput(f"plan {file} says {words}, --{name} is {value}; leave --{name} out or plan again")


def freeze_gc() -> None:
    """Once torch is loaded and a graph captured, these stay: the collector need not look through them with every plan, which
    took a third of an estimate on a thousand devices."""
    gc.collect()
    gc.freeze()


def setting(cluster: str, devices: int, precision: str, optimizer: str, cost_model: str) -> Setting:
    """What a plan for so many devices is predicted for; refuses names nobody knows and a cluster that is too small."""
    from fourfold.calibrate.kernel_table import known_prices
    from fourfold.cluster import cluster_named
    from fourfold.cluster.parts import PRECISIONS
    from fourfold.optimizers import OPTIMIZERS
    from fourfold.oracle.cost_model import COST_MODELS, Setting

    if devices < 1:
        raise InvalidInput(f"{devices} ranks asked for; use at least 1")
    found = cluster_named(cluster, devices=devices)
    prices = known_prices(found, one_of("precision", precision, PRECISIONS))
    for kind, _ in found.runs_in_use():
        kind.rate(prices.precision)  # refuses what a device does not compute in
    model = one_of("cost model", cost_model, COST_MODELS)
    return Setting(prices=prices, optimizer=one_of("optimizer", optimizer, tuple(OPTIMIZERS)), model=model)


def priced(graph: Graph, asked_for: Setting) -> Graph:
    """The graph whose times and bytes are told: in bf16, the one with autocast's casts as ops. ParaDL's formulas know none."""
    if asked_for.model != "fourfold" or asked_for.prices.precision != "bf16":
        return graph
    from fourfold.graph.autocast import as_computed

    return as_computed(graph, asked_for.prices.precision, asked_for.cluster.device(0).kind)


Name = TypeVar("Name", bound=str)


def one_of(what: str, text: str, known: Sequence[Name]) -> Name:
    """The text as one of the names there are."""
    for name in known:
        if text == name:
            return name
    raise InvalidInput(f"unknown {what} '{text}'{nearest(text, known)}; known: {', '.join(known)}")
