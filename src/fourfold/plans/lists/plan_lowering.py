"""Graph + plan -> `LoweredPlan`: the graph is cut into stages, and each is lowered for every size of its micro-batches.

Checked here: segments to be recomputed lie within one stage, in order; micro-batches of every size sum the same gradients; no
rank waits for ever for a message.
"""

from __future__ import annotations

from dataclasses import replace

from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph import Graph
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.lowered_plan import LoweredPlan, LoweredStage
from fourfold.plans.lists.order.message_order import check_messages
from fourfold.plans.lowering.additive_loss import microbatch_loss
from fourfold.plans.lowering.lower import Surroundings, lower_part
from fourfold.plans.lowering.program import Program
from fourfold.plans.lowering.stages import Cut, cut
from fourfold.plans.spec.plan import Plan, Stage


def lower_plan(graph: Graph, plan: Plan) -> LoweredPlan:
    """Lower a plan for all its stages and micro-batches."""
    plan.check(graph)
    return lower_stages(graph, plan)


def lower_stages(graph: Graph, plan: Plan, *, like: LoweredPlan | None = None) -> LoweredPlan:
    """As `lower_plan`, without checking the plan. `like`: the same model in another mode, whose stored tensors it shares."""
    loss = microbatch_loss(graph, plan.batch, plan.microbatches)
    whole = loss.graph
    firsts = [stage.first for stage in plan.parts] if like is None else _firsts(whole, like)
    made = cut(whole, firsts)
    _check_segments(plan, made)
    lowering = _Stages(whole, plan, made)
    parts = tuple(
        lowering.part(k, stage, like.parts[k].program if like is not None else None) for k, stage in enumerate(plan.parts)
    )
    counts = {part.index: _counts(loss.counts, plan, part) for part in parts if set(loss.counted) & set(part.graph.targets)}
    lowered = LoweredPlan(plan=plan, graph=graph, loss=loss, parts=parts, cut=made, counts=counts)
    check_messages(lowered)
    return lowered


def _counts(graph: Graph | None, plan: Plan, part: LoweredStage) -> dict[int, Program]:
    """The program that counts what the loss divides by, on the inputs as the stage has them."""
    assert graph is not None
    out = {}
    for size, program in part.programs.items():
        given = {n: program.stored[n] for n in (*graph.inputs, *graph.targets) if n in program.stored}
        within = replace(plan.stage_plan(part.stage, size), passes=(), recompute=(), zero=0)
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
        plan, graph = self.plan.stage_plan(stage, size), self.made.graphs[index]
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
    return layout.partition(whole.mesh) if layout is not None else Layout.same(whole.graph.values[name].shape)


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
