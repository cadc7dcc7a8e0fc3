"""A plan lowered for all its stages: their programs, what travels between them, and each rank's list of actions in order.

This is the value the oracle replays and the runtime executes. A plan without stages is a pipeline of one stage and, unless
it says otherwise, one micro-batch: then the list is a forward, a backward and the gradient sums.

Actions read as in `schedule`: ``1F0`` and ``1B0`` compute; ``1<0F0`` is stage 1 receiving from stage 0 what its forward of
micro-batch 0 reads, ``0>1F0`` the sending of it; ``0<1B0`` and ``1>0B0`` are the gradients on their way back. ``0S`` is the
beginning of a step on stage 0, ``0G`` sums its gradients over its ranks, ``T`` adds up those of tied parameters, ``R`` is a
rank getting ready to receive the loss, ``L`` the sum of the loss's shares, ``C`` that of the squared norms of gradients, ``U``
the update. What each of them does stands in a list of its stage (`lists`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph import Graph
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.messages import StageMessages
from fourfold.plans.lists.paths import Paths
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lists.stage_transfer import Side
from fourfold.plans.lowering.additive_loss import MicroLoss, microbatched
from fourfold.plans.lowering.lower import Surroundings, lower_part
from fourfold.plans.lowering.program import Compute, Program
from fourfold.plans.lowering.stages import Crossing, Cut, cut
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.plan import Plan, Stage
from fourfold.plans.spec.schedule import ASYNCHRONOUS, Action

Lists = Mapping[tuple[int, int], StageList]
"""By stage and size of micro-batch."""
BLOCKING = ("1f1b-sno",)
"""Schedules whose receiver stands still while a tensor arrives; under the others receives are posted a turn ahead."""


LETTERS = {"listen": "R", "tie": "T", "loss": "L", "clip": "C", "update": "U"}
"""How tasks of all stages of a rank are written."""
UNTIMED = ("listen", "begin", "loss")
"""Tasks that no timeline shows: they pass on a number or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAction:
    """One entry of a rank's list."""

    kind: Literal["listen", "begin", "F", "B", "receive", "send", "reduce", "tie", "loss", "clip", "update"]
    stage: int = 0
    microbatch: int = 0
    peer: int = 0  # of receive and send: the other stage
    way: Literal["F", "B"] = "F"  # of receive and send: values of a forward or gradients of a backward
    last: bool = False  # of a backward: whether it completes its stage's gradients

    def __str__(self) -> str:
        if self.kind in LETTERS:
            return LETTERS[self.kind]
        if self.kind in ("begin", "reduce"):
            return f"{self.stage}{'S' if self.kind == 'begin' else 'G'}"
        if self.kind in ("F", "B"):
            return f"{self.stage}{self.kind}{self.microbatch}"
        return f"{self.stage}{'<' if self.kind == 'receive' else '>'}{self.peer}{self.way}{self.microbatch}"


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
class Tie:
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

    def tasks(self, rank: int, *, clips: bool = False) -> tuple[StageAction, ...]:
        """What a rank does, in order. `clips`: the user's loop clips gradients by their norm, before the update."""
        found = self._lists[next(k for k, ranks in enumerate(self.places) if rank in ranks)]
        return (*found[:-1], StageAction(kind="clip"), found[-1]) if clips else found

    @cached_property
    def _lists(self) -> tuple[tuple[StageAction, ...], ...]:
        return tuple(map(self._list, range(len(self.places))))

    def _list(self, place: int) -> tuple[StageAction, ...]:
        row = self.plan.timetable.rows[place]
        posts = _posted(row, self.plan.schedule not in BLOCKING)
        out: list[StageAction] = []
        for action, received in zip(row, posts, strict=True):
            out += [task for a in received for task in self._mail("receive", a)]
            out.append(StageAction(kind="F" if action.kind == "F" else "B", stage=action.stage, microbatch=action.microbatch))
            out += self._mail("send", action)
        for at in {task.stage: k for k, task in enumerate(out) if task.kind == "B"}.values():
            out[at] = replace(out[at], last=True)
        stages = [part.index for part in self.parts if part.stage.ranks == self.places[place]]
        listens = [StageAction(kind="listen")] if self.last.index not in stages else []
        begins = [StageAction(kind="begin", stage=index) for index in stages]
        out += [StageAction(kind="reduce", stage=index) for index in stages]
        out += [StageAction(kind="tie")] if self.cut.tied else []
        return (*listens, *begins, *out, StageAction(kind="loss"), StageAction(kind="update", stage=stages[0]))

    def _mail(self, kind: Literal["send", "receive"], action: Action) -> list[StageAction]:
        """What is received for an action, or sent after it."""
        way: Literal["F", "B"] = "F" if action.kind == "F" else "B"
        peers = self._peers.get((kind, action.stage, way), {})
        return [StageAction(kind=kind, stage=action.stage, microbatch=action.microbatch, peer=peer, way=way) for peer in peers]

    @cached_property
    def _peers(self) -> dict[tuple[str, int, str], dict[int, None]]:
        """The stages that a stage receives from or sends to, forward and backward, in the order of what crosses."""
        out: dict[tuple[str, int, str], dict[int, None]] = {}
        for c in self.crossings:
            ends = [("F", c.source, c.target), *([("B", c.target, c.source)] if c.gradient else [])]
            for way, source, target in ends:
                out.setdefault(("send", source, way), {})[target] = None
                out.setdefault(("receive", target, way), {})[source] = None
        return out

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """The gradients of tied parameters are added up at their owners, one after the other, and the sums go to all copies."""
        trained = {p.name for p in self.graph.parameters if p.trainable}
        out: list[Tie] = []
        for name, (owner, *others) in self.cut.tied.items():
            if name in trained:
                out += [Tie(name, stage, owner, add=True) for stage in others]
                out += [Tie(name, owner, stage, add=False) for stage in others]
        return tuple(out)

    @cached_property
    def without_loss(self) -> tuple[int, ...]:
        """The ranks outside the stage that has the loss."""
        return tuple(sorted({rank for ranks in self.places for rank in ranks} - set(self.last.stage.ranks)))

    def side(self, stage: int, value: str, size: int) -> Side:
        """A crossing tensor on the ranks of one of its stages."""
        part = self.parts[stage]
        return Side(part.slot_layout(value, size), part.stage.mesh, part.stage.ranks)

    def stored_side(self, stage: int, name: str) -> Side:
        """A stored tensor on the ranks of a stage."""
        part = self.parts[stage]
        return Side(part.program.stored[name], part.stage.mesh, part.stage.ranks)

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
            room = placement.room // len(self.parts) if placement.room is not None else None
            out: dict[tuple[int, int], StageList] = {}
            for index, by_size in programs.items():
                stage = self.parts[index].stage
                paths = Paths(stage.mesh, stage.ranks, placement, self.plan.policy)
                for size, program in by_size.items():
                    out[index, size] = StageList(StageMessages(program, paths, live, precision, room, trains))
            self._known[key] = out
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Placement, str, str], Lists]:
        return {}

    def between(self, source: int, target: int, way: str) -> tuple[Crossing, ...]:
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


def _posted(row: tuple[Action, ...], ahead: bool) -> list[list[Action]]:
    """For each action, whose receives are posted before it: its own or, a turn ahead, those of the next of its kind too."""
    out: list[list[Action]] = [[] for _ in row]
    for kind in ("F", "B"):
        turns = [i for i, action in enumerate(row) if action.kind == kind]
        for turn, i in enumerate(turns):
            out[turns[max(turn - 1, 0)] if ahead else i].append(row[i])
    return out


def lower_plan(graph: Graph, plan: Plan) -> LoweredPlan:
    """Lower a plan for all its stages and micro-batches."""
    plan.check(graph)
    return lowered(graph, plan)


def lowered(graph: Graph, plan: Plan, *, like: LoweredPlan | None = None) -> LoweredPlan:
    """As `lower_plan`; with `like`, the same model in another mode, which shall share the tensors that one stores."""
    loss = microbatched(graph, plan.batch, plan.microbatches)
    whole = loss.graph
    firsts = [stage.first for stage in plan.parts] if like is None else _firsts(whole, like)
    made = cut(whole, firsts)
    _check_segments(plan, made)
    lowering = _Stages(whole, plan, made)
    parts = tuple(
        lowering.part(k, stage, like.parts[k].program if like is not None else None) for k, stage in enumerate(plan.parts)
    )
    counts = {part.index: _counts(loss.counts, plan, part) for part in parts if set(loss.counted) & set(part.graph.targets)}
    return LoweredPlan(plan=plan, graph=graph, loss=loss, parts=parts, cut=made, counts=counts)


def _counts(graph: Graph | None, plan: Plan, part: LoweredStage) -> dict[int, Program]:
    """The program that counts what the loss divides by, on the inputs as the stage has them."""
    assert graph is not None
    out = {}
    for size, program in part.programs.items():
        given = {n: program.stored[n] for n in (*graph.inputs, *graph.targets) if n in program.stored}
        within = replace(plan.within(part.stage, size), passes=(), recompute=(), zero=0)
        out[size] = lower_part(graph, within, around=Surroundings(given=given))
    return out


def _firsts(graph: Graph, like: LoweredPlan) -> list[str]:
    """Where the stages of a model begin in another mode: at the first op it has in common with each."""
    paths = [op.path for op in graph.ops]
    out = [""]
    at, last = {op.path: k for k, op in enumerate(graph.ops) if op.name in graph.dependent}, 0
    for part in like.parts[1:]:
        known = [op.path for op in part.graph.ops if op.name in part.graph.dependent]
        first = min((at[path] for path in known if path in at), default=0)
        if first <= last:
            raise Infeasible(f"stage {part.index}, from {known[0]} on, is not found in evaluation; cut the model elsewhere")
        out.append(paths[first])
        last = first
    return out


class _Stages:
    """Lowers stages. How a crossing tensor enters a stage is how it would lie there if its mesh ran the whole graph."""

    def __init__(self, graph: Graph, plan: Plan, made: Cut) -> None:
        self.graph, self.plan, self.made = graph, plan, made
        self._whole: dict[tuple[Mesh, int], Program] = {}

    def part(self, index: int, stage: Stage, like: Program | None) -> LoweredStage:
        first, *others = dict.fromkeys(self.plan.sizes)
        programs = {first: self._program(index, stage, first, like)}
        for size in others:
            alike = self._program(index, stage, size, programs[first]) if like is not None else None
            programs[size] = alike or self._alike(index, stage, size, programs[first])
        return LoweredStage(index=index, stage=stage, graph=self.made.graphs[index], programs=programs)

    def _alike(self, index: int, stage: Stage, size: int, known: Program) -> Program:
        """The program of another size of micro-batch, its parameters kept and their gradients summed as the known one does.

        Mostly it comes out so by itself. Told beforehand how parameters lie, what is computed of them alone may be placed
        otherwise, and then their gradients are other sums.
        """
        found = self._program(index, stage, size, None)
        if any(found.stored[p.name] != known.stored[p.name] for p in found.graph.parameters if p.name in found.stored):
            found = self._program(index, stage, size, known)
        if found.reductions != known.reductions:
            keys = {p.name: p.key for p in found.graph.parameters}
            name = next(n for n in keys if found.reductions.get(n) != known.reductions.get(n))
            raise Infeasible(
                f"stage {index} would sum the gradient of {keys[name]} otherwise for micro-batches of {size} than "
                f"for those of {max(self.plan.sizes)}; use micro-batches of one size"
            )
        return found

    def _program(self, index: int, stage: Stage, size: int, like: Program | None) -> Program:
        plan, graph = self.plan.within(stage, size), self.made.graphs[index]
        if len(self.made.graphs) == 1:
            return lower_part(graph, plan, like=like)
        whole = self._lowered(stage, size, plan)
        given = {name: _entry(whole, name) for name in (*graph.inputs, *graph.targets)}
        crossing = {c.value for c in self.made.crossings if c.target == index}
        around = Surroundings(
            given={name: layout for name, layout in given.items() if name in crossing or layout.sharded},
            sent=frozenset(c.value for c in self.made.crossings if c.source == index),
            live=self.made.live,
        )
        inside = {op.path for op in graph.ops}
        passes = tuple(p for p in plan.passes if p.first in inside)
        return lower_part(graph, replace(plan, inputs={}, passes=passes), like=like, around=around)

    def _lowered(self, stage: Stage, size: int, plan: Plan) -> Program:
        key = (stage.mesh, size)
        if key not in self._whole:
            self._whole[key] = lower_part(self.graph, plan)
        return self._whole[key]


def _entry(whole: Program, name: str) -> Layout:
    layout = whole.stored.get(name) or whole.layouts.get(name)
    return layout.kept(whole.mesh) if layout is not None else Layout.same(whole.graph.values[name].shape)


def _check_segments(plan: Plan, made: Cut) -> None:
    """Refuse recomputation of a run of ops that is in no stage or in two."""
    last = -1, -1
    for segment in plan.recompute:
        at = [[op.path for op in graph.ops] for graph in made.graphs]
        homes = [k for k, paths in enumerate(at) if segment.first in paths]
        if not homes:
            raise InvalidInput(f"recomputation begins at '{segment.first}', which is no op; `fourfold inspect` lists them")
        paths = at[homes[0]]
        if segment.last not in paths or paths.index(segment.last) < paths.index(segment.first):
            raise InvalidInput(
                f"recomputation from '{segment.first}' ends at '{segment.last}', which does not follow it in "
                f"stage {homes[0]}; end it at '{paths[-1]}' or before"
            )
        if (homes[0], paths.index(segment.first)) <= last:
            raise InvalidInput(
                f"recomputation from '{segment.first}' begins within or before the segment listed before it; "
                "list them in order, without overlap"
            )
        last = homes[0], paths.index(segment.last)


def check_runnable(plan: Plan) -> None:
    """Refuse a schedule that the devices at hand cannot run."""
    if plan.schedule in ASYNCHRONOUS:
        raise Infeasible(
            f"schedule {plan.schedule} needs devices that stream transfers under compute; these compute or wait: "
            "use 1f1b-so, 1f1b-sno, gpipe or interleaved"
        )
