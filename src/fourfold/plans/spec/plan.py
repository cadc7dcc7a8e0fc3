"""A plan: how every op of one graph is split over the ranks. An immutable value; `plan_file` reads and writes it.

Without `stages` all ranks form one mesh and run all ops. With them, each stage runs the ops from its `first` to the next
stage's, on ranks and a mesh of its own; a mesh axis has one name and meaning in all stages that have it.

Splits are rules: an op pattern and, per axis, ``batch | filter | channel | domain:<i> | replicate``. Of several matching
rules the last wins, axis by axis; an axis without a rule follows the incoming tensors. `inputs` says, per axis, how the
inputs come in; ``dim:<i>`` there is dim i of every input that has one, whatever ops make of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any

from fourfold.errors import Infeasible, InvalidInput, StalePlan, nearest
from fourfold.graph import Graph, Op
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.spec.policy import DEFAULT, Policy
from fourfold.plans.spec.schedule import ASYNCHRONOUS, Schedule, check, schedule_named

WILD = frozenset("*?[")
SHOWN = 16  # ranks in an error
SPLITS = ("batch", "filter", "channel", "replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A run of ops done in `count` passes, each over a slice of every member's examples along `axis`."""

    first: str
    last: str
    count: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The ops from `first` up to the next stage's first, on these ranks. Several stages may share all their ranks."""

    first: str
    ranks: tuple[int, ...]
    mesh: Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of ops within one stage whose activations are dropped after forward and computed again for backward."""

    first: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to split one graph."""

    graph: str  # the graph's hash
    batch: int
    mesh: Mesh
    strategy: str = "by hand"
    model: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[tuple[str, Mapping[str, str]], ...] = ()
    passes: tuple[Passes, ...] = ()
    stages: tuple[Stage, ...] = ()
    microbatches: int = 1
    schedule: str = "1f1b-sno"
    recompute: tuple[Segment, ...] = ()
    policy: Policy = DEFAULT
    zero: int = 0  # 1: the optimizer's state is divided over the axes that repeat a parameter; 3: the parameter too
    notes: tuple[str, ...] = ()
    signature: Mapping[str, Any] = field(default_factory=dict)  # shapes and dtypes of inputs and targets

    def __post_init__(self) -> None:
        axes = tuple(dict.fromkeys(name for stage in self.parts for name in stage.mesh.names))
        _check_split_names(self)
        _check_axes(self, axes)
        if self.batch < 1:
            raise InvalidInput(f"the batch is {self.batch}; it must be at least 1")
        if self.zero not in (0, 1, 3):
            raise InvalidInput(f"zero is {self.zero}; use 0, 1 (optimizer state divided) or 3 (weights too)")
        _check_passes(self.passes, axes)
        if not 1 <= self.microbatches <= self.batch:
            raise InvalidInput(f"{self.microbatches} micro-batches of a batch of {self.batch}; use between 1 and {self.batch}")
        _check_ranks(self.stages)
        _ = self.timetable  # refuses a schedule that cannot be

    @cached_property
    def parts(self) -> tuple[Stage, ...]:
        """The stages; without any, one of all ranks."""
        return self.stages or (Stage(first="", ranks=tuple(range(self.mesh.size)), mesh=self.mesh),)

    @cached_property
    def size(self) -> int:
        """How many ranks run the plan."""
        return 1 + max(rank for stage in self.parts for rank in stage.ranks)

    @cached_property
    def timetable(self) -> Schedule:
        """Who does what when: a row for each distinct set of ranks."""
        places = len({stage.ranks for stage in self.parts})
        return _timetable(self.schedule, places, self.microbatches, len(self.parts) // places)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Examples in each micro-batch: as even as can be, the larger ones first."""
        small, more = divmod(self.batch, self.microbatches)
        return tuple(small + (m < more) for m in range(self.microbatches))

    def stage_plan(self, stage: Stage, batch: int) -> Plan:
        """How one stage splits a batch of this size: a plan of one mesh."""
        here = stage.mesh.names
        splits = tuple((op, {a: s for a, s in by.items() if a in here}) for op, by in self.splits)
        return Plan(
            graph=self.graph,
            batch=batch,
            mesh=stage.mesh,
            strategy=self.strategy,
            model=self.model,
            inputs={a: s for a, s in self.inputs.items() if a in here},
            splits=tuple((op, by) for op, by in splits if by),
            passes=tuple(p for p in self.passes if p.axis in here),
            recompute=self.recompute,
            policy=self.policy,
            zero=self.zero,
        )

    def split_of(self, op: Op) -> dict[str, str]:
        """The splits the rules give an op, by axis."""
        plain, wild = self._rules
        found = {*plain.get(op.path, ()), *plain.get(op.module, ()), *(i for i in wild if matches(self.splits[i][0], op))}
        out: dict[str, str] = {}
        for i in sorted(found):
            out.update(self.splits[i][1])
        return out

    @cached_property
    def _rules(self) -> tuple[dict[str, list[int]], list[int]]:
        """Rules that give a plain name, by it, and those with wildcards: so that an op need not try them all."""
        plain: dict[str, list[int]] = {}
        wild: list[int] = []
        for i, (pattern, _) in enumerate(self.splits):
            (wild if WILD & set(pattern) else plain.setdefault(pattern, [])).append(i)
        return plain, wild

    def check(self, graph: Graph, *, strict: bool = True) -> None:
        """Refuse a plan made for another graph, or (if strict) one that names ops the graph does not have."""
        _check_hash(self, graph)
        if graph.batch is not None and graph.batch != self.batch:
            raise InvalidInput(f"the model fixes its batch at {graph.batch}, the plan says {self.batch}; use {graph.batch}")
        if strict:
            _check_patterns(self.splits, graph)
        if graph.batch is not None and self.microbatches > 1:
            raise InvalidInput(
                f"the model fixes its batch at {graph.batch}, so that it cannot be cut into "
                f"{self.microbatches} micro-batches; use 1"
            )
        if strict:
            _check_stage_ops(self.stages, graph)
        _check_pass_ops(self.passes, graph)


def check_runnable(plan: Plan) -> None:
    """Refuse a schedule that the devices at hand cannot run."""
    if plan.schedule in ASYNCHRONOUS:
        raise Infeasible(
            f"schedule {plan.schedule} needs devices that stream transfers under compute; these compute or wait: "
            "use 1f1b-so, 1f1b-sno, gpipe or interleaved"
        )


@lru_cache(maxsize=16)
def _timetable(name: str, places: int, microbatches: int, chunks: int) -> Schedule:
    """A checked schedule: plans are made from one another, and most have the schedule of the one before."""
    found = schedule_named(name, places, microbatches, chunks=chunks)
    check(found)
    return found


def matches(pattern: str, op: Op) -> bool:
    return fnmatchcase(op.path, pattern) or (bool(op.module) and fnmatchcase(op.module, pattern))


def _is_numbered(split: str, prefix: str) -> bool:
    return split.startswith(prefix) and split.removeprefix(prefix).isdigit()


def _first_ops(graph: Graph) -> list[str]:
    """The first op, and the first that depends on an input: where stage 0 may be said to begin."""
    first = next((op.path for op in graph.ops if op.name in graph.dependent), "")
    return [op.path for op in graph.ops[:1]] + [first]


def _check_split_names(plan: Plan) -> None:
    inputs = [s for s in plan.inputs.values() if not _is_numbered(s, "dim:")]
    for split in [*inputs, *(s for _, by in plan.splits for s in by.values())]:
        if split not in SPLITS and not _is_numbered(split, "domain:"):
            raise InvalidInput(
                f"unknown split '{split}'{nearest(split, [*SPLITS, 'domain:0'])}; use one of {', '.join(SPLITS)} or domain:<i>"
            )


def _check_axes(plan: Plan, axes: tuple[str, ...]) -> None:
    for axis in {*plan.inputs, *(a for _, by in plan.splits for a in by)}:
        if axis not in axes:
            raise InvalidInput(f"the mesh has axes {', '.join(axes)}, not '{axis}'{nearest(axis, axes)}")


def _check_passes(passes: tuple[Passes, ...], axes: tuple[str, ...]) -> None:
    for run in passes:
        if run.axis not in axes or not isinstance(run.count, int) or run.count < 1:
            raise InvalidInput(
                f"passes from '{run.first}' have axis '{run.axis}' and count {run.count!r}; they need one "
                f"of {', '.join(axes)} and a whole number of at least 1"
            )


def _check_ranks(stages: tuple[Stage, ...]) -> None:
    """Refuse stages whose ranks do not fit their meshes, overlap in part, leave a rank idle or take turns out of order."""
    for k, stage in enumerate(stages):
        if len(stage.ranks) != stage.mesh.size or len(set(stage.ranks)) != len(stage.ranks):
            raise InvalidInput(f"stage {k} has ranks {_shown(stage.ranks)} for a mesh {stage.mesh} of {stage.mesh.size}")
    places = list(dict.fromkeys(stage.ranks for stage in stages))
    used = sorted(rank for ranks in places for rank in ranks)
    if used != list(range(len(used))):
        raise InvalidInput(f"the stages use ranks {_shown(used)}; each rank from 0 on belongs to one set of ranks")
    for k, stage in enumerate(stages):
        if stage.ranks != places[k % len(places)] or len(stages) % len(places):
            raise InvalidInput(
                f"stage {k} of {len(stages)} is on ranks {_shown(stage.ranks)}; stages take turns on "
                f"{len(places)} sets of ranks, so it belongs on {_shown(places[k % len(places)])}"
            )


def _check_hash(plan: Plan, graph: Graph) -> None:
    if plan.graph != graph.hash:
        raise StalePlan(
            f"the plan was made for graph {plan.graph}{f' ({plan.model})' if plan.model else ''}, this model is "
            f"{graph.hash}; plan it again, and if that does not help, look for a forward that changes from call to call"
        )


def _check_patterns(splits: tuple[tuple[str, Mapping[str, str]], ...], graph: Graph) -> None:
    """Refuse a rule whose pattern matches no op."""
    known = {*(op.path for op in graph.ops), *(op.module for op in graph.ops)} - {""}
    for pattern, _ in splits:
        if pattern not in known and not any(matches(pattern, op) for op in graph.ops):
            names = [op.path for op in graph.ops] + [op.module for op in graph.ops]
            raise InvalidInput(f"no op matches '{pattern}'{nearest(pattern, names)}; `fourfold inspect` lists them")


def _check_stage_ops(stages: tuple[Stage, ...], graph: Graph) -> None:
    """Refuse stages that begin at no op, or not one after the other from the model's first op on."""
    paths = [op.path for op in graph.ops]
    for k, stage in enumerate(stages):
        if (stage.first or k) and stage.first not in paths:
            what = f"stage {k} begins at '{stage.first}', which is no op{nearest(stage.first, paths)}"
            raise InvalidInput(f"{what}; `fourfold inspect` lists them")
    begins = [0, *(paths.index(stage.first) for stage in stages[1:])]
    if stages and stages[0].first not in ("", *_first_ops(graph)):
        raise InvalidInput(f"stage 0 begins at '{stages[0].first}', the model at '{paths[0]}'; begin it there")
    if any(a >= b for a, b in itertools.pairwise(begins)):
        raise InvalidInput(f"the stages begin at ops {_shown(begins)}; each must begin after the one before")


def _check_pass_ops(passes: tuple[Passes, ...], graph: Graph) -> None:
    paths = [op.path for op in graph.ops]
    for run in passes:
        if run.first not in paths:
            raise InvalidInput(
                f"passes begin at '{run.first}', which is no op{nearest(run.first, paths)}; `fourfold inspect` lists them"
            )


def _shown(ranks: Sequence[int]) -> str:
    """Ranks in an error's line, which stays a line however many they are."""
    first = ", ".join(map(str, ranks[:SHOWN]))
    return f"[{first}]" if len(ranks) <= SHOWN else f"[{first}, ... {len(ranks)} in all]"
