"""The price of a stage's exchanges: which groups communicate, how many bytes, how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.graph import Graph
from fourfold.graph.spec import item_bytes
from fourfold.oracle.memory.exchange_memory import joins
from fourfold.oracle.prices.collectives import Cost
from fourfold.oracle.prices.prices import UNKNOWN_SPREAD, Prices
from fourfold.oracle.time.items import Category, Item
from fourfold.plans.layout.exchange import Exchange, ExchangeStep
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.paths import Paths

CATEGORY_OF: dict[str, Category] = {"halo": "halo", "parameter": "gradient_exchange", "layer_exchange": "layer_exchange"}
COPY_SPREAD = 0.1
"""Relative uncertainty of a copy priced by memory bandwidth. Assumed, not measured: between those of measured (0.05) and fitted
(0.15) times in `UNKNOWN_SPREAD`, since bandwidth alone bounds a copy."""


@dataclass(frozen=True, kw_only=True)
class StageComm:
    """The ranks of a stage and what their exchanges cost.

    `members`: one of each rank class. `siblings`: ranks of other stages with the same mesh, which communicate at the same time;
    measured curves of several groups at once hold what that costs.
    """

    prices: Prices
    paths: Paths
    members: Sequence[int]
    graph: Graph
    siblings: tuple[tuple[int, ...], ...] = ()
    _groups: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = field(default_factory=dict, compare=False, repr=False)
    _costs: dict[tuple[str, tuple[str, ...], float], Cost] = field(default_factory=dict, compare=False, repr=False)

    def item(self, value: str) -> int:
        """Bytes of an element."""
        return item_bytes(self.graph.values[value].dtype, self.prices.precision)

    @property
    def mesh(self) -> Mesh:
        return self.paths.mesh

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.paths.ranks

    def exchange(self, exchange: Exchange, value: str, kind: str) -> list[Item]:
        """The items of a move, or of its adjoint."""
        category, item, out = CATEGORY_OF[kind], self.item(value), []
        for step in exchange.steps:
            size = self.size(step, item)
            if step.pattern in ("local", "none"):
                out.append(self.copy(category, value, 2 * size))
            else:
                through_memory = step.pattern == "all_reduce" and self.paths.small(step.axes, size)
                out.append(
                    self.collective(category, value, "shared_gather" if through_memory else step.pattern, step.axes, size)
                )
                packed = max(_packed_bytes(step, member, item) for member in self.members)
                out += [self.copy(category, value, 2 * packed)] if packed else []
        return out

    def size(self, step: ExchangeStep, item: int) -> float:
        """The bytes of a collective, as curves define them, on the rank that has most."""
        return float(max(step.size(member, item) for member in self.members))

    def sent_bytes(self, step: ExchangeStep, item: int) -> float:
        """The bytes the rank that gives most has for others."""
        return max(_sent_bytes(step, member, item) for member in self.members)

    def numel(self, layout: Any) -> int:
        """Elements on the first kind of rank."""
        return math.prod(layout.local_shape(self.mesh.coords(self.members[0])))

    def copy(self, category: Category, label: str, moved: float) -> Item:
        """Bytes read or written in this rank's memory."""
        seconds = self.prices.copying(moved, self.ranks[self.members[0]])
        spread = COPY_SPREAD * seconds
        return Item(category=category, label=label, seconds=seconds, spread=spread, source="roofline", size=moved)

    def collective(
        self, category: Category, label: str, kind: Any, axes: tuple[str, ...], size: float, *, starts: str = ""
    ) -> Item:
        """A collective. `starts`: the message that it sends."""
        cost = self._cost(kind, axes, size)
        source = "measured" if cost.measured else "roofline"
        spread = cost.spread if cost.spread is not None else cost.seconds * UNKNOWN_SPREAD[source]
        return Item(
            category=category,
            label=label,
            seconds=cost.seconds,
            spread=spread,
            is_blocking=True,
            source=source,
            pattern=kind,
            axes=axes,
            size=size,
            starts=starts,
        )

    def _cost(self, kind: Any, axes: tuple[str, ...], size: float) -> Cost:
        """Layers repeat, and so do their exchanges: each is priced once."""
        if (kind, axes, size) not in self._costs:
            self._costs[kind, axes, size] = self.prices.collective(kind, self.groups(axes), size)
        return self._costs[kind, axes, size]

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The ranks of all groups along the axes that may meet at once."""
        if axes not in self._groups:
            others = self.siblings if self.prices.cluster.measured.curves else ()
            self._groups[axes] = tuple(g for ranks in (self.ranks, *others) for g in groups_along(self.mesh, ranks, axes))
        return self._groups[axes]


def groups_along(mesh: Mesh, ranks: tuple[int, ...], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks[member] for member in group) for group in mesh.groups(axes))


def _packed_bytes(step: ExchangeStep, member: int, item: int) -> float:
    """Bytes that a rank copies to pack an exchange, and to unpack it."""
    coords = step.mesh.coords(member)
    have, want = (float(math.prod(layout.local_shape(coords)) * item) for layout in (step.source, step.target))
    if step.pattern == "all_to_all":
        return _sent_bytes(step, member, item) + want
    if step.pattern in ("all_gather", "reduce_scatter") and not joins(step, member):
        return max(have, want)
    return 0.0


def _sent_bytes(step: ExchangeStep, member: int, item: int) -> float:
    return float(item * step.sent_elements(member))
