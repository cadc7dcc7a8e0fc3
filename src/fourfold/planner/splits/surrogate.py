"""The surrogate: what every split of every group of ops costs on one mesh, each term by the oracle's own functions, as a sum.

For one micro-batch (or, without a pipeline, the batch), with the choice x_k of every group k:

- cost_k: the group lowered alone (`plans.lowering.lower.lower_part`) and priced by `oracle.time.stage.StagePrices`: kernels
  both ways, exchanges and statistics inside it; `oracle.prices.prices.Prices.update` of its weights; and its gradient
  sums, of those sent beside backward less the share `hidden` that is assumed to cost nothing. Sums and updates
  count `1 / microbatches`: they come once for a batch.
- cost_jk: `oracle.time.stage_comm.StageComm.exchange` from what j makes to what k needs of it, and of its adjoint.
- memory_k: weights, gradients, optimizer state and saved activations by `oracle.findings.redundancy.held_tensors`; memory_jk:
  what k saves of j in another layout than j does.

Left out, so that it is a sum: waiting for slower ranks, stages and messages, and that a value two groups need alike is moved
once. Its optima for several `hidden` are ordered by `Surrogate.overlapped_seconds`, which lets the sums run beside backward;
the first of them are replayed in full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fourfold.errors import Infeasible
from fourfold.graph import Graph
from fourfold.ops.nest import Nest, nest_of
from fourfold.oracle.findings.redundancy import held_tensors
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.items import Item
from fourfold.oracle.time.stage import StagePrices
from fourfold.oracle.time.stage_comm import StageComm
from fourfold.planner.splits.problem import Problem
from fourfold.planner.splits.split_groups import SplitGroup
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.lowered_plan import LoweredStage
from fourfold.plans.lists.messages import StageMessages
from fourfold.plans.lists.paths import Paths
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lowering.lower import Surroundings, lower_part
from fourfold.plans.spec.plan import Plan, Stage, matches
from fourfold.plans.spec.policy import Policy

LIGHT = 0.05
"""Of all FLOPs: an op that does no more may run whole on every rank. Chosen: so the replicated work stays small."""
Choice = tuple[tuple[str, str], ...]
"""For each axis of more than one rank, its split."""
Fix = tuple[str, str]
"""A pattern of ops and the split they shall have on some axis."""


@dataclass(frozen=True, kw_only=True)
class MeshOnRanks:
    """Where groups are priced: a mesh on some ranks of a cluster. `splits`: which may be tried on each axis."""

    mesh: Mesh
    ranks: tuple[int, ...]
    splits: Mapping[str, tuple[str, ...]]
    prices: Prices
    optimizer: str
    size: int  # examples of a micro-batch
    microbatches: int = 1

    @cached_property
    def wide(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.names if self.mesh.extent(axis) > 1)

    @cached_property
    def paths(self) -> Paths:
        return Paths(self.mesh, self.ranks, self.prices.placement, Policy())

    @cached_property
    def sharers(self) -> int:
        return self.prices.cluster.ranks_per_device(self.ranks[0])

    @cached_property
    def crowd(self) -> float:
        """How many ranks take turns on a core."""
        cores = self.prices.cluster.device(self.ranks[0]).cores
        return max(1.0, self.sharers / cores) if cores else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCost:
    """The cost of a group under one choice of splits. `layouts` by the group's numbers: what it reads and makes."""

    seconds: float  # both ways
    backward: float  # of these
    sums: float  # of its gradients, after backward
    sent: float  # and beside it
    update: float
    stored: float  # bytes of weights, gradients, state
    kept: float  # bytes of activations, a micro-batch
    layouts: Mapping[int, Layout]
    ops: tuple[float, ...]  # seconds by op of the group's graph


@dataclass(kw_only=True)
class Surrogate:
    """All groups of a graph at one place. Equal groups are priced once, equal exchanges too."""

    graph: Graph
    groups: Sequence[SplitGroup]
    live: frozenset[str]
    place: MeshOnRanks
    fixed: Sequence[Fix] = ()
    _costs: dict[tuple[str, Choice], SplitCost | None] = field(default_factory=dict)
    _moves: dict[tuple[Layout, Layout, int, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        concrete = self.graph.at(self.place.size)
        self.comm = StageComm(prices=self.place.prices, paths=self.place.paths, members=[0], graph=concrete)
        self.flops = sum(nest_of(op, concrete).flops for op in concrete.ops)
        anchors = [concrete.producer[group.anchor.results[0]] for group in self.groups]
        self.options = [self._options(group, nest_of(op, concrete)) for group, op in zip(self.groups, anchors, strict=True)]

    def _options(self, group: SplitGroup, nest: Nest) -> list[tuple[Choice, SplitCost]]:
        """The choices of a group that can be, priced."""
        wanted = [split for pattern, split in self.fixed if matches(pattern, group.anchor)]
        light = nest.flops <= LIGHT * self.flops
        found = []
        for choice in choices(nest, self.place, light=light or "replicate" in wanted):
            if all(split in dict(choice).values() for split in wanted):
                priced = self.split_cost(group, choice)
                if priced is not None:
                    found.append((choice, priced))
        if not found:
            asked = f" by {' and '.join(wanted)}, as asked" if wanted else ""
            raise Infeasible(f"{group.anchor.path} cannot be split{asked} over {self.place.mesh}")
        return found

    def split_cost(self, group: SplitGroup, choice: Choice) -> SplitCost | None:
        """None where the group cannot be split so."""
        key = (group.key, choice)
        if key not in self._costs:
            try:
                self._costs[key] = _lowered_cost(group, choice, self.place, self.live)
            except Infeasible:
                self._costs[key] = None
        return self._costs[key]

    def problem(self, hidden: float, in_flight: int = 1) -> Problem:
        """The sum to minimise."""
        often = 1 / self.place.microbatches
        seen = 1 - hidden
        costs = [np.array([p.seconds + often * (p.sums + seen * p.sent + p.update) for _, p in some]) for some in self.options]
        memory = [np.array([p.stored + in_flight * p.kept for _, p in some]) for some in self.options]
        sizes = {pair: in_flight * extra for pair, (_, extra) in self._pairs.items()}
        pairs = {pair: seconds for pair, (seconds, _) in self._pairs.items()}
        return Problem(costs=tuple(costs), memory=tuple(memory), pairs=pairs, pair_memory=sizes)

    def overlapped_seconds(self, chosen: Sequence[int]) -> float:
        """Seconds of a batch without stages: gradient sums start one after the other as backward reaches them, and those that
        still travel at its end are waited for. Half of what moves between groups moves in backward."""
        now = wire = total = 0.0
        moved = [0.0] * len(self.groups)
        for (j, k), (seconds, _) in self._pairs.items():
            moved[k] += float(seconds[chosen[j], chosen[k]])
        for group in reversed(self.groups):
            priced = self.options[group.index][chosen[group.index]][1]
            total += priced.seconds + moved[group.index] + priced.sums + priced.update
            now += priced.backward
            wire = max(wire, now) + priced.sent if priced.sent else wire
            now += moved[group.index] / 2
        return total + max(wire - now, 0.0)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        """By pair of groups: seconds and bytes of all that one reads of the other."""
        out: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for group in self.groups:
            for value, maker in group.reads:
                seconds, extra = self._pair(value, self.groups[maker], group)
                known = out.get((maker, group.index))
                out[maker, group.index] = (seconds, extra) if known is None else (known[0] + seconds, known[1] + extra)
        return out

    def _pair(self, value: str, maker: SplitGroup, reader: SplitGroup) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of moving a value, and bytes the reader keeps besides the maker, by the choices of both."""
        haves = [p.layouts[maker.number[value]] for _, p in self.options[maker.index]]
        needs = [p.layouts[reader.number[value]] for _, p in self.options[reader.index]]
        item = self.comm.item(value)
        seconds = np.array([[self.exchange_seconds(have, need, value) for need in needs] for have in haves])
        keeps = value in reader.saved
        extra = np.array(
            [
                [
                    item * _numel(need) if keeps and (value not in maker.saved or have.dims != need.dims) else 0.0
                    for need in needs
                ]
                for have in haves
            ]
        )
        return seconds, extra

    def exchange_seconds(self, have: Layout, need: Layout, value: str) -> float:
        """Seconds of an exchange and its adjoint."""
        if have == need:
            return 0.0
        live = value in self.live
        key = (have, need, self.comm.item(value), live)
        if key not in self._moves:
            there = Exchange(self.place.mesh, have, need)
            ways = [there, there.adjoint] if live else [there]
            items = [item for way in ways for item in self.comm.exchange(way, value, "layer_exchange")]
            self._moves[key] = _seconds(items, self.place)
        return self._moves[key]

    def rules(self, chosen: Sequence[int]) -> tuple[tuple[str, dict[str, str]], ...]:
        """The splits as a plan has them."""
        taken = [some[c][0] for some, c in zip(self.options, chosen, strict=True)]
        return tuple((group.anchor.path, dict(choice)) for group, choice in zip(self.groups, taken, strict=True))


def choices(nest: Nest, place: MeshOnRanks, *, light: bool) -> list[Choice]:
    """All splits of an anchor: on each axis one that leaves nobody without a part. `light`: little is lost by running it
    whole on every rank."""
    axes = place.wide
    if not axes:  # said all the same, so that the anchor is placed and does not wait for a reader
        return [((place.mesh.names[0], "replicate"),)]
    out = []
    for splits in itertools.product(*(_splits_on(nest, place, axis, light) for axis in axes)):
        room = all(_most_parts(nest, split) >= _part_count(place, axes, splits, split) for split in set(splits) - {"replicate"})
        if room:
            out.append(tuple(zip(axes, splits, strict=True)))
    return out


def _splits_on(nest: Nest, place: MeshOnRanks, axis: str, light: bool) -> tuple[str, ...]:
    extent = place.mesh.extent(axis)
    found = tuple(split for split in place.splits[axis] if split != "replicate" and _most_parts(nest, split) >= extent)
    whole = light and "replicate" in place.splits[axis]
    return (*found, "replicate") if whole or not found else found


def _part_count(place: MeshOnRanks, axes: Iterable[str], splits: Iterable[str], split: str) -> int:
    return math.prod(place.mesh.extent(axis) for axis, other in zip(axes, splits, strict=True) if other == split)


def _most_parts(nest: Nest, split: str) -> int:
    """Into how many parts a split can go."""
    return max((loop.size // loop.unit // loop.outer for loop in nest.loops_with_label(split)), default=0)


def _lowered_cost(group: SplitGroup, choice: Choice, place: MeshOnRanks, live: frozenset[str]) -> SplitCost:
    rules = ((group.anchor.path, dict(choice)),)
    plan = Plan(graph="", batch=place.size, mesh=place.mesh, splits=rules)
    program = lower_part(group.graph, plan, around=Surroundings(live=live))
    stage = Stage(first="", ranks=place.ranks, mesh=place.mesh)
    part = LoweredStage(index=0, stage=stage, graph=group.graph, programs={place.size: program})
    stages = StagePrices(StageList(StageMessages(program, place.paths, live, place.prices.precision)), place.prices)
    forward, backward = stages.forward(), stages.backward()
    sent = [item for item in backward if item.category == "gradient_exchange"]
    back = [item for item in backward if item.category != "gradient_exchange"]
    work = [*forward, *back]
    sizes = held_tensors(part, place.optimizer, 1, place.prices.precision)
    known = dict(program.layouts)
    for step in reversed(program.computes()):  # of what is read, how the first reader needs it
        known.update((n, need) for n, need in zip(step.op.operands, step.needs, strict=True) if n in group.graph.inputs)
    return SplitCost(
        seconds=_seconds(work, place),
        backward=_seconds(back, place),
        sums=_seconds(stages.reductions(), place),
        sent=_seconds(sent, place),
        update=place.crowd * place.prices.update(place.optimizer, stages.updated_bytes(), place.ranks[0]),
        stored=float(sum(h.local * h.count for h in sizes if h.kind != "activations")),
        kept=float(sum(h.local * h.count for h in sizes if h.kind == "activations")),
        layouts={number: known[name] for name, number in group.number.items() if name in known},
        ops=_by_op(group, work, place),
    )


def _seconds(items: Iterable[Item], place: MeshOnRanks) -> float:
    if place.sharers == 1:
        return sum(item.seconds for item in items)
    return sum(item.seconds * item.busy * max(place.crowd * item.mean_over_max, 1.0) for item in items)


def _by_op(group: SplitGroup, items: Sequence[Item], place: MeshOnRanks) -> tuple[float, ...]:
    """Seconds by op; what has no op's name is the anchor's."""
    at = {op.path: k for k, op in enumerate(group.graph.ops)}
    out = [0.0] * len(group.graph.ops)
    for item in items:
        out[at.get(item.label, at[group.anchor.path])] += _seconds([item], place)
    return tuple(out)


def _numel(layout: Layout) -> int:
    return math.prod(own.counts[0] for own in layout.dims)
