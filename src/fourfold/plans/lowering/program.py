"""What will run, in order: the value that lowering makes, the oracle replays and the runtime executes.

A program holds *slots*: a tensor in one layout. `Compute` reads and writes slots; `Move` turns one layout of a tensor
into another; `Repeat` runs a body once per pass. Nothing here is bound to a rank: local shapes follow from the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Nest
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own


@dataclass(frozen=True, slots=True)
class Rows:
    """Which examples of the whole batch a pass works on: the batch dim of the result, its whole size, the rows in order."""

    dim: int
    size: int
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One op on local shards."""

    op: Op
    nest: Nest
    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    choice: Mapping[str, str | None]
    loops: Mapping[str, Own]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]  # of the results
    rows: Rows | None = None  # of a random op inside a pass

    def axes_of(self, kind: str) -> tuple[str, ...]:
        """Axes that split a loop of this kind."""
        kinds = {loop.name: loop.kind for loop in self.nest.loops}
        return tuple(a for a, name in self.choice.items() if name is not None and kinds.get(name) == kind)

    @property
    def split_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, name in self.choice.items() if name is not None)

    def labels(self) -> dict[str, str]:
        """The split of each axis in the words of a plan."""
        out = {}
        for axis, name in self.choice.items():
            loop = next((loop for loop in self.nest.loops if loop.name == name), None)
            out[axis] = "replicate" if loop is None else (loop.labels[0] if loop.labels else f"loop {name}")
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A tensor brought into another layout."""

    exchange: Exchange
    source: str
    target: str
    value: str
    kind: str  # layer_exchange | halo | parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A body run once per pass. Each pass takes the next slice of `entries` along their batch dim; `exits` are concatenated."""

    bodies: tuple[tuple[Compute | Move, ...], ...]
    entries: tuple[tuple[str, int], ...]  # slot, dim
    exits: tuple[tuple[str, str, int], ...]  # slot inside a body, slot outside, dim


Step = Compute | Move | Repeat


def inside(step: Step) -> tuple[Compute | Move, ...]:
    """A step itself, or those of all its passes in order."""
    return tuple(inner for body in step.bodies for inner in body) if isinstance(step, Repeat) else (step,)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The lowered plan."""

    graph: Graph
    mesh: Mesh
    steps: tuple[Step, ...]
    stored: Mapping[str, Layout]  # inputs, parameters, buffers, constants
    updates: Mapping[str, Layout]  # of the parameters trained: the part of what a rank stores that its optimizer updates
    reductions: Mapping[str, tuple[str, ...]]  # parameter -> axes its gradient is summed over after backward
    layouts: Mapping[str, Layout]  # of every value, as produced
    slots: Mapping[str, str]  # outputs, loss and buffer writes -> the slot that holds them
    outputs: tuple[str, ...]
    segments: tuple[tuple[int, int], ...] = ()  # runs of steps, from one up to another, that backward computes again

    def computes(self) -> list[Compute]:
        out: list[Compute] = []
        for step in self.steps:
            if isinstance(step, Compute):
                out.append(step)
            elif isinstance(step, Repeat):
                out += [s for s in step.bodies[0] if isinstance(s, Compute)]
        return out

    def moves(self) -> list[Move]:
        return [inner for step in self.steps for inner in inside(step) if isinstance(inner, Move)]

    def groups(self) -> set[tuple[str, ...]]:
        """The axes of every group of ranks that its exchanges use."""
        exchanges = [move.exchange for move in self.moves()]
        return {step.axes for e in exchanges for step in (*e.steps, *e.adjoint.steps) if step.axes}

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes along which the ranks have shares of the loss."""
        partial = self.layouts[self.graph.loss].partial if self.graph.loss else frozenset[str]()
        return self.mesh.ordered(axis for axis in partial if self.mesh.extent(axis) > 1)

    @property
    def split_flops_fraction(self) -> float:
        """FLOPs of ops that run split along every axis of more than one rank, as a fraction of all."""
        wide = {axis for axis in self.mesh.names if self.mesh.extent(axis) > 1}
        computes = self.computes()
        total = sum(c.nest.flops for c in computes)
        split = sum(c.nest.flops for c in computes if wide <= set(c.split_axes))
        return split / total if total else 1.0

    @property
    def replicated(self) -> list[Compute]:
        """Ops without a rule that therefore ran whole on every rank, tensors that depend on the batch among their operands."""
        return [c for c in self.computes() if c.nest.kernel == "replicated"]


def renamed(steps: Iterable[Step], aliases: Mapping[str, str]) -> tuple[Step, ...]:
    """The steps reading other slots instead of some, and without the moves that made those."""
    return tuple(_renamed(step, aliases) for step in steps if not (isinstance(step, Move) and step.target in aliases))


def _renamed(step: Step, aliases: Mapping[str, str]) -> Step:
    if isinstance(step, Compute):
        inputs = tuple(aliases.get(slot, slot) for slot in step.inputs)
        return step if inputs == step.inputs else replace(step, inputs=inputs)
    if isinstance(step, Repeat):
        bodies: Any = tuple(renamed(body, aliases) for body in step.bodies)
        return replace(step, bodies=bodies)
    return step
