"""ZeRO-1: of every parameter that several ranks hold alike, each rank's optimizer updates a slice.

A slice is a view of the stored tensor, so it costs no memory; what is divided is the optimizer's state. Gradients are summed as
without ZeRO-1, and after the optimizer's step the slices are gathered into all copies, a few megabytes at a time, so that data
in flight costs next to no memory: every rank's slices are cut by rows into chunks, and in each round all ranks send their next
chunk and receive those of the others. Ranks of one host exchange chunks through shared memory, steps (17) and (18) of
`runtime.comm.shared`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists.actions import GatherSlices
from fourfold.plans.lists.comm_batches import chunks
from fourfold.plans.lists.stage_list import StageList
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm.exchange import Spans, take
from fourfold.runtime.comm.shared.memory import shared_memory, tensor_at
from fourfold.runtime.comm.world import World


class Zero1Slices:
    """The slices of one stage's parameters that this rank updates; none where it updates all it stores."""

    def __init__(self, lists: StageList, state: Mapping[str, Tensor], world: World) -> None:
        self.program, self.state, self.world = lists.program, state, world
        names = [name for action in lists.messages.slices for name in action.names]
        self.spans = {name: self._spans(name, world.coords) for name in names}
        self.slices = {n: take(state[n].detach(), spans).requires_grad_() for n, spans in self.spans.items()}
        self.gathers = [
            SliceGather(action, [self._views(action.names, rank) for rank in world.members(action.axes)], world)
            for action in lists.messages.slices
        ]

    def _spans(self, name: str, coords: Coords) -> Spans:
        return _spans_within(self.program.stored[name], self.program.updates[name], coords)

    def _views(self, names: Sequence[str], rank: int) -> list[Tensor]:
        """What a rank updates, as views of this rank's copies."""
        coords = self.world.mesh.coords(rank)
        return [take(self.state[name].detach(), self._spans(name, coords)) for name in names]

    @property
    def shared_areas(self) -> list[Tensor]:
        """This rank's shared memory, which no allocator counts."""
        return [area for gather in self.gathers for area in gather.own_areas]

    def clear_gradients(self) -> None:
        """Release the gradients of the step before: they are views of the parameters' gradients."""
        for part in self.slices.values():
            part.grad = None

    def take_gradients(self) -> None:
        """Set each slice's gradient to its part of the complete one."""
        for name, part in self.slices.items():
            grad = self.state[name].grad
            part.grad = take(grad, self.spans[name]) if grad is not None else None

    def gather(self) -> None:
        """Copy the slices that other ranks have updated into this rank's copies; all must call."""
        for gather in self.gathers:
            gather.run()


def _spans_within(stored: Layout, part: Layout, coords: Coords) -> Spans:
    """The place of a rank's slice in its stored tensor: one run of every dim, because a dim's indices are cut in order."""
    boxes = zip(stored.box(coords), part.box(coords), strict=True)
    spans = tuple(whole.positions(own) for whole, own in boxes)
    assert all(len(pieces) <= 1 for pieces in spans)
    return spans


class SliceGather:
    """The slices of one `GatherSlices`. `slices[k]`: this rank's views of what member k of the group updates."""

    def __init__(self, action: GatherSlices, slices: Sequence[Sequence[Tensor]], world: World) -> None:
        axes = action.axes
        self.action, self.world = action, world
        self.slices, self.me = slices, world.members(axes).index(world.rank)
        first = slices[0][0]
        self.chunks = [chunks([tuple(t.shape) for t in tensors], action.elements) for tensors in slices]
        self.group, self.round = world.group(axes, "gradients"), 0
        self.size = action.elements * first.element_size()
        self.areas: list[list[Tensor]] = []
        if action.path == "shared":
            self.sync = world.shared_rows(axes)
            memory = shared_memory(self.group, 2 * len(slices) * self.size)
            places = [[(half * len(slices) + k) * self.size for k in range(len(slices))] for half in range(2)]
            self.areas = [[tensor_at(memory, first.dtype, (action.elements,), at) for at in row] for row in places]

    @property
    def own_areas(self) -> list[Tensor]:
        """This rank's areas of shared memory."""
        return [row[self.me] for row in self.areas]

    @torch.no_grad()
    def run(self) -> None:
        """Fill this rank's views of what the others have updated; all must call."""
        for number in range(self.action.rounds):
            self.world.note("all_gather", self.action.path, self.action.axes, self.size, "slices")
            rows = self._gather_shared(number) if self.areas else self._gather_collective(number)
            for k, row in enumerate(rows):  # step (18), where memory is shared
                if k != self.me:
                    for part, piece in self._pieces(k, number, row):
                        part.copy_(piece)

    def _gather_shared(self, number: int) -> Sequence[Tensor]:
        self.round += 1
        rows = self.areas[self.round % 2]
        for part, piece in self._pieces(self.me, number, rows[self.me]):  # step (17)
            piece.copy_(part)
        self.sync.barrier()
        return rows

    def _gather_collective(self, number: int) -> Sequence[Tensor]:
        row = self.slices[0][0].new_zeros(self.action.elements)
        for part, piece in self._pieces(self.me, number, row):
            piece.copy_(part)
        rows = row.new_empty((len(self.slices), self.action.elements))
        gloo_p2p.all_gather(rows, row, self.group, direct=self.action.path == "direct").wait()
        return list(rows)

    def _pieces(self, member: int, number: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A member's chunk in a round: parts of its slices, each with its place in a row."""
        out, at = [], 0
        for k, low, high in self.chunks[member][number] if number < len(self.chunks[member]) else []:
            part = self.slices[member][k][low:high]
            out.append((part, row[at : at + part.numel()].view(part.shape)))
            at += part.numel()
        return out
