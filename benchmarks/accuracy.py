"""Predicted before, then measured: step times of every strategy on local ranks and between two hosts joined at 1 Gbit/s.

For each place the machine is calibrated and every plan predicted; the predictions are written down before the first plan
runs. Then all plans run, in rounds one after the other, and a plan's time is the median of its steps of all rounds. Accuracy
is 1 - |predicted - measured| / measured, as ParaDL defines it.

    python benchmarks/accuracy.py                    # all places, about half an hour
    python benchmarks/accuracy.py --place 2 --only vgg --only data
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fourfold.cluster import Cluster
from fourfold.gauge.collectives import calibrated
from fourfold.gauge.measuring import measured_prices
from fourfold.oracle.estimate import estimate
from fourfold.plans import Options, pipeline
from fourfold.runtime.crew import Joined, crew, is_leader
from fourfold.runtime.launch import Ranks
from fourfold.runtime.subject import Subject, save_data, subject
from fourfold.runtime.train import begin, one_step
from fourfold.runtime.trial import Task

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
ROUNDS, STEPS, WARM_UP = 2, 7, 1
FOLDER = Path(__file__).parent / "results"


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
    steps: list[float]

    @property
    def measured(self) -> float:
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


def predicted(place: str, model: str, plan: str, seen: Subject, cluster: Cluster, team: Ranks | Joined) -> tuple[Row, Any]:
    """A row without its measurement, and the plan to run."""
    strategy, options = PLACES[place][plan]
    made = seen.plan(strategy, ranks=team.count, options=Options(**options))
    lowered = pipeline(seen.graph, made)
    prices = measured_prices(lowered, cluster, team)
    found = estimate(lowered, prices, optimizer="momentum")
    low, high = found.interval
    row = Row(place, model, plan, found.step_seconds, low, high, dict(found.breakdown), found.measured_share, [])
    return row, made


def run(row: Row, made: Any, seen: Subject, team: Ranks | Joined) -> None:
    """Add the step times of one round."""
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        data = Path(folder, "data.pt")
        save_data(seen.case, data)
        task = Task(graph=seen.graph, plan=made, data=str(data), precision="fp32", optimizer="momentum", steps=STEPS)
        team(begin, task, 0)
    for step in range(WARM_UP + STEPS):
        slowest = max(seconds for _, seconds in team(one_step, step))
        if step >= WARM_UP:
            row.steps.append(slowest)


def place_rows(place: str, only: list[str], output: Path) -> list[Row]:
    """All rows of one place, on the ranks this process has or starts."""
    with crew(int(place) if place != "hosts" else None) as team:
        say(f"{place}: calibrating")
        for progress in calibrated(team):
            say(f"  {progress.done} of {progress.of}: {progress.next}", end="\r")
        cluster, seen = progress.cluster, {}
        rows, plans = [], []
        for model, plan in cases(place, only):
            if model not in seen:
                text, batch = MODELS[model]
                seen[model] = subject(text, batch=batch)
            try:
                row, made = predicted(place, model, plan, seen[model], cluster, team)
            except Exception as error:
                say(f"{place} {model} {plan}: refused: {error}")
                continue
            say(f"{place} {model} {plan}: predicted {row.predicted * 1e3:.1f} ms")
            rows.append(row)
            plans.append(made)
        if is_leader():
            output.write_text(json.dumps([asdict(row) for row in rows]))
        for number in range(ROUNDS):
            for row, made in zip(rows, plans, strict=True):
                run(row, made, seen[row.model], team)
                if number == ROUNDS - 1:
                    say(f"{line(row)}")
        if is_leader():
            output.write_text(json.dumps([asdict(row) for row in rows]))
    return rows


def line(row: Row) -> str:
    terms = " ".join(f"{name[:8]} {1e3 * seconds:.0f}" for name, seconds in row.breakdown.items() if seconds > 5e-4)
    sign = "+" if row.predicted > row.measured else "-"
    return (
        f"{row.place:5} {row.model:12} {row.plan:16} {1e3 * row.predicted:8.1f} {1e3 * row.measured:8.1f} ms  "
        f"{row.accuracy:6.1%}{sign} {'in ' if row.inside else 'OUT'} "
        f"+-{(row.high - row.low) / 2 / row.predicted:4.0%}  {terms}"
    )


def summary(rows: list[Row]) -> str:
    out = []
    for name, key in (("plan", lambda r: r.plan), ("place", lambda r: r.place), ("model", lambda r: r.model)):
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        found = [f"{k} {statistics.mean(r.accuracy for r in g):.1%}" for k, g in groups.items()]
        out.append(f"mean by {name}: {', '.join(found)}")
    worst = min(rows, key=lambda r: r.accuracy)
    inside = statistics.mean(r.inside for r in rows)
    half = statistics.mean((r.high - r.low) / 2 / r.predicted for r in rows)
    mean = statistics.mean(r.accuracy for r in rows)
    out.append(f"{len(rows)} rows, mean {mean:.1%}; worst {worst.accuracy:.1%} ({worst.place} {worst.model} {worst.plan}); "
               f"{inside:.0%} inside intervals of half-width {half:.1%}")  # fmt: skip
    return "\n".join(out)


def say(text: str, end: str = "\n") -> None:
    if is_leader():
        print(text, end=end, file=sys.stderr, flush=True)


def between_hosts(only: list[str], output: Path) -> list[Row]:
    """The rows of two network namespaces: this program once more, under torchrun on each."""
    from slow_link import hosts

    with hosts(count=2, rate=RATE) as start:
        given = [part for text in only for part in ("--only", text)]
        start([sys.executable, __file__, "--place", "hosts", "--inside", "-o", str(output), *given], timeout=3600)
    return [Row(**row) for row in json.loads(output.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", action="append", choices=PLACES)
    parser.add_argument("--only", action="append", default=[], help="a model, a plan, or model/plan")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for place in options.place or PLACES:
        with tempfile.TemporaryDirectory() as folder:
            output = options.output if options.inside else Path(folder, "rows.json")
            apart = place == "hosts" and not options.inside
            rows += between_hosts(options.only, output) if apart else place_rows(place, options.only, output)
    if options.inside:
        return
    for row in rows:
        print(line(row))
    print(summary(rows))
    path = options.output or FOLDER / f"{time.strftime('%Y-%m-%d')}-accuracy.json"
    path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d %H:%M"), "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
