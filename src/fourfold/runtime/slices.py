"""ZeRO-1: of every parameter that several ranks hold alike, each rank's optimizer sees and updates a slice.

A slice is a view of the stored tensor, so that it costs no memory; what is divided is the optimizer's state. Gradients are
summed as ever, and after a step of the optimizer the slices are gathered into all copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.plans.exchange import Exchange, Step
from fourfold.plans.layout import Layout
from fourfold.plans.mesh import Coords
from fourfold.plans.program import Program
from fourfold.runtime.exchange import Spans, take
from fourfold.runtime.parcel import Parcel, grouped
from fourfold.runtime.shelf import Reader, Shelf, reader
from fourfold.runtime.world import World

PARCEL_BYTES = 64 * 2**20


class Slices:
    """The parts of one stage's parameters that this rank updates; none where it updates all it stores."""

    def __init__(self, program: Program, state: Mapping[str, Tensor], world: World) -> None:
        self.state, self.world = state, world
        self.steps = {n: step for n in program.updates for step in _gathering(program, n)}
        self.spans = {n: _within(program.stored[n], program.updates[n], world.coords) for n in self.steps}
        self.parts = {n: take(state[n].detach(), spans).requires_grad_() for n, spans in self.spans.items()}
        self.shelf = Shelf.open({n: (program.updates[n], state[n].dtype) for n in self.steps}, world)
        self._readers = [self._reader(n) for n in self.steps] if self.shelf is not None else []
        self._parcels = self._packed() if self.shelf is None else []

    def _reader(self, name: str) -> tuple[Tensor, Reader]:
        rows = self.shelf.rows if self.shelf is not None else []
        return self.state[name].detach(), reader(self.steps[name], self.world, [row[name] for row in rows], own=False)

    def _packed(self) -> list[tuple[list[str], Parcel]]:
        names, steps = list(self.steps), list(self.steps.values())
        groups = grouped(steps, [self.state[n].dtype for n in names], PARCEL_BYTES)
        return [([names[k] for k in group], Parcel([steps[k] for k in group], self.world)) for group in groups]

    @property
    def own(self) -> list[Tensor]:
        """This rank's row of the shelf: memory that no allocator counts."""
        return list(self.shelf.rows[self.world.rank].values()) if self.shelf is not None else []

    def take_gradients(self) -> None:
        """Give the slices their parts of the complete gradients."""
        for name, part in self.parts.items():
            grad = self.state[name].grad
            part.grad = take(grad, self.spans[name]) if grad is not None else None

    @torch.no_grad()
    def share(self) -> None:
        """Bring the slices that others have updated into this rank's copies; all must call."""
        if self.shelf is not None:
            for name, part in self.parts.items():
                self.shelf.rows[self.world.rank][name].copy_(part)
            self.shelf.board.barrier()
            for tensor, read in self._readers:
                read(tensor)
            self.shelf.board.barrier()
        for names, parcel in self._parcels:
            parcel.launch([self.parts[n].detach() for n in names], into=[self.state[n].detach() for n in names])()


def _gathering(program: Program, name: str) -> tuple[Step, ...]:
    """The one step from the slices of a parameter to its copies; none where a rank updates all it stores."""
    steps = Exchange(program.mesh, program.updates[name], program.stored[name]).steps
    assert len(steps) <= 1, f"{name} is gathered in {len(steps)} steps"
    return steps


def _within(stored: Layout, part: Layout, coords: Coords) -> Spans:
    """Where a rank's slice lies in what it stores: one run of every dim, because dividing cuts a dim's indices in order."""
    boxes = zip(stored.box(coords), part.box(coords), strict=True)
    spans = tuple(whole.positions(own) for whole, own in boxes)
    assert all(len(pieces) <= 1 for pieces in spans)
    return spans
