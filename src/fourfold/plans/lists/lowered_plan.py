"""A plan lowered for all its stages: their programs, what travels between them, and each rank's schedule.

This is the value the oracle replays and the runtime executes; `plan_lowering` makes it. A plan without stages is a pipeline of
one stage and, unless it says otherwise, one micro-batch: then a rank's schedule is a forward, a backward and the gradient sums.
What each of them does is a list of its stage (`stage_list`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fourfold.graph import Graph
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.messages import StageMessages
from fourfold.plans.lists.paths import Paths
from fourfold.plans.lists.rank_schedule import StageAction, rank_schedules
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lists.stage_transfer import StageTensor
from fourfold.plans.lowering.additive_loss import MicroLoss
from fourfold.plans.lowering.program import Compute, Program
from fourfold.plans.lowering.stages import Crossing, Cut
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.plan import Plan, Stage

Lists = Mapping[tuple[int, int], StageList]
"""By stage and size of micro-batch."""


@dataclass(frozen=True, kw_only=True)
class LoweredStage:
    """One stage: its graph and its programs, by the number of examples in a micro-batch."""

    index: int
    stage: Stage
    graph: Graph
    programs: Mapping[int, Program]

    @property
    def program(self) -> Program:
        """That of the first, largest micro-batch."""
        return next(iter(self.programs.values()))

    def slot_layout(self, value: str, size: int) -> Layout:
        """How a tensor that leaves or enters the stage lies on its ranks: divided or the same, never a partial sum."""
        program = self.programs[size]
        found = program.stored.get(value) or program.layouts[value]
        return Layout(found.dims)

    def output_layout(self, value: str, size: int) -> Layout:
        """How an output lies on the ranks after forward."""
        program = self.programs[size]
        return program.layouts[value] if program.slots[value] == value else self.slot_layout(value, size)


@dataclass(frozen=True, slots=True)
class TiedGradient:
    """The gradient of a tied parameter on its way from one stage to another. `add`: to the taker's; else in place of it."""

    name: str
    giver: int
    taker: int
    add: bool


@dataclass(frozen=True, kw_only=True)
class LoweredPlan:
    """The lowered plan."""

    plan: Plan
    graph: Graph
    loss: MicroLoss
    parts: tuple[LoweredStage, ...]
    cut: Cut
    counts: Mapping[int, Mapping[int, Program]]  # by stage and micro-batch size: what the loss divides by, where it is needed

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        return self.cut.crossings

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that share a list of actions."""
        return tuple(dict.fromkeys(part.stage.ranks for part in self.parts))

    @cached_property
    def last(self) -> LoweredStage:
        """The stage that has the loss."""
        return next(part for part in self.parts if part.graph.loss)

    @cached_property
    def turns(self) -> dict[tuple[int, str, int], tuple[int, int]]:
        """By stage, way and micro-batch: the place an action is done at, and at which of its turns."""
        rows = enumerate(self.plan.timetable.rows)
        return {
            (a.stage, "F" if a.kind == "F" else "B", a.microbatch): (place, turn)
            for place, row in rows
            for turn, a in enumerate(row)
        }

    def rank_schedule(self, rank: int, *, clips: bool = False) -> tuple[StageAction, ...]:
        """What a rank does, in order. `clips`: the user's loop clips gradients by their norm, before the update."""
        found = self._schedules[next(k for k, ranks in enumerate(self.places) if rank in ranks)]
        return (*found[:-1], StageAction(kind="clip"), found[-1]) if clips else found

    @cached_property
    def _schedules(self) -> tuple[tuple[StageAction, ...], ...]:
        return rank_schedules(self.plan, self.cut, loss_stage=self.last.index)

    @cached_property
    def ties(self) -> tuple[TiedGradient, ...]:
        """The gradients of tied parameters are added up at their owners, one after the other, and the sums go to all copies."""
        trained = {p.name for p in self.graph.parameters if p.trainable}
        out: list[TiedGradient] = []
        for name, (owner, *others) in self.cut.tied.items():
            if name in trained:
                out += [TiedGradient(name, stage, owner, add=True) for stage in others]
                out += [TiedGradient(name, owner, stage, add=False) for stage in others]
        return tuple(out)

    @cached_property
    def without_loss(self) -> tuple[int, ...]:
        """The ranks outside the stage that has the loss."""
        return tuple(sorted({rank for ranks in self.places for rank in ranks} - set(self.last.stage.ranks)))

    def stage_tensor(self, stage: int, value: str, size: int) -> StageTensor:
        """A crossing tensor on the ranks of one of its stages."""
        part = self.parts[stage]
        return StageTensor(part.slot_layout(value, size), part.stage.mesh, part.stage.ranks)

    def stored_tensor(self, stage: int, name: str) -> StageTensor:
        """A stored tensor on the ranks of a stage."""
        part = self.parts[stage]
        return StageTensor(part.program.stored[name], part.stage.mesh, part.stage.ranks)

    def lists(self, placement: Placement, precision: str = "fp32", *, trains: bool = True) -> Lists:
        """What the stages do where the ranks are placed so. `trains`: False where only forwards run."""
        return self._listed(placement, precision, "training" if trains else "forward")

    def counters(self, placement: Placement, precision: str = "fp32") -> Lists:
        """The same of the programs that count what the loss divides by."""
        return self._listed(placement, precision, "counts")

    def _listed(self, placement: Placement, precision: str, purpose: str) -> Lists:
        key = placement, precision, purpose
        if key not in self._known:
            programs = self.counts if purpose == "counts" else {part.index: part.programs for part in self.parts}
            trains = purpose == "training"
            live = self.cut.live if trains else frozenset[str]()
            shared_bytes = placement.shared_bytes // len(self.parts) if placement.shared_bytes is not None else None
            out: dict[tuple[int, int], StageList] = {}
            for index, by_size in programs.items():
                stage = self.parts[index].stage
                paths = Paths(stage.mesh, stage.ranks, placement, self.plan.policy)
                for size, program in by_size.items():
                    out[index, size] = StageList(StageMessages(program, paths, live, precision, shared_bytes, trains))
            self._known[key] = out
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Placement, str, str], Lists]:
        return {}

    def tensors_between(self, source: int, target: int, way: str) -> tuple[Crossing, ...]:
        """The tensors one stage sends another, as values or, backward, as gradients."""
        if way == "F":
            return tuple(c for c in self.crossings if (c.source, c.target) == (source, target))
        return tuple(c for c in self.crossings if (c.target, c.source) == (source, target) and c.gradient)

    def computes(self) -> list[Compute]:
        return [compute for part in self.parts for compute in part.program.computes()]

    @property
    def replicated(self) -> list[Compute]:
        """Ops without a rule that ran whole on every rank of their stage."""
        return [compute for part in self.parts for compute in part.program.replicated]

    @property
    def split_flops_fraction(self) -> float:
        """FLOPs of ops that run split along every axis of their stage's mesh, as a fraction of all."""
        total = sum(c.nest.flops for c in self.computes())
        split = sum(part.program.split_flops_fraction * _flops(part.program) for part in self.parts)
        return split / total if total else 1.0


def _flops(program: Program) -> int:
    return sum(c.nest.flops for c in program.computes())
