"""ZeRO-1: of every parameter that several ranks hold alike, each rank's optimizer sees and updates a slice.

A slice is a view of the stored tensor, so that it costs no memory; what is divided is the optimizer's state. Gradients are
summed as ever, and after a step of the optimizer the slices are gathered into all copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists.stage_list import StageList
from fourfold.runtime.comm.exchange import Spans, take
from fourfold.runtime.comm.world import World
from fourfold.runtime.zero.zero1_gather import SliceGather


class Zero1Slices:
    """The parts of one stage's parameters that this rank updates; none where it updates all it stores."""

    def __init__(self, lists: StageList, state: Mapping[str, Tensor], world: World) -> None:
        program, self.state, self.world = lists.program, state, world
        self.program = program
        names = [name for action in lists.messages.slices for name in action.names]
        self.spans = {n: _within(program.stored[n], program.updates[n], world.coords) for n in names}
        self.parts = {n: take(state[n].detach(), spans).requires_grad_() for n, spans in self.spans.items()}
        self.rounds = [
            SliceGather(action, [self._views(action.names, rank) for rank in world.members(action.axes)], world)
            for action in lists.messages.slices
        ]

    def _views(self, names: Sequence[str], rank: int) -> list[Tensor]:
        """What a rank updates, in this rank's copies."""
        coords, stored, updates = self.world.mesh.coords(rank), self.program.stored, self.program.updates
        return [take(self.state[n].detach(), _within(stored[n], updates[n], coords)) for n in names]

    @property
    def own(self) -> list[Tensor]:
        """Shared memory of this rank's, which no allocator counts."""
        return [tensor for rounds in self.rounds for tensor in rounds.own]

    def begin(self) -> None:
        """Forget the gradients of the step before, of which these are views."""
        for part in self.parts.values():
            part.grad = None

    def take_gradients(self) -> None:
        """Give the slices their parts of the complete gradients."""
        for name, part in self.parts.items():
            grad = self.state[name].grad
            part.grad = take(grad, self.spans[name]) if grad is not None else None

    def share(self) -> None:
        """Bring the slices that others have updated into this rank's copies; all must call."""
        for rounds in self.rounds:
            rounds.share()


def _within(stored: Layout, part: Layout, coords: Coords) -> Spans:
    """Where a rank's slice lies in what it stores: one run of every dim, because dividing cuts a dim's indices in order."""
    boxes = zip(stored.box(coords), part.box(coords), strict=True)
    spans = tuple(whole.positions(own) for whole, own in boxes)
    assert all(len(pieces) <= 1 for pieces in spans)
    return spans
