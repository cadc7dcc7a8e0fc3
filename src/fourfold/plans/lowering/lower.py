"""Plan + graph -> Program: walk the graph once, place every op, put an exchange wherever a layout does not fit.

Tensors that take any layout (parameters, constants, targets, and ops on such tensors alone) are *free*: they are placed
when the first consumer asks, in the layout it asks for. So a weight is stored as its op needs it, transposed or not, and
a table of positions is computed only where its rows are used. A value asked for twice in one layout is moved once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import Infeasible
from fourfold.graph import Graph, Op
from fourfold.index import IndexSet
from fourfold.ops.nest import Nest, Window, nest_of
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.ownership import Own
from fourfold.plans.lowering.dim_hints import Hints, block_hints, domain_dims
from fourfold.plans.lowering.lifetimes import segments
from fourfold.plans.lowering.op_layouts import OpLayouts, op_layouts
from fourfold.plans.lowering.op_splits import applicable_splits, nest_with_hints, scattered_splits
from fourfold.plans.lowering.passes import Run, run_of
from fourfold.plans.lowering.program import Compute, Move, Program, Repeat, Rows, Step, renamed
from fourfold.plans.spec.plan import Passes, Plan

Chooser = Callable[[Op, Nest, dict[str, str], OpLayouts], dict[str, str] | None]
"""Asked for every anchor after it was placed: other splits to place it with, or None to keep it."""
MOST_DEALT = 2**20  # examples of a batch that passes deal out, each of them named
Emission = Iterator["Emission"]
"""An op on its way into a program: what it yields comes first."""


def lower(graph: Graph, plan: Plan, chooser: Chooser | None = None, *, like: Program | None = None) -> Program:
    """The program of a plan. `chooser` lets strategies decide as they see the layouts.

    `like`: a program of the same model in another mode, whose stored tensors this one shall share.
    """
    plan.check(graph, strict=like is None)
    return lower_part(graph, plan, chooser, like=like)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a stage of a pipeline knows of the others: how tensors come in, which go out, and which have a gradient."""

    given: Mapping[str, Layout] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    live: frozenset[str] | None = None


def lower_part(
    graph: Graph, plan: Plan, chooser: Chooser | None = None, *, like: Program | None = None, around: Surroundings | None = None
) -> Program:
    """The program of a whole graph, or of one stage's part of it."""
    lowering = _Lowering(graph, graph.at(plan.batch), plan, chooser, around or Surroundings())
    constants = {c.name for c in graph.constants}
    for name in (lowering.leaves - constants) & set(like.stored if like is not None else ()):
        assert like is not None
        if like.stored[name].shape == lowering.graph.values[name].shape:
            lowering.adopt(name, like.stored[name])
    if like is not None and plan.zero == 3:
        firsts = {m.value: m.exchange.target for m in reversed(list(like.moves())) if m.kind == "parameter"}
        lowering.whole = {name: need.partition(plan.mesh) for name, need in firsts.items() if name in lowering.adopted}
    return lowering.run()


class _Lowering:
    def __init__(self, graph: Graph, concrete: Graph, plan: Plan, chooser: Chooser | None, around: Surroundings) -> None:
        self.symbolic, self.graph, self.plan, self.chooser, self.around = graph, concrete, plan, chooser, around
        self.mesh = plan.mesh
        self.examples: tuple[int, ...] | None = None  # inside a pass: its rows of the whole batch
        self.layouts: dict[str, Layout] = {}
        self.free: set[str] = set()
        self.forms: dict[tuple[str, Layout], str] = {}
        self.steps: list[Any] = []
        self.before: list[Any] = self.steps  # where moves of parameters go: inside a pass, ahead of all passes
        self.stored: dict[str, Layout] = {}
        self.adopted: dict[str, Layout] = {}
        self.whole: dict[str, Layout] = {}  # of parameters stored divided (zero 3), how readers find them: gathered
        self.hints: Hints = block_hints(concrete)
        self.parameters = {p.name: p for p in concrete.parameters}
        self.leaves = {*self.parameters, *(c.name for c in concrete.constants), *concrete.inputs, *concrete.targets}

    def run(self) -> Program:
        self._take_inputs()
        regions = {p.first: p for p in self.plan.passes}
        ops, at = self.graph.ops, 0
        while at < len(ops):
            op = ops[at]
            region = regions.get(op.path)
            if region is not None:
                at = self._passes(region, at)
                continue
            self._visit(op)
            at += 1
        slots = self._results()
        steps = self._deferred()
        return Program(
            graph=self.graph,
            mesh=self.mesh,
            steps=steps,
            segments=segments(self.plan.recompute, self.graph, steps),
            stored=self.stored,
            updates=self._updates(),
            reductions=self.reductions,
            layouts=self.layouts,
            slots=slots,
            outputs=self.graph.outputs,
        )

    def _take_inputs(self) -> None:
        self.free |= self.leaves
        for name in (*self.symbolic.inputs, *self.symbolic.targets):
            dims = [Own.whole(size) for size in self.graph.values[name].shape]
            domains = domain_dims(self.graph, name) if name in self.symbolic.inputs else {}
            batch = self.symbolic.batch_dim(name)
            if batch is None and self.symbolic.batch is not None and dims and dims[0].size == self.symbolic.batch:
                batch = 0
            for axis, split in self.plan.inputs.items():
                dim = batch if split == "batch" else domains.get(split)
                if split.startswith("dim:") and name in self.symbolic.inputs and int(split[4:]) < len(dims):
                    dim = int(split[4:])
                if dim is not None and split != "replicate" and self.mesh.extent(axis) > 1:
                    dims[dim] = dims[dim].refine(self.mesh, axis)
            layout = Layout(tuple(dims))
            if layout.sharded:
                self._store(name, layout)
        for name, layout in {**self.adopted, **self.around.given}.items():
            self._store(name, layout)

    def adopt(self, name: str, layout: Layout) -> None:
        """Take a stored tensor as it is already laid out."""
        self.adopted[name] = layout

    def _store(self, name: str, layout: Layout) -> None:
        self.stored[name] = self.layouts[name] = layout
        self.free.discard(name)

    def _visit(self, op: Op) -> None:
        explicit = self.plan.split_of(op)
        if all(name in self.free for name in op.operands) and not (op.operands and explicit and self._anchor(op)):
            self.free.update(op.results)
            return
        self._emit(self._emission(op, explicit, None))

    def _anchor(self, op: Op) -> bool:
        return nest_of(op, self.graph).anchor

    def _emit(self, emission: Emission) -> None:
        """Put an op at the end of the program, the free ops it reads before it. Those may be a chain as long as the graph,
        which must not become as deep a recursion."""
        waiting = [emission]
        while waiting:
            first = next(waiting[-1], None)
            if first is None:
                waiting.pop()
            else:
                waiting.append(first)

    def _producer_emission(self, name: str, need: Layout) -> Emission:
        """The emission of the op that makes a free value, as its reader needs it."""
        op = self.graph.producer[name]
        return self._emission(op, applicable_splits(nest_of(op, self.graph), self.plan.split_of(op)), need.stored)

    def _emission(self, op: Op, explicit: dict[str, str], wanted: Layout | None) -> Emission:
        """Place an op, yield the emissions of what it reads and nobody has placed yet, then append it."""
        nest = nest_with_hints(op, self.graph, self.hints)
        if nest.kernel == "replicated" and op.random and self.mesh.size > 1:
            raise Infeasible(f"{op.path} draws random numbers and has no rule that keeps ranks alike ({op.target})")
        given = [None if name in self.free else self.whole.get(name, self.layouts[name]) for name in op.operands]
        splits = explicit if nest.anchor or set(explicit.values()) <= {"replicate"} else applicable_splits(nest, explicit)
        splits = {**scattered_splits(op, nest, given, splits, self.graph, self.mesh), **splits}
        placement = self._placed(op, nest, splits, given, wanted)
        if self.chooser is not None and nest.anchor:
            other = self.chooser(op, nest, splits, placement)
            if other is not None:
                placement = self._placed(op, nest, other, given, wanted)
        inputs = []
        for name, need in zip(op.operands, placement.needs, strict=True):
            if name in self.free and name not in self.leaves:
                yield self._producer_emission(name, need)
            inputs.append(self._demand(name, need, nest))
        for result, layout in zip(op.results, placement.gives, strict=True):
            self.layouts[result] = layout
            self.free.discard(result)
        self.steps.append(
            Compute(
                op=op,
                nest=nest,
                needs=placement.needs,
                gives=placement.gives,
                choice=placement.choice,
                loops=placement.loops,
                inputs=tuple(inputs),
                outputs=op.results,
                dtypes=tuple(self.graph.values[name].dtype for name in op.results),
                rows=self._rows(op),
            )
        )

    def _placed(
        self, op: Op, nest: Nest, splits: Mapping[str, str], given: list[Layout | None], wanted: Layout | None
    ) -> OpLayouts:
        """The op placed: once for all layers that are alike, in all plans of the graph."""
        known: dict[tuple[Any, ...], OpLayouts] = self.graph.memo.setdefault("placements", {})
        key = (id(nest), self.mesh, tuple(splits.items()), tuple(given), wanted)  # the graph keeps its nests
        if key not in known:
            known[key] = op_layouts(nest, self.mesh, splits, given, wanted=wanted, where=op.path)
        return known[key]

    def _rows(self, op: Op) -> Rows | None:
        """Inside a pass, the examples it has: what masks are drawn for must not depend on the passes."""
        dim = self.symbolic.batch_dim(op.results[0]) if self.examples is not None else None
        return Rows(dim, self.plan.batch, self.examples) if dim is not None and self.examples is not None else None

    def _demand(self, name: str, need: Layout, nest: Nest) -> str:
        """The slot holding a value in the layout needed."""
        if name in self.free:
            if name in self.leaves:
                self._store(name, self._storage_layout(name, need) if name in self.parameters else need.stored)
            else:
                self._emit(self._producer_emission(name, need))
        key = (name, need)
        if key not in self.forms:
            self.forms[key] = self._form(name, need, nest)
        return self.forms[key]

    def _storage_layout(self, name: str, need: Layout) -> Layout:
        """How a parameter or buffer is stored whose first use needs it so."""
        kept = need.partition(self.mesh)
        if self.plan.zero != 3 or self.parameters[name].buffer:
            return kept
        self.whole[name] = kept
        return kept.fully_sharded(self.mesh)

    def _updates(self) -> dict[str, Layout]:
        """Of each trained parameter, what a rank's optimizer updates: all it stores or, divided over replicas, a part."""
        trained = {n: self.stored[n] for n, p in self.parameters.items() if p.trainable and n in self.stored}
        return {n: layout.fully_sharded(self.mesh) for n, layout in trained.items()} if self.plan.zero == 1 else trained

    def _form(self, name: str, need: Layout, nest: Nest) -> str:
        have = self.layouts[name]
        if have == need or (have.dims == need.dims and have.partial == need.partial and not self._has_gradient(name)):
            return name
        if name in self.parameters and self.parameters[name].buffer and any(loop.kind == "joint" for loop in nest.loops):
            raise Infeasible(
                f"buffer {self.parameters[name].key} is tracked by two norms under different splits; split both alike"
            )
        slot = f"{name}@{sum(1 for n, _ in self.forms if n == name)}"
        exchange = Exchange(self.mesh, have, need)
        kind = "parameter" if name in self.parameters else "halo" if _is_halo(have, need, nest) else "layer_exchange"
        steps = self.before if name in self.parameters else self.steps
        steps.append(Move(exchange=exchange, source=name, target=slot, value=name, kind=kind))
        return slot

    def _has_gradient(self, name: str) -> bool:
        stored = self.parameters[name].trainable if name in self.parameters else name not in self.leaves
        entered = self.around.live is not None and name in self.around.live and name in self.around.given
        return (stored or entered) and self.graph.values[name].is_float

    def _results(self) -> dict[str, str]:
        """Slots of loss, outputs and written buffers; free ones are placed now."""
        none = Nest(loops=(), operands=(), results=())
        slots: dict[str, str] = {}
        for name in (*filter(None, [self.graph.loss]), *self.graph.outputs):
            if name in self.free:
                self._demand(name, Layout.same(self.graph.values[name].shape), none)
            whole = Layout(self.layouts[name].dims)  # what leaves a stage is no partial sum
            slots[name] = self._demand(name, whole, none) if name in self.around.sent else name
        for buffer, value in self.graph.writes:
            if buffer in self.free:
                self._store(buffer, Layout.same(self.graph.values[buffer].shape))
            slots[buffer] = self._demand(value, self.layouts[buffer], none)
        for name in (*self.graph.inputs, *self.graph.targets):
            if name in self.free:
                self._store(name, Layout.same(self.graph.values[name].shape))
        return slots

    def _deferred(self) -> tuple[Step, ...]:
        """Leave the gradient sums of parameters to the buckets, where every use of a parameter asks for the same ones."""
        self.reductions: dict[str, tuple[str, ...]] = {}
        aliases: dict[str, str] = {}
        live = self.graph.reached if self.around.live is None else self.around.live
        uses: dict[str, dict[Layout, str]] = {}
        for (value, need), slot in self.forms.items():
            uses.setdefault(value, {})[need] = slot
        for name, parameter in self.parameters.items():
            needs = list(uses.get(name, ()))
            if not parameter.trainable or not needs:
                continue
            first = needs[0]
            if all(n.dims == self.stored[name].dims and n.replicate == first.replicate for n in needs):
                axes = self.mesh.ordered(a for a in first.replicate if self.mesh.extent(a) > 1)
                if axes and name in live:
                    self.reductions[name] = axes
                aliases.update({slot: name for slot in uses[name].values() if slot != name})
        return renamed(self.steps, aliases)

    def _passes(self, region: Passes, at: int) -> int:
        """Lower a run of ops once per pass, each on a slice of every member's examples."""
        run = run_of(region, at, self.graph, self.symbolic, known=self.layouts.keys() - self.leaves)
        own = self.layouts[run.entry].dims[run.dim]
        if own.total > MOST_DEALT:
            dealt = f"deal out {own.total:,} examples one by one, at most {MOST_DEALT:,} can be"
            raise Infeasible(f"passes from '{region.first}' {dealt}; use a smaller batch or no passes")
        bodies = tuple(self._one_pass(region, k, run, own) for k in range(region.count))
        outs = []
        for name, dim in run.exits:
            shape = self.graph.values[name].shape
            self.layouts[name] = Layout(tuple(own if d == dim else Own.whole(s) for d, s in enumerate(shape)))
            outs.append((f"{name}/out", name, dim))
        self.steps.append(Repeat(bodies=bodies, entries=((run.entry, run.dim),), exits=tuple(outs)))
        return at + len(run.ops)

    def _one_pass(self, region: Passes, k: int, run: Run, own: Own) -> tuple[Compute | Move, ...]:
        """One pass as if its examples were the whole batch."""
        counts = [len(s.parts(region.count)[k]) for s in own.sets]
        total = sum(counts)
        renumbered = Own(own.axes, own.extents, IndexSet.consecutive(counts))
        sub = _Lowering(self.symbolic, self.symbolic.at(total), self.plan, self.chooser, self.around)
        sub.examples = tuple(i for s in own.sets for i in s.parts(region.count)[k])
        layout = self.layouts[run.entry]
        dims = tuple(renumbered if d == run.dim else o for d, o in enumerate(layout.dims))
        sub.layouts[run.entry] = Layout(dims, layout.partial)
        sub.free = {n for n in self.free if n not in sub.layouts}
        for name in self.leaves - self.free:
            sub.layouts[name] = self.layouts[name]
        sub.stored, sub.before, sub.whole = self.stored, self.before, self.whole
        sub.forms = {key: slot for key, slot in self.forms.items() if key[0] in self.parameters}
        for op in run.ops:
            sub._visit(op)
        none = Nest(loops=(), operands=(), results=())
        for name, at in run.exits:
            shape = sub.graph.values[name].shape
            back = Layout(tuple(renumbered if d == at else Own.whole(s) for d, s in enumerate(shape)))
            slot = sub._demand(name, back, none)
            sub.steps.append(
                Move(
                    exchange=Exchange(self.mesh, back, back),
                    source=slot,
                    target=f"{name}/out",
                    value=name,
                    kind="layer_exchange",
                )
            )
        for name in self.leaves & set(sub.layouts):
            if name in self.free:
                self._store(name, sub.layouts[name])
        for (name, need), slot in sub.forms.items():
            if name in self.leaves:
                self.forms.setdefault((name, need), slot)
        return tuple(sub.steps)


def _is_halo(have: Layout, need: Layout, nest: Nest) -> bool:
    windowed = any(isinstance(t, Window) for dims in nest.operands for terms in dims for t in terms)
    return windowed and have.sharded == need.sharded
