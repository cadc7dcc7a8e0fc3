"""What one stage does for one micro-batch, as a list of priced items: forward, backward, gradient sums, update.

Ranks of a stage whose shards have the same sizes do the same: one of each kind is looked at. They meet at every exchange,
so between two exchanges the slowest kind counts. Backward runs the list in reverse: each op's backward, each exchange's
adjoint. Left out: the order in which autograd takes branches, which changes no sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fourfold.graph import Graph
from fourfold.graph.spec import ITEM_BYTES
from fourfold.oracle.collectives import Cost
from fourfold.oracle.kernels import Kernel, kernel_of
from fourfold.oracle.prices import UNKNOWN_SPREAD, Prices
from fourfold.plans.exchange import Exchange, Step, transfers
from fourfold.plans.layout import Own
from fourfold.plans.mesh import Mesh
from fourfold.plans.pipeline import Part
from fourfold.plans.program import Compute, Move, Program, Repeat

Category = Literal["compute", "gradient_exchange", "layer_exchange", "halo", "pipeline", "update", "other"]
CATEGORIES: tuple[Category, ...] = ("compute", "gradient_exchange", "layer_exchange", "halo", "pipeline", "update", "other")
CATEGORY_OF: dict[str, Category] = {
    "halo": "halo", "parameter": "gradient_exchange", "layer_exchange": "layer_exchange"
}  # fmt: skip
STATISTICS = 2  # numbers per statistic that a norm exchanges: mean and variance, or their gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A piece of work of all ranks of a stage: seconds of the slowest alone, and how much longer with all cores busy."""

    category: Category
    label: str
    seconds: float
    busy: float = 1.0
    spread: float = 0.0  # seconds, one quartile to the other
    meets: bool = False  # whether the ranks wait for each other in it
    source: str = "measured"
    pattern: str = ""  # of an exchange: its collective, the axes of its groups, and bytes as `cluster.Curve` counts them
    axes: tuple[str, ...] = ()
    size: float = 0.0


def kinds_of_ranks(program: Program) -> dict[tuple[int, ...], list[int]]:
    """Members of the mesh by the sizes of all their shards."""
    owns: dict[Own, None] = {}
    for step in _flat(program):
        layouts = (*step.needs, *step.gives) if isinstance(step, Compute) else (step.exchange.source, step.exchange.target)
        owns.update((own, None) for layout in layouts for own in layout.dims if own.axes)
    out: dict[tuple[int, ...], list[int]] = {}
    for member in range(program.mesh.size):
        coords = program.mesh.coords(member)
        out.setdefault(tuple(len(own.at(coords)) for own in owns), []).append(member)
    return out


def _flat(program: Program) -> Iterator[Compute | Move]:
    """All steps, passes one after the other."""
    for step in program.steps:
        if isinstance(step, Repeat):
            for body in step.bodies:
                yield from body
        else:
            yield step


class StagePrices:
    """The items of one stage and size of micro-batch."""

    def __init__(self, part: Part, size: int, prices: Prices, live: frozenset[str], dtypes: Mapping[str, str]) -> None:
        self.part, self.prices, self.live, self.dtypes = part, prices, live, dtypes
        self.program, self.mesh, self.ranks = part.programs[size], part.stage.mesh, part.stage.ranks
        self.graph: Graph = self.program.graph
        self.members = [members[0] for members in kinds_of_ranks(self.program).values()]
        self.gradients = dict.fromkeys(live, True)

    def forward(self) -> list[Item]:
        out: list[Item] = []
        for step in _flat(self.program):
            if isinstance(step, Move):
                out += self._exchange(step.exchange, step)
            else:
                out += self._compute(step, "forward")
        return out

    def backward(self) -> list[Item]:
        out: list[Item] = []
        for low, high in self.program.segments:
            out += self._again(low, high)
        for step in reversed(list(_flat(self.program))):
            if isinstance(step, Move):
                if step.value in self.live:
                    out += self._exchange(step.exchange.adjoint, step)
            elif any(self.gradients.get(name) for name in step.op.operands):
                out += self._compute(step, "backward")
        return out

    def _again(self, low: int, high: int) -> list[Item]:
        """A recomputed segment's forward, once more."""
        out: list[Item] = []
        for step in self.program.steps[low:high]:
            for inner in [s for body in step.bodies for s in body] if isinstance(step, Repeat) else [step]:
                out += self._exchange(inner.exchange, inner) if isinstance(inner, Move) else self._compute(inner, "forward")
        return out

    def _compute(self, step: Compute, way: Literal["forward", "backward"]) -> list[Item]:
        times = [self.prices.kernel(self.kernel(step, member), self.ranks[member]) for member in self.members]
        slowest = max(times, key=lambda t: t.forward if way == "forward" else t.backward)
        seconds = slowest.forward if way == "forward" else slowest.backward
        spread = slowest.spread if slowest.spread is not None else UNKNOWN_SPREAD[slowest.source]
        out = [Item(category="compute", label=step.op.path, seconds=seconds, busy=slowest.busy, spread=seconds * spread,
                    source=slowest.source)]  # fmt: skip
        joint = step.axes_of("joint")
        if joint:
            out += self._joint(step, joint)
        return out

    def kernel(self, step: Compute, member: int) -> Kernel:
        """A step as one member of the stage runs it."""
        return kernel_of(step, self.graph, self.mesh.coords(member), self.gradients, self.dtypes)

    def _joint(self, step: Compute, axes: tuple[str, ...]) -> list[Item]:
        """The exchange of statistics inside a kernel that works over several ranks."""
        coords = self.mesh.coords(self.members[0])
        inside = math.prod(len(step.loops[name].at(coords)) for name in {step.choice[a] for a in axes} if name is not None)
        numel = math.prod(step.needs[0].local_shape(coords)) // max(inside, 1)
        if step.nest.kernel == "batch_norm":
            numel = step.needs[0].local_shape(coords)[1]
        size = STATISTICS * numel * self._item(step.op.operands[0])
        return [self._met("layer_exchange", f"{step.op.path} statistics", "all_reduce", axes, size)]

    def _item(self, value: str) -> int:
        dtype = self.graph.values[value].dtype
        return ITEM_BYTES[self.dtypes.get(dtype, dtype)]

    def _exchange(self, exchange: Exchange, move: Move) -> list[Item]:
        category = CATEGORY_OF[move.kind]
        item = self._item(move.value)
        out = []
        for step in exchange.steps:
            size = max(step_bytes(step, member, item) for member in self.members)
            if step.pattern in ("local", "none"):
                rank = self.ranks[self.members[0]]
                bandwidth = self.prices.cluster.device(rank).bandwidth * self.prices.share(rank)
                out.append(Item(category=category, label=move.value, seconds=2 * size / bandwidth, source="roofline"))
            else:
                out.append(self._met(category, move.value, step.pattern, step.axes, size))
        return out

    def _met(self, category: Category, label: str, kind: str, axes: tuple[str, ...], size: float) -> Item:
        groups = self.groups(axes)
        cost = self._cost(kind, groups, size)
        source = "measured" if cost.measured else "roofline"
        spread = cost.spread if cost.spread is not None else cost.seconds * UNKNOWN_SPREAD[source]
        return Item(category=category, label=label, seconds=cost.seconds, spread=spread, meets=True, source=source,
                    pattern=kind, axes=axes, size=size)  # fmt: skip

    def _cost(self, kind: Any, groups: tuple[tuple[int, ...], ...], size: float) -> Cost:
        return self.prices.gradient_sum(groups, size) if kind == "gradients" else self.prices.collective(kind, groups, size)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The ranks of all groups along the axes."""
        return groups_along(self.mesh, self.ranks, axes)

    def reductions(self) -> list[Item]:
        """The gradient sums left for after backward, by the axes they run over."""
        sizes: dict[tuple[str, ...], float] = {}
        coords = self.mesh.coords(self.members[0])
        for name, axes in self.program.reductions.items():
            local = math.prod(self.program.stored[name].local_shape(coords))
            sizes[axes] = sizes.get(axes, 0.0) + local * self._item(name)
        return [self._met("gradient_exchange", "gradients", "gradients", axes, size) for axes, size in sizes.items()]

    def updated_bytes(self) -> float:
        """Bytes of parameters the optimizer of one rank updates."""
        trained = {p.name for p in self.graph.parameters if p.trainable}
        member = self.mesh.coords(self.members[0])
        layouts = self.program.updates
        return float(sum(math.prod(layouts[n].local_shape(member)) * self._item(n) for n in layouts if n in trained))


def groups_along(mesh: Mesh, ranks: tuple[int, ...], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    found = dict.fromkeys(mesh.group(member, axes) for member in range(mesh.size))
    return tuple(tuple(ranks[m] for m in group) for group in found)


def step_bytes(step: Step, member: int, item: int) -> float:
    """The size of a collective in bytes, as measured curves define it."""
    coords = step.mesh.coords(member)
    if step.pattern == "all_to_all":
        return float(item * sum(t.numel for t in transfers(step, member, incoming=False) if t.peer != member))
    layout = step.source if step.pattern == "all_gather" else step.target
    return float(item * math.prod(layout.local_shape(coords)))


def total(items: Iterable[Item]) -> float:
    return sum(item.seconds for item in items)
