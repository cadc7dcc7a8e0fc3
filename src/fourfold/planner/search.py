"""The search: candidates of all kinds, cheap estimates first, the best few and every named strategy replayed in full.

1. Named strategies, as their recipes have them.
2. Splits: for each grid of the devices the best by the surrogate (`split_search`).
3. Stages: for each number of stages the best cut (`stage_search`).
4. Those of 2 and 3 are replayed in the order of their estimates, as long as their bound is below the best step so far.
   If the fastest has stages, their boundaries are moved as long as that helps (`boundary_search`).
5. Where a plan is fastest but does not fit, it is tried again with its optimizer state divided, its weights divided, and
   activations computed again.
6. If kernels can be timed here, those of the best few are, and the search begins again, knowing them, until the best few rest
   on measured kernels alone.

Everything is deterministic but for a time limit, and a search that reaches it says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from fourfold.errors import Error, Infeasible
from fourfold.oracle.predict import Prediction, predict
from fourfold.planner.search_task import AUTO, Ranking, Refusal, SearchTask
from fourfold.planner.splits.meshes import WIDEST
from fourfold.planner.splits.split_search import SplitPlan, SplitSearch
from fourfold.planner.stages.boundary_search import hill_climb
from fourfold.planner.stages.partition import StagedPlan
from fourfold.planner.stages.stage_search import staged_plans
from fourfold.plans import lower_plan, named
from fourfold.plans.lowering.additive_loss import microbatch_loss
from fourfold.plans.spec.plan import Plan, check_runnable
from fourfold.plans.strategies.composition import plan_with_recompute
from fourfold.plans.strategies.named import STRATEGIES

ALONE = ("filter", "channel", "spatial", "pipeline")
RARE = ("data+channel", "grid", "filter+pipeline", "spatial+pipeline")
LARGE = 100_000  # ops times devices: each such replay takes a second
REPLAYED = 3  # of the splits found, and of the stages
SPLITS = 4  # of the splits where that is quick: the best is one of the first four in 45 of 48 cases (benchmarks/planner.py)
MEASURED = 4  # candidates whose kernels are timed, where that is possible
TIMINGS = 6  # times that kernels are timed at most
SEGMENTS = (8, 32)  # per stage, of activations computed again
TIE = 0.01  # of a step: less is no reason for stages or divided weights; two calibrations in a row lie further apart
NODEWISE = {"data+filter": "model", "data+channel": "model", "data+spatial": "space", "splitbrain": "k", "grid": "pr"}
"""Strategies with an inner axis, and the option that sets it: as long as a node has devices."""

Say = Callable[[str], None]
_Draft = tuple[bool, float, float, Plan]
"""A plan before its replay: whether it should not fit, its estimate and a lower bound in seconds, the plan."""


def search(task: SearchTask, say: Say = lambda text: None) -> Ranking:
    """All candidates, ranked."""
    begun, measure = time.perf_counter(), task.measure
    task = replace(task, measure=None)  # what-if searches repeat this task and must not time kernels
    found = _Search(task, say, begun).run()
    for _ in range(TIMINGS if measure is not None else 0):
        guessed = [c.lowered for c in found.candidates[:MEASURED] if c.estimate.measured_share < 1]
        if not guessed or measure is None:
            break
        say(f"timing the kernels of {len(guessed)} plans")
        known, prices = task.setting.prices, measure(guessed)
        if time.perf_counter() - begun > task.limit:
            found = replace(found, notes=(*found.notes, f"stopped after {task.limit:g} s: not all kernels were timed"))
            break
        if prices.kernels.keys() == known.kernels.keys():
            break  # what is left cannot be timed
        task = replace(task, setting=replace(task.setting, prices=prices))
        found = _Search(task, say, begun).run()
    return replace(found, seconds=time.perf_counter() - begun)


def replay_plan(task: SearchTask, plan: Plan) -> Prediction:
    """The full replay of a plan."""
    lowered = lower_plan(task.graph, replace(plan, graph=task.graph.hash))
    return predict(lowered, task.setting.prices, optimizer=task.setting.optimizer)


class _Search:
    def __init__(self, task: SearchTask, say: Say, begun: float) -> None:
        self.task, self.say, self.begun = task, say, begun
        self.found: list[Prediction] = []
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []

    def run(self) -> Ranking:
        if not self.task.fixed:
            for text in self._named():
                self._try_plan(text, partial(named, text, self.task.graph, ranks=self.task.devices, batch=self.task.batch))
        if not self.task.strategies or AUTO in self.task.strategies:
            self._replay(self._splits(), "splits", REPLAYED if self._large else SPLITS)
            self._replay(self._stages(), "stages")
            self._move_boundaries()
        self._fit_memory()
        if self._out_of_time():
            self.notes.append(f"stopped after {self.task.limit:g} s: the best so far, not all were tried")
        ranked = self._ranked_predictions()
        return Ranking(
            task=self.task,
            candidates=tuple(ranked),
            refusals=tuple(dict.fromkeys(self.refusals)),
            seconds=time.perf_counter() - self.begun,
            notes=tuple(self.notes),
        )

    def _ranked_predictions(self) -> list[Prediction]:
        """By step time, after the best: the fastest that fits and gives the numbers of one device, or a tie with it."""
        ordered = sorted(self.found, key=lambda c: c.step_seconds)
        best = _best(c for c in ordered if self._exact(c)) or _best(ordered)
        if best is None:
            return sorted(ordered, key=lambda c: c.excess_bytes)
        if self._exact(best) and not self._exact(ordered[0]) and ordered[0].feasible:
            self.notes.append(
                f"faster, but not the numbers of one device that takes its batch whole: {self._microbatch_effects}"
            )
        return [best, *(c for c in ordered if c is not best)]

    def _exact(self, candidate: Prediction) -> bool:
        """Whether it gives the numbers of one device that takes its batch whole."""
        return not self._microbatch_effects or candidate.plan.microbatches == 1

    @cached_property
    def _microbatch_effects(self) -> str:
        """What micro-batches change about the numbers, if anything."""
        with suppress(Infeasible):
            return "; ".join(microbatch_loss(self.task.graph, self.task.batch, min(2, self.task.batch)).notes)
        return ""

    def _out_of_time(self) -> bool:
        return time.perf_counter() - self.begun > self.task.limit

    @property
    def fastest(self) -> float:
        """Seconds of the fastest so far, whether or not it fits."""
        return min((c.step_seconds for c in self.found), default=float("inf"))

    @property
    def _fits(self) -> bool:
        """Whether the fastest so far fits."""
        return bool(self.found) and min(self.found, key=lambda c: c.step_seconds).feasible

    def _named(self) -> Iterator[str]:
        wanted = self.task.strategies
        if wanted:
            yield from (text for text in wanted if text != AUTO)
            return
        node_size = len(self.task.cluster.node_ranks(0))
        over = self._skipped()
        if over:
            self.notes.append(f"passed over on so many devices: {', '.join(over)}; --strategy shows them")
        for name in (name for name in STRATEGIES if name not in over):
            inner = NODEWISE.get(name)
            fits = inner is not None and 1 < node_size < self.task.devices and self.task.devices % node_size == 0
            yield f"{name}:{inner}={node_size}" if fits else name

    def _skipped(self) -> tuple[str, ...]:
        """Strategies not replayed: beyond a few nodes those without data parallelism, for large graphs the rarer ones too."""
        alone = ALONE if self.task.devices > WIDEST else ()
        return (*alone, *RARE) if self._large else alone

    @property
    def _large(self) -> bool:
        return len(self.task.graph.ops) * self.task.devices > LARGE

    def _try_plan(self, name: str, make: Callable[[], Plan]) -> Prediction | None:
        """Replay a plan in full, or note why not."""
        if self._out_of_time() and self.found:
            return None
        self.say(f"replaying {name}")
        try:
            plan = make()
            check_runnable(plan)
            same = next((c for c in self.found if same_plan(c.plan, plan)), None)
            if same is not None:
                return same
            candidate = replay_plan(self.task, plan)
        except Error as reason:
            self.refusals.append(Refusal(strategy=name, reason=str(reason)))
            return None
        self.found.append(candidate)
        return candidate

    def _splits(self) -> list[_Draft]:
        splitting = SplitSearch(self.task, self.task.graph)
        out = []
        for grid in splitting.grids():
            if self._out_of_time():
                break
            self.say(f"splits over {grid.mesh}")
            for found in splitting.plans(grid):
                if isinstance(found, SplitPlan):
                    out.append((not found.fits, found.cost, found.bound, found.plan))
                    if not found.solution.exact:
                        gap = 1 - found.solution.bound / found.solution.cost
                        self.notes.append(f"splits over {grid.mesh}: at most {gap:.0%} from the surrogate's optimum")
                else:
                    self.refusals.append(found)
        return out

    def _stages(self) -> list[_Draft]:
        out = []
        compute = min((c.estimate.breakdown["compute"] for c in self.found if not c.plan.stages), default=0.0)
        best = self.fastest if self._fits else float("inf")
        for found in staged_plans(self.task, compute, best, few=self._large, mixed=bool(self._microbatch_effects)):
            if isinstance(found, StagedPlan):
                self.say(f"{len(found.plan.stages)} stages in {found.plan.microbatches} micro-batches")
                out.append((False, found.cost, 0.0, found.plan))
            else:
                self.refusals.append(found)
            if self._out_of_time():
                break
        return out

    def _replay(self, some: list[_Draft], what: str, most: int = REPLAYED) -> None:
        """The cheapest in full: of those that should fit, and one of the others."""
        for over, count in ((False, most), (True, 1)):
            ordered = sorted((s for s in some if s[0] == over), key=lambda s: s[1])
            for _, _, bound, plan in ordered[:count]:
                if bound <= self.fastest or not self._fits:
                    self._try_plan(f"{AUTO} {what} {plan.mesh}", partial(_same, plan))

    def _move_boundaries(self) -> None:
        """The fastest plan, where it has stages, with its boundaries moved."""
        first = min(self.found, key=lambda c: c.step_seconds, default=None)
        if first is None or not first.plan.stages or self._large or self._out_of_time():
            return
        self.say(f"shifting the boundaries of {len(first.plan.stages)} stages")
        best = hill_climb(first, self.task.graph, partial(replay_plan, self.task), self._out_of_time)
        if best is not first:
            self.found = [c for c in self.found if c is not first or c.plan.strategy != AUTO] + [best]

    def _fit_memory(self) -> None:
        """The fastest plans that do not fit, with less memory, until one that fits is faster."""
        for candidate in sorted(self.found, key=lambda c: c.step_seconds)[: 1 + REPLAYED]:
            if candidate.feasible:
                break
            for plan in self._lighter_plans(candidate.plan):
                tried = self._try_plan(f"{plan.strategy} held otherwise", partial(_same, plan))
                if tried is not None and tried.feasible:
                    break

    def _lighter_plans(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with less memory, the changes that cost least time first."""
        for zero in (z for z in (1, 3) if z > plan.zero):
            yield replace(plan, zero=zero)
        if not plan.recompute and not plan.passes:
            for count in SEGMENTS:
                with suppress(Infeasible):  # a stage that cannot be cut so often
                    again = plan_with_recompute(self.task.graph, plan, count)
                    yield again
                    yield replace(again, zero=3)


def _best(ordered: Iterable[Prediction]) -> Prediction | None:
    """The fastest plan that fits; of those within `TIE` of it, the one with the least machinery."""
    best, limit = None, float("inf")
    for candidate in ordered:
        if candidate.step_seconds > limit:
            break
        if (best is None or _machinery(candidate.plan) < _machinery(best.plan)) and candidate.feasible:
            best, limit = candidate, min(limit, (1 + TIE) * candidate.step_seconds)
    return best


def _machinery(plan: Plan) -> tuple[int, ...]:
    """What a plan needs beyond its splits: stages, micro-batches, recomputed segments, ZeRO's level."""
    return len(plan.stages), plan.microbatches, len(plan.recompute), plan.zero


def _same(plan: Plan) -> Plan:
    return plan


def same_plan(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in nothing but names and notes."""
    bare = [replace(plan, strategy="", notes=(), model="", signature={}) for plan in (a, b)]
    return bare[0] == bare[1]


__all__ = ["Ranking", "Refusal", "SearchTask", "search"]
