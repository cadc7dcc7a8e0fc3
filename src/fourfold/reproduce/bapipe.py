"""BaPipe (arXiv 2012.12544): schedules, balanced partitions of VGG-16, ResNet-50 and GNMT on GPUs and FPGA boards, the
deepest GNMT that fits, and pipelines against DDP on a slow link.

The cuts are those of the planner's search for stages, replayed; against them data parallelism, and a cut into stages of as many
layers each. The paper's tables are not known: what it says in words is up to 3.2 times as fast and a quarter of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice

from fourfold.calibrate.kernel_table import known_prices
from fourfold.cluster import cluster_named
from fourfold.cluster.parts import Precision
from fourfold.errors import Error, InvalidInput
from fourfold.graph import Graph
from fourfold.ops.nest import nest_of
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.predict import Prediction, predict
from fourfold.planner.search import replay_plan, search
from fourfold.planner.search_task import SearchTask
from fourfold.planner.stages.boundary_search import hill_climb
from fourfold.planner.stages.partition import StagedPlan
from fourfold.planner.stages.stage_search import staged_plans
from fourfold.plans import Options, Plan, lower_plan, named
from fourfold.plans.spec.schedule import schedule_named
from fourfold.plans.spec.schedule_timing import Transfers, makespan
from fourfold.reproduce.race import DDP, OPTIMIZER, Contender, Outcome, Race, between
from fourfold.reproduce.study import Expectation, Mark, Progress, Reproduction, Steps, Table, at_least, silent
from fourfold.workload.workload import load_workload

STAGES, MICROBATCHES, FORWARD, BACKWARD, TRANSFER = 4, 32, 1.0, 2.0, 0.5
SCHEDULES: dict[str, tuple[Transfers, float, Mark]] = {
    "1f1b-as": ("stream", 105.0, "remembered"),
    "fbp-as": ("stream", 117.0, "unknown"),
    "1f1b-sno": ("blocking", 138.5, "remembered"),
    "1f1b-so": ("overlapped", 108.0, "remembered"),
}
"""How each moves micro-batches, and its time as rederived from the paper."""
SPEEDUP, REDUCTION = 3.2, 4.0  # the paper's largest
REPLAYED = 4  # of the plans with stages, by their estimates
RATE = "100mbit"
FORETOLD = (
    "The boards' kernels and the V100's are a roofline's; fbp-as, which runs a forward and a backward at once, is timed by its "
    "list of actions alone."
)
DEPTHS = range(4, 257, 4)

NORMS = (
    "Micro-batches of resnet50 take batch norm's statistics each from its own examples, as BaPipe's do; what the planner "
    "prefers of everything does not."
)


def _short(model: str) -> str:
    return model.partition(",")[0]


@dataclass(frozen=True, slots=True)
class Case:
    """A network on a cluster."""

    model: str
    cluster: str
    devices: int
    batch: int
    precision: Precision = "fp32"

    @property
    def words(self) -> str:
        return f"{_short(self.model)} on {self.cluster} x {self.devices}"


GPUS = tuple(
    Case(model, "abci", devices, each * devices)
    for model, each in (("vgg16", 32), ("resnet50", 64), ("gnmt", 64))
    for devices in (4, 8)
)
BOARDS = tuple(
    Case(model, cluster, 4, batch, "bf16")
    for model, batch in (("vgg16", 32), ("resnet50", 32), ("gnmt,width=512,vocabulary=8000", 32))
    for cluster in ("vcu118", "vcu129", "fpga-mixed")
)
SLOW = (Case("vgg16", "ethernet-1g", 4, 128), Case("gnmt", "ethernet-1g", 4, 256))
RACES = (
    (2, Race(model="vgg16-cifar", batch=32, steps=2, contenders=())),
    (2, Race(model="gnmt,layers=4,width=256,length=20,vocabulary=2000", batch=32, steps=3, contenders=())),
    (4, Race(model="gnmt,layers=4,width=256,length=20,vocabulary=2000", batch=32, steps=3, contenders=())),
)
PIPELINES = {
    f"{schedule}, {m} micro-batches": {"schedule": schedule, "microbatches": m}
    for schedule in ("1f1b-sno", "1f1b-so")
    for m in (4, 8)
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The best plan with stages, an even cut, data parallelism, and what the planner prefers of all."""

    case: Case
    best: Prediction
    even: Prediction | None
    data: Prediction
    chosen: str

    @property
    def words(self) -> str:
        return f"{self.case.words}, predicted"

    @property
    def speedup(self) -> float:
        return self.data.step_seconds / self.best.step_seconds

    @property
    def reduction(self) -> float:
        return self.data.peak_bytes / self.best.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Raced:
    """What a race between hosts showed."""

    hosts: int
    race: Race
    outcomes: dict[str, Outcome]

    @property
    def best(self) -> str:
        return min(PIPELINES, key=lambda name: self.outcomes[name].median)

    @property
    def speedup(self) -> float:
        return self.outcomes[DDP].median / self.outcomes[self.best].median

    @property
    def reduction(self) -> float:
        return self.outcomes["data"].held["peak"] / self.outcomes[self.best].held["peak"]

    @property
    def words(self) -> str:
        return f"{_short(self.race.model)} on {self.hosts} hosts at 100 Mbit/s, measured"


def reproduce(progress: Progress = silent, *, runs: bool = True) -> Reproduction:
    """The paper rerun."""
    cases = (*GPUS, *SLOW, *BOARDS)
    steps = Steps(progress, len(cases) + 2 + (len(RACES) if runs else 0))
    steps("schedules")
    schedules, expected = _schedules()
    found = []
    for case in cases:
        steps(f"cutting {case.words}")
        found.append(compared(case))
    steps("the deepest GNMT")
    tables = [schedules, _partitions(found), _cuts(found), _deepest()]
    notes = [FORETOLD, NORMS]
    raced = _raced(steps, notes) if runs else []
    if raced:
        tables.append(_measured(raced))
    expected += list(_expected(found, raced))
    return Reproduction(
        name="bapipe",
        title="BaPipe: balanced pipelines",
        tables=tuple(tables),
        expectations=tuple(expected),
        notes=tuple(notes),
    )


def _schedules() -> tuple[Table, list[Expectation]]:
    rows, expected = [], []
    for name, (transfers, want, mark) in SCHEDULES.items():
        schedule = schedule_named(name, STAGES, MICROBATCHES)
        time = makespan(schedule, [FORWARD] * STAGES, [BACKWARD] * STAGES, TRANSFER, transfers)
        flights = " ".join(str(schedule.in_flight(stage)) for stage in range(STAGES))
        rows.append((name, f"{time:g}", flights))
        expected.append(
            Expectation(
                what=f"{name}: time of a mini-batch", ours=f"{time:g}", paper=f"{want:g}", mark=mark, holds=time == want
            )
        )
    title = f"Schedules, N = {STAGES}, M = {MICROBATCHES}, F = {FORWARD:g}, B = {BACKWARD:g}, SR = {TRANSFER:g}"
    return Table(title=title, head=("schedule", "time", "micro-batches in flight by stage"), rows=tuple(rows)), expected


@cache
def graph_of(model: str) -> Graph:
    return load_workload(model, batch=4, data=False).graph


def compared(case: Case) -> Compared:
    """All of a case's contenders, replayed."""
    graph = graph_of(case.model)
    prices = known_prices(cluster_named(case.cluster, devices=case.devices), case.precision)
    task = SearchTask(graph=graph, batch=case.batch, setting=Setting(prices=prices, optimizer=OPTIMIZER))
    cuts = [cut for cut in staged_plans(task, 0.0, float("inf"), few=False, mixed=False) if isinstance(cut, StagedPlan)]
    plans = [cut.plan for cut in islice(sorted(cuts, key=lambda cut: cut.cost), REPLAYED)]
    streams = all(kind.asynchronous for kind, _ in prices.cluster.runs_in_use())
    plans = [replace(plan, schedule="1f1b-as") for plan in plans] if streams else plans
    tried = [replay_plan(task, plan) for plan in plans]
    first = min(
        (c for c in tried if c.feasible), key=lambda c: c.step_seconds, default=min(tried, key=lambda c: c.step_seconds)
    )
    best = hill_climb(first, graph, partial(replay_plan, task))
    data = replay_plan(task, named("data", graph, ranks=case.devices, batch=case.batch))
    return Compared(case=case, best=best, even=_even(task, best.plan), data=data, chosen=_chosen(task))


def _chosen(task: SearchTask) -> str:
    """What the planner would take, of everything."""
    best = search(task).best
    return "nothing fits" if best is None else "stages" if best.plan.stages else best.plan.strategy


def _even(task: SearchTask, like: Plan) -> Prediction | None:
    """As many stages with as many layers each; None where such a cut cannot be."""
    graph = task.graph.at(task.batch)
    layers = [op.path for op in graph.ops if nest_of(op, graph).anchor and op.name in task.graph.dependent]
    count = len(like.stages)
    firsts = [like.stages[0].first, *(layers[len(layers) * k // count] for k in range(1, count))]
    stages = tuple(replace(stage, first=first) for stage, first in zip(like.stages, firsts, strict=True))
    try:
        return replay_plan(task, replace(like, stages=stages))
    except Error:
        return None


def _partitions(found: list[Compared]) -> Table:
    rows = []
    for one in found:
        plan, even = one.best.plan, one.even
        sizes = "+".join(str(len(stage.ranks)) for stage in plan.stages)
        rows.append(
            (
                one.case.words,
                str(one.case.batch),
                f"{sizes}, {plan.microbatches}",
                f"{1e3 * one.best.step_seconds:.0f}",
                f"{one.speedup:.2f}",
                "" if even is None else f"{even.step_seconds / one.best.step_seconds:.2f}",
                f"{one.reduction:.2f}",
                one.chosen,
            )
        )
    head = ("case", "batch", "stages, micro", "ms", "x data", "x even", "memory", "of all")
    note = (
        "Foretold. Stages, micro: ranks of each stage, and micro-batches. x data, x even: times as fast as data parallelism "
        "and as stages of as many layers each. Memory: how many times less the fullest device holds than under data "
        "parallelism. Of all: what the planner prefers of everything."
    )
    return Table(title="Balanced pipelines", head=head, rows=tuple(rows), note=note)


def _cuts(found: list[Compared]) -> Table:
    rows = [(one.case.words, " | ".join(_layer(stage.first) for stage in one.best.plan.stages[1:])) for one in found]
    return Table(title="Where they are cut: the layers that later stages begin with", head=("case", "cuts"), rows=tuple(rows))


def _layer(path: str) -> str:
    return path.rpartition(".")[0] or path


def _deepest() -> Table:
    """The most layers of a wide GNMT that four V100s hold, by style."""
    devices, batch, width = 4, 128, 2048
    prices = known_prices(cluster_named("abci", devices=devices), "fp32")
    styles = {
        "data": ("data", None),
        "fsdp": ("fsdp", None),
        "gpipe": ("pipeline", Options(microbatches=16, schedule="gpipe")),
        "1f1b-so": ("pipeline", Options(microbatches=16, schedule="1f1b-so")),
        "1f1b-sno": ("pipeline", Options(microbatches=16, schedule="1f1b-sno")),
    }

    def fits(style: str, layers: int) -> bool:
        strategy, options = styles[style]
        graph = graph_of(f"gnmt,width={width},layers={layers}")
        try:
            plan = named(strategy, graph, ranks=devices, batch=batch, options=options)
        except Error:
            return False
        return predict(lower_plan(graph, plan), prices, optimizer=OPTIMIZER).feasible

    rows, base = [], 0
    for style in styles:
        most = deepest(partial(fits, style))
        base = base or most
        rows.append((style, str(most), f"{most / base:.1f}"))
    return Table(
        title=f"The deepest GNMT, {width} wide, that {devices} V100s of 16 GB hold, batch {batch}",
        rows=tuple(rows),
        head=("style", "layers", "of data's"),
        note=f"In steps of {DEPTHS.step} layers, memory predicted.",
    )


def deepest(fits: Callable[[int], bool]) -> int:
    """The last depth that fits, or 0: deeper ones do not."""
    low, high = -1, 0
    while high < len(DEPTHS) and fits(DEPTHS[high]):
        low, high = high, 2 * high + 1
    high = min(high, len(DEPTHS))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(DEPTHS[middle]) else (low, middle)
    return DEPTHS[low] if low >= 0 else 0


def _raced(steps: Steps, notes: list[str]) -> list[Raced]:
    staged = (Contender(name=name, strategy="pipeline", options=options) for name, options in PIPELINES.items())
    contenders = (Contender(name=DDP, strategy=DDP), Contender(name="data", strategy="data"), *staged)
    out = []
    for count, race in RACES:
        steps(f"timing {_short(race.model)} on {count} hosts at 100 Mbit/s")
        try:
            outcomes = between(replace(race, contenders=contenders), count=count, rate=RATE)
        except InvalidInput as reason:
            notes.append(f"Nothing was measured at 100 Mbit/s: {reason}")
            break
        out.append(Raced(hosts=count, race=race, outcomes=outcomes))
    return out


def _measured(raced: list[Raced]) -> Table:
    rows = []
    for one in raced:
        times = (f"{1e3 * one.outcomes[name].median:.0f}" for name in (DDP, "data", one.best))
        rows.append((_short(one.race.model), str(one.hosts), *times, one.best, f"{one.speedup:.2f}", f"{one.reduction:.2f}"))
    head = ("network", "hosts", "DDP, ms", "data, ms", "pipeline, ms", "which", "x DDP", "memory")
    return Table(title="Measured on hosts joined at 100 Mbit/s, medians of steps taken in turn", head=head, rows=tuple(rows))


def _expected(found: list[Compared], raced: list[Raced]) -> Iterator[Expectation]:
    chosen = [one.chosen for one in found if one.case.model == "resnet50" and one.case.cluster == "abci"]
    yield Expectation(
        what="resnet50 on abci needs no pipeline",
        ours=", ".join(chosen),
        paper="data parallelism",
        mark="remembered",
        holds="stages" not in chosen,
        chief=True,
    )
    least, where = min((one.even.step_seconds / one.best.step_seconds, one.case.words) for one in found if one.even is not None)
    yield at_least(f"no even cut is faster than the balanced one ({where})", least, 1.0, mark="unknown", unit=" x")
    every: list[Compared | Raced] = [*found, *raced]
    less, where = max((one.reduction, one.words) for one in every)
    yield Expectation(
        what=f"pipelines hold less than data parallelism, the most: {where}",
        ours=f"{less:.3g} x less",
        paper=f"up to {REDUCTION:g} x",
        mark="read",
        holds=less > 1,
        chief=True,
    )
    most, where = max((one.speedup, one.words) for one in every)
    yield Expectation(
        what=f"pipelines are faster than data parallelism, the most: {where}",
        ours=f"{most:.3g} x",
        paper=f"up to {SPEEDUP:g} x",
        mark="read",
        holds=most >= SPEEDUP,
        chief=True,
    )
