"""Any strategy as the inside of pipeline stages, with micro-batches, recomputation and ZeRO.

The stages get equal numbers of ranks, give or take one; each splits its ops by the base strategy on its own mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.plans.lowering.additive_loss import microbatch_loss
from fourfold.plans.spec.plan import Plan, Segment, Stage, matches
from fourfold.plans.spec.policy import Policy
from fourfold.plans.spec.schedule import schedule_named
from fourfold.plans.strategies.balance import balanced_firsts

BasePlan = Callable[[int, int], Plan]
"""From a number of ranks and a batch size to the plan of one stage."""

STAGES_PER_RANK = 2  # stages per rank of an interleaved schedule
MICROBATCHES_PER_STAGE = 4  # micro-batches per stage, if nothing is said: a bubble of a fifth of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that every strategy takes. None: the strategy's own default."""

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: int | None = None  # segments per stage
    zero: int | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"--{name} {value}; use at least 1")
        if self.recompute is not None and self.recompute < 0:
            raise InvalidInput(f"--recompute {self.recompute}; use 0 for none, or the number of segments per stage")
        if self.zero not in (None, 0, 1, 3):
            raise InvalidInput(f"--zero {self.zero}; use 1 to divide the optimizer's state, 3 for weights too, 0 for neither")
        if self.schedule is not None:
            schedule_named(self.schedule, 1, 1)  # refuses a name nobody knows


def composed_plan(base: BasePlan, graph: Graph, *, ranks: int, batch: int, stages: int, options: Options) -> Plan:
    """The base strategy in so many stages (one: no pipeline), with the options."""
    schedule = options.schedule or ("1f1b-so" if stages > 1 else "1f1b-sno")
    places = _places(stages, ranks, schedule)
    counts = [ranks // places + (k < ranks % places) for k in range(places)]
    micro = options.microbatches or _microbatches(batch, places, max(counts), schedule, pipelined=stages > 1)
    if micro > batch:
        raise InvalidInput(f"{micro} micro-batches of a batch of {batch}; use at most {batch} or a larger batch")
    largest = -(-batch // micro)
    inner = {count: base(count, largest) for count in sorted(set(counts), reverse=True)}
    plan = replace(inner[counts[0]], batch=batch, microbatches=micro, schedule=schedule)
    if stages > 1:
        plan = _with_stages(plan, graph, [counts[k % places] for k in range(stages)], inner)
    if options.zero is not None:
        plan = replace(plan, zero=options.zero)
    if options.policy is not None:
        plan = replace(plan, policy=options.policy)
    if options.recompute:
        plan = plan_with_recompute(graph, plan, options.recompute)
    return replace(plan, notes=(*plan.notes, *microbatch_loss(graph, batch, micro).notes))


def _places(stages: int, ranks: int, schedule: str) -> int:
    """The number of distinct sets of ranks that the stages run on."""
    places = stages // STAGES_PER_RANK if schedule == "interleaved" and stages > 1 else stages
    if schedule == "interleaved" and stages > 1 and stages % STAGES_PER_RANK:
        text = f"interleaved gives each rank {STAGES_PER_RANK} stages, {stages} do not come out even"
        raise InvalidInput(f"{text}; use {stages - 1} or {stages + 1}")
    if places > ranks:
        raise InvalidInput(
            f"{stages} stages need at least {places} ranks under {schedule}, {ranks} given; use at most "
            f"{ranks * (stages // places)} stages or more ranks"
        )
    return places


def _microbatches(batch: int, places: int, ranks: int, schedule: str, *, pipelined: bool) -> int:
    """Enough to keep the bubble small, as long as every rank of a stage has an example of each."""
    if not pipelined:
        return 1
    most = max(min(MICROBATCHES_PER_STAGE * places, batch // ranks), 1)
    return max(most // places, 1) * places if schedule == "interleaved" else most


def _with_stages(plan: Plan, graph: Graph, counts: list[int], inner: dict[int, Plan]) -> Plan:
    """The plan cut into stages, stage k on counts[k] ranks."""
    firsts = balanced_firsts(graph, plan.sizes[0], [float(count) for count in counts])
    places = len(counts) // STAGES_PER_RANK if plan.schedule == "interleaved" else len(counts)
    ends = list(itertools.accumulate(counts[:places], initial=0))
    ranks = [tuple(range(*ends[k % places : k % places + 2])) for k in range(len(counts))]
    stages = tuple(
        Stage(first=first, ranks=who, mesh=inner[count].mesh) for first, who, count in zip(firsts, ranks, counts, strict=True)
    )
    return replace(plan, stages=stages, splits=_rules(graph, stages, counts, inner), passes=_passes(graph, stages, plan))


def _stage_by_op(graph: Graph, stages: tuple[Stage, ...]) -> dict[str, int]:
    at, out = 0, {}
    firsts = {stage.first: k for k, stage in enumerate(stages)}
    for op in graph.ops:
        at = firsts.get(op.path, at)
        out[op.path] = at
    return out


def _rules(graph: Graph, stages: tuple[Stage, ...], counts: list[int], inner: dict[int, Plan]) -> tuple[Any, ...]:
    """The rules of every stage's own mesh, for the ops that are in it."""
    if len(inner) == 1:
        return next(iter(inner.values())).splits
    homes = _stage_by_op(graph, stages)
    out: list[Any] = []
    for k, count in enumerate(counts):
        mine = [op for op in graph.ops if homes[op.path] == k]
        out += [rule for rule in inner[count].splits if any(matches(rule[0], op) for op in mine)]
    return tuple(out)


def _passes(graph: Graph, stages: tuple[Stage, ...], plan: Plan) -> tuple[Any, ...]:
    """The passes that lie within one stage; the others are dropped."""
    homes = _stage_by_op(graph, stages)
    return tuple(p for p in plan.passes if homes[p.first] == homes[p.last])


def plan_with_recompute(graph: Graph, plan: Plan, count: int) -> Plan:
    """The plan with every stage's activations computed again, in so many segments."""
    return replace(plan, recompute=_segments(graph, plan, count))


def _segments(graph: Graph, plan: Plan, count: int) -> tuple[Segment, ...]:
    """Every stage in so many segments of like work."""
    fixed = graph.dependent
    paths = [op.path for op in graph.ops if op.name in fixed]
    begins = [0, *(paths.index(stage.first) for stage in plan.stages[1:])]
    out = []
    for low, high in zip(begins, [*begins[1:], len(paths)], strict=True):
        span = {"first": paths[low], "last": paths[high - 1]}
        firsts = balanced_firsts(graph, plan.sizes[0], [1.0] * count, **span, charge=0.0, pieces="segments")
        starts = [paths.index(first) for first in firsts]
        ends = [*starts[1:], high]
        out += [Segment(first=paths[a], last=paths[b - 1]) for a, b in zip(starts, ends, strict=True)]
    return tuple(out)
