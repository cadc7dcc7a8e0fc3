"""The ParaDL oracle (arXiv 2104.09075): its formulas beside its printed projections and its authors' runs of ResNet-50 on ABCI,
projections of ResNet-50 and VGG16 by the formulas and by Fourfold's replay, the limits of each strategy, and how near our own
predictions come to what was measured.

Known of the paper: 3.1195 and 8.2456 ms of compute a sample, 1.28 M images of 3 x 226 x 226, 64 samples a GPU (32 for VGG16;
hybrids, weak scaling; 64 in all for filter and channel, strong scaling), groups of 4 within a node, 20 us a message, 50 and
12.5 GB/s. Unknown: the time of the weight update, which layers' outputs are exchanged, congestion. docs/cost-model.md has the
distance of every row.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from fourfold.cluster import cluster_named
from fourfold.errors import Error
from fourfold.graph import Graph
from fourfold.oracle.paradl.layers import Layer, layers_of
from fourfold.oracle.paradl.projection import Projection, inputs_of, project
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import estimate
from fourfold.plans import Options, Plan, lower_plan, named
from fourfold.reproduce.study import Expectation, Progress, Reproduction, Table, at_least, close_to, silent
from fourfold.workload.workload import load_workload

SAMPLES = 1.28e6
HYBRIDS = {"spatial+data": "data+spatial:space=4", "filter+data": "data+filter:model=4"}
"""The paper's names of strategies with a part inside a node, and ours."""
PUBLISHED = (32, 64, 128, 256)
PROJECTED = (4, 16, 32, 64, 128, 256, 512, 1024)
SEGMENTS = Options(stages=4, microbatches=8)
ACCURACY = {
    "data": 96.10,
    "filter": 85.56,
    "channel": 73.67,
    "data+filter": 91.43,
    "data+spatial": 83.46,
    "pipeline": 90.22,
}
"""ParaDL's accuracy by strategy, percent; their mean is 86.74."""
MEAN = 86.74
PIPELINES = ("gpipe", "1f1b-sno", "1f1b-so")


@dataclass(frozen=True, slots=True)
class Network:
    """A network of the paper: how it is built here, samples a GPU, seconds of compute a sample."""

    text: str
    per_gpu: int
    compute: float


RESNET50 = Network("resnet50,image=226", 64, 3.1195e-3)
VGG16 = Network("vgg16,image=226", 32, 8.2456e-3)


@cache
def published() -> list[dict[str, Any]]:
    """The rows of the authors' table."""
    text = files("fourfold.reproduce").joinpath("paradl_resnet50.csv").read_text("utf-8")
    whole = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return [{key: value if key == "strategy" else float(value) for key, value in row.items()} for row in whole]


@cache
def graph_of(network: Network) -> Graph:
    return load_workload(network.text, batch=4, data=False).graph


@cache
def prices(gpus: int) -> Prices:
    return Prices(cluster=cluster_named("abci", devices=gpus))


def weak(strategy: str) -> bool:
    """Whether the batch grows with the GPUs: under all but filter and channel."""
    return strategy not in ("filter", "channel")


@cache
def plan_of(network: Network, strategy: str, gpus: int) -> Plan:
    batch = network.per_gpu * (gpus if weak(strategy) else 1)
    options = SEGMENTS if strategy == "pipeline" else None
    return named(HYBRIDS.get(strategy, strategy), graph_of(network), ranks=gpus, batch=batch, options=options)


@cache
def epoch(network: Network, strategy: str, gpus: int) -> float:
    """Seconds by Fourfold's own estimate."""
    plan = plan_of(network, strategy, gpus)
    return estimate(lower_plan(graph_of(network), plan), prices(gpus)).step_seconds * SAMPLES / plan.batch


@cache
def known_layers(network: Network) -> tuple[Layer, ...]:
    """A network's sizes with the published compute of a sample; the update, unknown, costs nothing."""
    found = layers_of(graph_of(network), network.per_gpu, prices(1), optimizer="sgd")
    rest = (replace(layer, forward=0.0, backward=0.0, update=0.0) for layer in found[1:])
    return (replace(found[0], forward=network.compute, backward=0.0, update=0.0), *rest)


@cache
def projection(network: Network, strategy: str, gpus: int) -> Projection:
    """By ParaDL's formulas, with what is known of its inputs."""
    plan = plan_of(network, strategy, gpus)
    inputs = replace(inputs_of(graph_of(network), plan, prices(gpus)), layers=known_layers(network))
    return project(plan.strategy.partition(":")[0], inputs)


def off(row: dict[str, Any], what: str) -> float:
    """How far a formula lies from the printed projection, relative; `what`: comp or comm."""
    found = projection(RESNET50, row["strategy"], int(row["gpus"]))
    seconds = found.compute_seconds if what == "comp" else found.communication_seconds
    return float(seconds * SAMPLES / found.batch / row[f"paradl_{what}"] - 1)


def reproduce(progress: Progress = silent, *, runs: bool = True) -> Reproduction:
    """The paper rerun. Nothing is run anew: measured are the paper's runs, and ours of `make accuracy`."""
    progress("the authors' table", 0, 4)
    table, expected = _published()
    projected = []
    for k, (name, network) in enumerate((("ResNet-50", RESNET50), ("VGG16", VGG16))):
        progress(f"projecting {name}", 1 + k, 4)
        projected.append(_projected(name, network))
    progress("limits", 3, 4)
    limits, stopped = _limits()
    accuracy, near_enough = _accuracy()
    return Reproduction(
        name="paradl",
        title="ParaDL: an oracle for distributed training",
        tables=(table, *projected, limits, accuracy),
        expectations=(*expected, *stopped, *near_enough),
        notes=(
            "What the authors measured is their implementation's time; ours is what Fourfold would take there, by a roofline "
            "of the V100. Only the order is compared.",
            "Two printed totals do not add up (64 GPUs: filter measured, spatial+data projected); only their order is used.",
            "Our predictions were measured with kernels timed there; the dated rows are in benchmarks/results.",
        ),
    )


def _published() -> tuple[Table, list[Expectation]]:
    rows, expected = [], []
    for row in published():
        strategy, gpus = row["strategy"], int(row["gpus"])
        formula, ours = projection(RESNET50, strategy, gpus).epoch_seconds(SAMPLES), epoch(RESNET50, strategy, gpus)
        rows.append(
            (str(gpus), strategy, f"{row['measured_total']:.0f}", f"{row['paradl_total']:.0f}", f"{formula:.0f}", f"{ours:.0f}")
        )
    for gpus in PUBLISHED:
        expected += [
            _ranked(gpus, "measured", "Fourfold's estimate", lambda s, n: epoch(RESNET50, s, n)),
            _ranked(gpus, "paradl", "the formulas", lambda s, n: projection(RESNET50, s, n).epoch_seconds(SAMPLES)),
        ]
    for row in published():
        if row["strategy"] == "filter" and row["gpus"] == 64:
            expected.append(
                close_to(
                    "communication of filter on 64 by the formulas, s/epoch",
                    row["paradl_comm"] * (1 + off(row, "comm")),
                    row["paradl_comm"],
                    within=0.01,
                    mark="read",
                    digits=5,
                )
            )
    head = ("GPUs", "strategy", "measured by its authors", "printed projection", "formulas here", "Fourfold")
    return Table(title="ResNet-50 on ABCI, seconds an epoch", head=head, rows=tuple(rows)), expected


def _ranked(gpus: int, by: str, whose: str, seconds: Callable[[str, int], float]) -> Expectation:
    """That strategies follow each other as they did; ties are equal."""
    printed = {row["strategy"]: int(row[f"{by}_rank"]) for row in published() if row["gpus"] == gpus}
    found = {strategy: round(seconds(strategy, gpus), 6) for strategy in printed}
    distinct = sorted(set(found.values()))
    ours = {strategy: distinct.index(value) + 1 for strategy, value in found.items()}
    what = f"{gpus} GPUs: the order of {', '.join(printed)} by {whose}, as {'measured' if by == 'measured' else 'printed'}"
    return Expectation(
        what=what, ours=_places(ours), paper=_places(printed), mark="read", holds=ours == printed, chief=gpus == PUBLISHED[0]
    )


def _places(ranks: Mapping[str, int]) -> str:
    return " ".join(map(str, ranks.values()))


def _projected(name: str, network: Network) -> Table:
    strategies = ("data", *HYBRIDS, "filter", "channel", "pipeline")
    rows: list[tuple[str, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for strategy in strategies:
        for whose, seconds in (("formulas", _by_formula), ("Fourfold", epoch)):
            values = [_tried(seconds, network, strategy, gpus) for gpus in PROJECTED]
            rows.append((strategy, whose, *("" if v is None else f"{v:,.0f}" if v >= 1e3 else f"{v:.4g}" for v in values)))
            if whose == "Fourfold" and weak(strategy) and strategy != "pipeline":
                curves[strategy] = [(g, v) for g, v in zip(PROJECTED, values, strict=True) if v is not None]
    rows.append(("fastest", "Fourfold", *(_fastest(network, strategies, gpus) for gpus in PROJECTED)))
    note = (
        f"{network.per_gpu} samples a GPU; filter and channel {network.per_gpu} in all; pipeline of 4 GPUs in 8 segments. "
        "Empty: the strategy does not go so far."
    )
    return Table(
        title=f"{name} on ABCI, seconds an epoch by number of GPUs",
        note=note,
        rows=tuple(rows),
        head=("strategy", "by", *map(str, PROJECTED)),
        plot=curves,
    )


def _by_formula(network: Network, strategy: str, gpus: int) -> float:
    return projection(network, strategy, gpus).epoch_seconds(SAMPLES)


def _tried(seconds: Callable[[Network, str, int], float], network: Network, strategy: str, gpus: int) -> float | None:
    """None past a strategy's limit. Pipelines have as many GPUs as `SEGMENTS` has stages."""
    if strategy == "pipeline" and gpus != SEGMENTS.stages:
        return None
    try:
        if not weak(strategy) and projection(network, strategy, gpus).devices > projection(network, strategy, gpus).limit:
            return None
        return seconds(network, strategy, gpus)
    except Error:
        return None


def _fastest(network: Network, strategies: tuple[str, ...], gpus: int) -> str:
    found = {s: _tried(epoch, network, s, gpus) for s in strategies if s != "pipeline"}
    return min((s for s, v in found.items() if v is not None), key=lambda s: found[s] or 0.0)


def _limits() -> tuple[Table, list[Expectation]]:
    rows, expected = [], []
    for name, network in (("ResNet-50", RESNET50), ("VGG16", VGG16)):
        for strategy in ("data", "spatial", "filter", "channel", "pipeline", *HYBRIDS):
            gpus = 8 if strategy in HYBRIDS else 4
            found = projection(network, strategy, gpus)
            rows.append((name, strategy, f"{found.limit:,.0f}", found.limited_by))
            if strategy == "filter":
                expected.append(
                    Expectation(
                        what=f"filter parallelism of {name} stops at",
                        mark="read",
                        paper="64",
                        ours=f"{found.limit:.0f}, by {found.limited_by}",
                        holds=found.limit == 64,
                    )
                )
    note = (
        "Of data parallelism and the hybrids: with the batch of 4 and 8 GPUs. Channel leaves the first layer out, as its runs."
    )
    return Table(
        title="How far each strategy goes", head=("network", "strategy", "devices", "stopped by"), rows=tuple(rows), note=note
    ), expected


def shipped_accuracy() -> dict[str, Any]:
    """What `make accuracy` last gave: rows of place, model, plan, seconds predicted and measured; and when."""
    return dict(json.loads(files("fourfold.reproduce").joinpath("accuracy.json").read_text("utf-8")))


def _accuracy() -> tuple[Table, list[Expectation]]:
    kept = shipped_accuracy()
    rows = [(plan, 100 * (1 - abs(predicted - measured) / measured)) for _, _, plan, predicted, measured in kept["rows"]]
    shown = []
    for strategy in dict.fromkeys(_as_paradl(plan) for plan, _ in rows):
        mine = [value for plan, value in rows if _as_paradl(plan) == strategy]
        theirs = f"{ACCURACY[strategy]:.2f}" if strategy in ACCURACY else ""
        shown.append((strategy, str(len(mine)), f"{statistics.mean(mine):.2f}", f"{min(mine):.2f}", theirs))
    mean = statistics.mean(value for _, value in rows)
    shown.append(("all", str(len(rows)), f"{mean:.2f}", f"{min(value for _, value in rows):.2f}", f"{MEAN}"))
    table = Table(
        title=f"Accuracy of predictions, percent; ours measured {kept['date']} on {kept['where']}",
        rows=tuple(shown),
        head=("strategy", "rows", "mean", "worst", "ParaDL"),
        note="1 - |predicted - measured| / measured, as ParaDL defines it.",
    )
    return table, [at_least("mean accuracy of our predictions, %", mean, MEAN, mark="read", digits=4, chief=True), *_each(rows)]


def _each(rows: list[tuple[str, float]]) -> Iterator[Expectation]:
    for strategy, theirs in ACCURACY.items():
        mine = [value for plan, value in rows if _as_paradl(plan) == strategy]
        if mine and theirs < MEAN:  # where ParaDL itself is weak
            yield at_least(f"accuracy of {strategy}, %", statistics.mean(mine), theirs, mark="remembered", digits=4)


def _as_paradl(plan: str) -> str:
    """ParaDL has one pipeline."""
    return "pipeline" if plan in PIPELINES else plan
