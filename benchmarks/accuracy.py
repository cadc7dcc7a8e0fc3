"""Predicted before, then measured: step times of every strategy on local ranks and between two hosts joined at 1 Gbit/s.

Each place is calibrated. Then, model by model, every plan is predicted, which times the model's kernels, and the predictions
are written down; then the plans run, on fresh processes, in rounds one after the other, those whose steps lie far apart more
often, and a plan's time is the median of its steps of all rounds. Accuracy is 1 - |predicted - measured| / measured, as ParaDL
defines it.

Shared machines change their speed, by up to a third in the first runs of this program. So the speed of the machine
(`fourfold.calibrate.machine_speed`) is measured before, amid and after every run, and steps are normalised to the reference
speed that the prediction is for. By how much follows from the prediction: kernels change by their share of arithmetic,
exchanges between hosts not at all, for there the link limits. Steps by the clock are recorded and summed up too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from records import RESULTS, write_record

from fourfold.calibrate.calibration import calibrated
from fourfold.calibrate.kernels import ROUNDS, Rounds, arithmetic, samples
from fourfold.calibrate.machine_speed import measure_speed, speed_exponent
from fourfold.calibrate.measured_prices import measured_prices
from fourfold.calibrate.robust_stats import interquartile_range
from fourfold.cluster import Cluster, load_cluster, save_cluster
from fourfold.files import write_file
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import Estimate, estimate
from fourfold.plans import LoweredPlan, Options, Plan, lower_plan
from fourfold.runs.train import one_step, start
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import TorchrunRanks, is_leader, rank_pool
from fourfold.workload.workload import Workload, load_workload

MODELS = {
    "vgg16-cifar": ("vgg16-cifar", 16),
    "resnet50": ("resnet50,image=64", 8),
    "unet3d": ("unet3d,size=32,width=8,depth=3", 4),
    "gpt2": ("gpt2,layers=4,width=256,heads=8,length=128,vocabulary=2000", 8),
    "gnmt": ("gnmt,layers=4,width=256,length=20,vocabulary=2000", 16),
}
STAGES = {"microbatches": 4}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data", {}),
    "filter": ("filter", {}),
    "channel": ("channel", {}),
    "spatial": ("spatial", {}),
    "splitbrain": ("splitbrain:k=2", {}),
    "fsdp": ("fsdp", {}),
    "zero1": ("data", {"zero": 1}),
    "recompute": ("data", {"recompute": 4}),
    "gpipe": ("pipeline", {**STAGES, "schedule": "gpipe"}),
    "1f1b-sno": ("pipeline", {**STAGES, "schedule": "1f1b-sno"}),
    "1f1b-so": ("pipeline", {**STAGES, "schedule": "1f1b-so"}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: PLANS[name] for name in ("data", "filter", "channel", "spatial", "splitbrain", "fsdp", "1f1b-so")},
    "data+filter": ("data+filter", {}),
    "data+channel": ("data+channel", {}),
    "data+spatial": ("data+spatial", {}),
    "data+pipeline": ("data+pipeline", STAGES),
    "filter+pipeline": ("filter+pipeline", STAGES),
    "spatial+pipeline": ("spatial+pipeline", STAGES),
}
HOSTS = {name: plan for name, plan in PLANS.items() if name not in ("recompute", "gpipe")}
PLACES = {"2": PLANS, "4": FOUR, "hosts": HOSTS}
RATE = "1gbit"
OPTIMIZER = "momentum"
SLOWER = 1.1  # a slower machine, to see how much longer a step takes on it
EXCHANGES = ("gradient_exchange", "layer_exchange", "halo")
RUNS, STEPS, WARM_UP = 2, 9, 1
MOST_RUNS, STEADY = 5, 0.2  # runs of plans whose steps lie further apart, from quartile to quartile
FEW = Rounds(5, 5)  # a step is a sum of hundreds of kernels: what one strays evens out
SHIPPED = Path(__file__).parents[1] / "src" / "fourfold" / "reproduce" / "accuracy.json"
STACK = ExitStack()


@dataclass
class Row:
    """One plan: predicted, then measured."""

    place: str
    model: str
    plan: str
    predicted: float
    low: float
    high: float
    breakdown: dict[str, float]
    measured_share: float
    steps: list[float]  # seconds by the clock
    speeds: list[float]  # the factor that brings each to reference speed
    speed_exponent: float = 1.0  # the step changes by this power of the speed

    @property
    def normalised(self) -> list[float]:
        """The steps at the calibration's reference speed."""
        return [step * speed for step, speed in zip(self.steps, self.speeds, strict=True)]

    @property
    def measured(self) -> float:
        return statistics.median(self.normalised)

    @property
    def steady(self) -> bool:
        """Whether it was run often enough; what was predicted does not matter here."""
        return len(self.steps) >= RUNS * STEPS and interquartile_range(self.normalised) <= STEADY * self.measured

    @property
    def clock(self) -> float:
        return statistics.median(self.steps)

    @property
    def accuracy(self) -> float:
        return 1 - abs(self.predicted - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def cases(place: str, only: list[str]) -> Iterator[tuple[str, str]]:
    wanted = [text.split("/") for text in only]
    for model in MODELS:
        for plan in PLACES[place]:
            if not wanted or any(set(words) <= {model, plan} for words in wanted):
                yield model, plan


def predict_rows(
    place: str,
    model: str,
    plans: list[str],
    workload: Workload,
    cluster: Cluster,
    team: LocalRanks | TorchrunRanks,
    rounds: Rounds = ROUNDS,
) -> list[Row]:
    """A model's rows without their measurements; its kernels are timed first, those of all plans in turn."""
    lowered = {plan: lower_plan(workload.graph, build_plan(place, plan, workload, team)) for plan in plans}
    prices = measured_prices(lowered.values(), cluster, team, rounds=rounds)
    rows = []
    for plan, program in lowered.items():
        estimated = estimate(program, prices, optimizer=OPTIMIZER)
        low, high = estimated.interval
        terms, power = dict(estimated.breakdown), step_speed_exponent(program, prices, estimated, wire=place == "hosts")
        rows.append(Row(place, model, plan, estimated.step_seconds, low, high, terms, estimated.measured_share, [], [], power))
        say(f"{place} {model} {plan}: predicted {estimated.step_seconds * 1e3:.1f} ms")
    return rows


def step_speed_exponent(program: LoweredPlan, prices: Prices, estimated: Estimate, *, wire: bool) -> float:
    """The power of the speed by which a step changes: kernels from a prediction at a lower speed, and its other parts."""
    slower = dict(prices.kernels)
    for key, sample in samples(program, {}).items():
        time, factor = slower[key], SLOWER ** speed_exponent(arithmetic(sample.kernel))
        slower[key] = replace(time, forward=time.forward * factor, backward=time.backward * factor)
    longer = estimate(program, replace(prices, kernels=slower), optimizer=OPTIMIZER).step_seconds
    others = sum(estimated.breakdown[term] for term in ("update", *(EXCHANGES if not wire else ()))) / estimated.step_seconds
    return math.log(longer / estimated.step_seconds) / math.log(SLOWER) + others * speed_exponent()


def build_plan(place: str, plan: str, workload: Workload, team: LocalRanks | TorchrunRanks) -> Plan:
    strategy, options = PLACES[place][plan]
    return workload.plan(strategy, ranks=team.count, options=Options(**options))


def run(row: Row, plan: Plan, workload: Workload, team: LocalRanks | TorchrunRanks, reference: float) -> None:
    """Add the step times of one round."""
    start(workload, plan, team, optimizer=OPTIMIZER)
    looks = []
    for step in range(WARM_UP + STEPS):
        if step in (WARM_UP, WARM_UP + STEPS // 2):
            looks.append(team(measure_speed)[0])
        slowest = max(seconds for _, seconds in team(one_step, step))
        if step >= WARM_UP:
            row.steps.append(slowest)
    looks.append(team(measure_speed)[0])
    row.speeds += [(reference / statistics.mean(looks)) ** row.speed_exponent] * STEPS


def calibrate(ranks: LocalRanks | TorchrunRanks, path: Path) -> None:
    """Measure the ranks into a file."""
    with ranks as team:
        for progress in calibrated(team):
            say(f"  {progress.done} of {progress.of}: {progress.next}", end="\r")
        if is_leader():
            save_cluster(progress.cluster, path)


def predict(place: str, model: str, only: list[str], cluster: Cluster) -> list[Row]:
    """The rows of a model without their measurements."""
    text, batch = MODELS[model]
    with ranks_of(place) as team:
        plans = [plan for name, plan in cases(place, only) if name == model]
        return predict_rows(place, model, plans, load_workload(text, batch=batch), cluster, team, FEW)


def measure(place: str, model: str, rows: list[Row], reference: float) -> list[Row]:
    """One round of a model's plans, on fresh ranks."""
    text, batch = MODELS[model]
    with ranks_of(place) as team:
        workload = load_workload(text, batch=batch)
        for row in rows:
            run(row, build_plan(place, row.plan, workload, team), workload, team, reference)
            say(line(row))
    return rows


def ranks_of(place: str) -> LocalRanks | TorchrunRanks:
    return rank_pool(int(place) if place != "hosts" else None)


def place_rows(place: str, only: list[str], folder: Path, output: Path, before: list[Row]) -> list[Row]:
    """All rows of one place: calibrated, predicted, then measured; written down model by model, after those of `before`."""
    file, kept = folder / "cluster.toml", folder / f"{place}.json"
    models = list(dict.fromkeys(model for model, _ in cases(place, only)))
    say(f"{place}: calibrating")
    job(place, "calibrate", file, kept)
    write_file(output.with_name(f"{output.stem}-{place}.toml"), file.read_text())
    for model in models:
        job(place, "predict", file, kept, "--model", model, *(part for text in only for part in ("--only", text)))
        for _ in range(MOST_RUNS):
            if not all(row.steady for row in load(kept) if row.model == model):
                job(place, "measure", file, kept, "--model", model)
        keep([*before, *load(kept)], output)
    return load(kept)


def keep(rows: list[Row], output: Path) -> None:
    data = {"date": time.strftime("%Y-%m-%d %H:%M"), "rows": [asdict(row) for row in rows]}
    write_record(output, data)


def job(place: str, what: str, cluster: Path, rows: Path, *more: str) -> None:
    """One piece of the work as a program of its own: between hosts under torchrun on each, else here."""
    command = [sys.executable, __file__, "--place", place, "--job", what, "--cluster", str(cluster), "-o", str(rows), *more]
    if place == "hosts":
        _between_hosts()(command, timeout=3600)
    else:
        subprocess.run(command, check=True)


@cache
def _between_hosts() -> Any:
    """Two network namespaces, until the program ends."""
    from fourfold.reproduce.hosts import hosts

    return STACK.enter_context(hosts(count=2, rate=RATE))


def run_job(options: argparse.Namespace) -> None:
    """A piece of the work."""
    (place,), kept = options.place, load(options.output)
    if options.job == "calibrate":
        calibrate(ranks_of(place), options.cluster)
    elif options.job == "predict":
        kept += predict(place, options.model, options.only, load_cluster(options.cluster))
    else:
        mine = [row for row in kept if row.model == options.model and not row.steady]
        measure(place, options.model, mine, load_cluster(options.cluster).kinds[0].pace)
    if is_leader():
        write_file(options.output, json.dumps([asdict(row) for row in kept]))


def load(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())] if path.is_file() else []


def line(row: Row) -> str:
    terms = " ".join(f"{name[:8]} {1e3 * seconds:.0f}" for name, seconds in row.breakdown.items() if seconds > 5e-4)
    sign = "+" if row.predicted > row.measured else "-"
    return (
        f"{row.place:5} {row.model:12} {row.plan:16} {1e3 * row.predicted:8.1f} {1e3 * row.measured:8.1f} ms "
        f"(clock {1e3 * row.clock:6.1f}) "
        f"{row.accuracy:6.1%}{sign} {'in ' if row.inside else 'OUT'} "
        f"+-{(row.high - row.low) / 2 / row.predicted:4.0%}  {terms}"
    )


def summary(rows: list[Row]) -> str:
    out = []
    for name, key in (("plan", lambda r: r.plan), ("place", lambda r: r.place), ("model", lambda r: r.model)):
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        means = [f"{k} {statistics.mean(r.accuracy for r in g):.1%}" for k, g in groups.items()]
        out.append(f"mean by {name}: {', '.join(means)}")
    worst = min(rows, key=lambda r: r.accuracy)
    inside = statistics.mean(r.inside for r in rows)
    half = statistics.mean((r.high - r.low) / 2 / r.predicted for r in rows)
    mean = statistics.mean(r.accuracy for r in rows)
    out.append(
        f"{len(rows)} rows, mean {mean:.1%}; worst {worst.accuracy:.1%} ({worst.place} {worst.model} {worst.plan}); "
        f"{inside:.0%} inside intervals of half-width {half:.1%}"
    )
    clock = [1 - abs(r.predicted - r.clock) / r.clock for r in rows]
    out.append(f"by the clock: mean {statistics.mean(clock):.1%}, worst {min(clock):.1%}")
    return "\n".join(out)


def table(rows: list[Row]) -> str:
    """Mean accuracy by plan and place, for a page."""
    places = list(dict.fromkeys(row.place for row in rows))
    out = [f"| plan | {' | '.join(places)} |", f"|---|{'---|' * len(places)}"]
    for plan in dict.fromkeys(row.plan for row in rows):
        cells = [[r.accuracy for r in rows if (r.plan, r.place) == (plan, place)] for place in places]
        out.append(f"| {plan} | {' | '.join(f'{statistics.mean(c):.1%}' if c else '' for c in cells)} |")
    return "\n".join(out)


def ship(paths: list[Path]) -> None:
    """Put what these files hold into the package, for `fourfold reproduce paradl`: seconds predicted and measured."""
    kept = [json.loads(path.read_text()) for path in paths]
    rows = [Row(**row) for data in kept for row in data["rows"]]
    short = [[r.place, r.model, r.plan, round(r.predicted, 6), round(r.measured, 6)] for r in rows]
    where = "two cores: 2 and 4 local ranks, and two hosts joined at 1 Gbit/s"
    lines = ",\n  ".join(json.dumps(row) for row in short)
    date = max(data["date"] for data in kept)[:10]
    write_file(SHIPPED, f'{{"date": "{date}", "where": "{where}", "rows": [\n  {lines}\n]}}\n')


def say(text: str, end: str = "\n") -> None:
    if is_leader():
        print(text, end=end, file=sys.stderr, flush=True)


def parser(about: str, places: Iterable[str], name: str) -> argparse.ArgumentParser:
    """Places, models and a file for results; and, hidden, the pieces of work that run as programs of their own."""
    out = argparse.ArgumentParser(description=about.splitlines()[0])
    out.add_argument("--place", action="append", choices=places)
    out.add_argument("--only", action="append", default=[], help="a model; for accuracy a plan or model/plan too")
    out.add_argument("-o", "--output", type=Path, default=RESULTS / f"{time.strftime('%Y-%m-%d')}-{name}.json")
    for inner in ("--job", "--model"):
        out.add_argument(inner, help=argparse.SUPPRESS)
    return out


def main() -> None:
    arguments = parser(__doc__, PLACES, "accuracy")
    arguments.add_argument("--cluster", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument(
        "--ship", nargs="+", type=Path, help="files of earlier runs to be put into the package; nothing is run"
    )
    options = arguments.parse_args()
    if options.ship:
        ship(options.ship)
        return
    if options.job:
        run_job(options)
        return
    with STACK, tempfile.TemporaryDirectory() as folder:
        os.environ["FOURFOLD_CACHE"] = folder  # everything is measured anew
        rows: list[Row] = []
        for place in options.place or PLACES:
            rows += place_rows(place, options.only, Path(folder), options.output, rows)
    for row in rows:
        print(line(row))
    print(table(rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
