"""Regret: how much slower the plan that the planner chose is, measured, than the best of all named strategies, measured.

Each place is calibrated, then, model by model, the planner chooses with kernels timed there. The plans of all named strategies
run once, and the fastest of them and the chosen one take turns, step by step in the same processes. Regret is the median of
the paired ratios, less one; its 95 % interval is that of the sign test. Where micro-batches change a network's numbers (batch
norm), strategies that use several are timed and shown, but are no alternatives: they compute something else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accuracy import MODELS, OPTIMIZER, calibrate, parser, say
from records import write_record
from scipy.stats import binom

from fourfold.calibrate.measured_prices import timing
from fourfold.cluster import load_cluster
from fourfold.files import write_file
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.prices.prices import Prices
from fourfold.planner import SearchTask, search
from fourfold.plans import Plan, load_plan, save_plan
from fourfold.reproduce.hosts import hosts
from fourfold.runs.train import NOW, one_step, start
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import TorchrunRanks, is_leader, rank_pool
from fourfold.workload.workload import Workload, load_workload

PLACES = {"2": "", "4": "", "1gbit": "1gbit", "100mbit": "100mbit"}
NAMES = ("vgg16-cifar", "resnet50", "unet3d", "gpt2")
CHOSEN = "chosen"
SCREENED = 5  # steps, less of slow plans
RIVALS = 3
TURNS = 15
SECONDS = 60.0  # a duel lasts about so long at most, a look at one plan a sixth
LEAST = 3


@dataclass
class Contender:
    """A plan: what it is, what was predicted, and its steps."""

    name: str
    about: str
    predicted: float
    exact: bool
    screened: list[float] = field(default_factory=list)
    duel: list[float] = field(default_factory=list)


@dataclass
class Match:
    """A model on a place. `same`: the named strategy that the chosen plan is, if it is one."""

    place: str
    model: str
    searched: float
    same: str = ""
    contenders: list[Contender] = field(default_factory=list)

    def of(self, name: str) -> Contender:
        return next(c for c in self.contenders if c.name == name)

    @property
    def rivals(self) -> list[Contender]:
        """The fastest named strategies that compute the same."""
        others = [c for c in self.contenders if c.exact and c.screened and c.name not in (CHOSEN, self.same)]
        return sorted(others, key=lambda c: statistics.median(c.screened))[:RIVALS]

    def against(self, rival: Contender) -> tuple[float, float, float]:
        """The median of the chosen plan's steps over a rival's, taken in turn, and its 95 % interval."""
        ratios = sorted(a / b for a, b in zip(self.of(CHOSEN).duel, rival.duel, strict=True))
        k = int(binom.ppf(0.025, len(ratios), 0.5))
        return statistics.median(ratios), ratios[max(k - 1, 0)], ratios[min(len(ratios) - k, len(ratios) - 1)]

    @property
    def regret(self) -> float:
        return max((self.against(rival)[0] - 1 for rival in self.rivals), default=0.0)

    @property
    def within_limit(self) -> bool:
        """Within 5 % of every rival, or its interval reaches 1."""
        return all(middle <= 1.05 or low <= 1.0 for middle, low, _ in map(self.against, self.rivals))

    def line(self) -> str:
        chosen = self.of(CHOSEN)
        rivals = ", ".join(f"{r.name} {m:.3f} ({a:.2f}-{b:.2f})" for r in self.rivals for m, a, b in [self.against(r)])
        took = statistics.median(chosen.duel)
        return (
            f"{self.place:8} {self.model:12} {self.same or chosen.about:28} predicted {1e3 * chosen.predicted:7.1f} "
            f"measured {1e3 * took:7.1f} ms, over {rivals}: {'held' if self.within_limit else 'NOT HELD'}"
        )


def table(found: list[Match]) -> str:
    """For a page: the chosen plan's time over the best named strategy's."""
    head = ("where", "model", "chosen", "step", "best named", "chosen over it (95 %)", "over data, workload once")
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for m in found:
        chosen, best = m.of(CHOSEN), max(m.rivals, key=lambda r: m.against(r)[0])
        middle, low, high = m.against(best)
        data = next((c for c in m.contenders if c.name == "data"), chosen)
        ratio = statistics.median(chosen.screened) / statistics.median(data.screened)
        step = f"{1e3 * statistics.median(chosen.duel):.0f} ms"
        paired = f"{middle:.3f} ({low:.2f} to {high:.2f})"
        cells = (m.place, m.model, m.same or chosen.about, step, best.name, paired, f"{ratio:.2f}")
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def about(plan: Plan) -> str:
    if not plan.stages:
        return f"{plan.strategy} {plan.mesh}"
    return f"{plan.strategy} {len(plan.stages)} stages x {plan.microbatches}"


def choose(place: str, model: str, cluster_file: Path, folder: Path) -> Match:
    """Search with kernels timed here; the plans go to the folder."""
    text, batch = MODELS[model]
    cluster = load_cluster(cluster_file)
    with ranks_of(place) as team:
        workload = load_workload(text, batch=batch)
        setting = Setting(prices=Prices(cluster=cluster), optimizer=OPTIMIZER)
        timed = timing(cluster, team, "fp32")
        found = search(SearchTask(graph=workload.graph, batch=batch, setting=setting, measure=timed))
    assert found.best is not None
    match = Match(place=place, model=model, searched=found.seconds)
    for candidate in found.candidates:
        plan = workload.adopted(candidate.plan, workload.graph)
        exact = not (plan.microbatches > 1 and plan.notes)
        name = CHOSEN if candidate is found.best else plan.strategy
        if name == "auto":
            continue
        if name == CHOSEN and plan.strategy != "auto":
            match.same = plan.strategy
        match.contenders.append(Contender(name, about(plan), candidate.step_seconds, exact))
        if is_leader():
            save_plan(plan, folder / f"{name.replace(':', ' ')}.json")
    say(f"{place} {model}: chose {about(found.best.plan)} in {found.seconds:.1f} s")
    return match


def screen(match: Match, folder: Path) -> None:
    """A few steps of every plan, one after the other."""
    with ranks_of(match.place) as team:
        workload = workload_of(match)
        for contender in match.contenders:
            start_plan(contender, workload, team, folder, NOW)
            steps = max(LEAST - 1, min(SCREENED, round(SECONDS / 6 / contender.predicted)))
            contender.screened = [max(s for _, s in team(one_step, k, NOW)) for k in range(1 + steps)][1:]
            say(
                f"  {contender.name:18} {contender.about:24} predicted {1e3 * contender.predicted:8.1f} ms, "
                f"steps of {1e3 * statistics.median(contender.screened):8.1f}"
            )


def duel(match: Match, folder: Path) -> None:
    """The chosen plan and its rivals in turn."""
    some = [match.of(CHOSEN), *match.rivals]
    with ranks_of(match.place) as team:
        workload = workload_of(match)
        for contender in some:
            start_plan(contender, workload, team, folder, contender.name)
        together = sum(statistics.median(c.screened) for c in some)
        turns = max(LEAST, min(TURNS, round(SECONDS / together)))
        for turn in range(1 + turns):
            for contender in some[:: 1 if turn % 2 else -1]:
                spent = max(s for _, s in team(one_step, turn, contender.name))
                if turn:
                    contender.duel.append(spent)
    say(match.line())


def workload_of(match: Match) -> Workload:
    text, batch = MODELS[match.model]
    return load_workload(text, batch=batch)


def start_plan(contender: Contender, workload: Workload, team: LocalRanks | TorchrunRanks, folder: Path, name: str) -> None:
    plan = load_plan(folder / f"{contender.name.replace(':', ' ')}.json")
    start(workload, plan, team, optimizer=OPTIMIZER, name=name)


def ranks_of(place: str) -> LocalRanks | TorchrunRanks:
    return rank_pool(None if PLACES[place] else int(place))


def matches(place: str, models: list[str], known: Path | None, output: Path) -> None:
    """All models of one place, written down as they come."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        between = stack.enter_context(hosts(count=2, rate=PLACES[place])) if PLACES[place] else None

        def job(*words: str) -> None:
            command = [sys.executable, __file__, "--place", place, "--folder", folder, *words]
            if between is not None:
                between(command, timeout=3600)
            else:
                subprocess.run(command, check=True)

        os.environ["FOURFOLD_CACHE"] = folder  # everything is measured anew
        if known is not None:
            Path(folder, "cluster.toml").write_text(known.read_text())
        else:
            say(f"{place}: calibrating")
            job("--job", "calibrate")
        for model in models:
            for work in ("choose", "screen", "duel"):
                job("--job", work, "--model", model)
            keep(read(Path(folder, "match.json")), output)


def keep(match: Match, output: Path) -> None:
    """Add a match to the results, in the place of an earlier one."""
    kept = json.loads(output.read_text())["matches"] if output.is_file() else []
    rest = [m for m in kept if (m["place"], m["model"]) != (match.place, match.model)]
    data = {"date": time.strftime("%Y-%m-%d %H:%M"), "method": " ".join(__doc__.split()), "matches": [*rest, asdict(match)]}
    write_record(output, data)


def read(path: Path) -> Match:
    return match_of(json.loads(path.read_text()))


def match_of(data: dict[str, object]) -> Match:
    contenders = [Contender(**c) for c in data.pop("contenders")]  # type: ignore[attr-defined]
    return Match(**data, contenders=contenders)  # type: ignore[arg-type]


def run_job(options: argparse.Namespace) -> None:
    (place,), folder = options.place, options.folder
    cluster, file = folder / "cluster.toml", folder / "match.json"
    if options.job == "calibrate":
        calibrate(ranks_of(place), cluster)
        return
    if options.job == "choose":
        match = choose(place, options.model, cluster, folder)
    else:
        match = read(file)
        {"screen": screen, "duel": duel}[options.job](match, folder)
    if is_leader():
        write_file(file, json.dumps(asdict(match)))


def main() -> None:
    arguments = parser(__doc__, PLACES, "regret")
    arguments.add_argument("--calibrated", type=Path, help="a calibration of the place, taken before")
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.job:
        run_job(options)
        return
    for place in options.place or PLACES:
        matches(place, options.only or list(NAMES), options.calibrated, options.output)
    found = [match_of(m) for m in json.loads(options.output.read_text())["matches"]]
    for match in found:
        print(match.line())
    print(table(found))
    print(f"{sum(m.within_limit for m in found)} of {len(found)} held; largest regret {max(m.regret for m in found):.1%}")


if __name__ == "__main__":
    main()
