"""Slices of many tensors gathered a few megabytes at a time, so that what is on its way costs next to no memory.

Every rank's slices are cut by rows into chunks; in each round all ranks give their next chunk and take the others'. Ranks of
one host write theirs into shared memory, by turns into one of two areas: a rank comes to write an area again only after a
barrier that all have reached, having read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.plans.lists.actions import GatherSlices
from fourfold.plans.lists.comm_batches import chunks
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm.shared.memory import shared_memory, viewed
from fourfold.runtime.comm.world import World


class SliceGather:
    """The slices of one `GatherSlices`. `slices[k]` are this rank's views of what member k of the group updates."""

    def __init__(self, action: GatherSlices, slices: Sequence[Sequence[Tensor]], world: World) -> None:
        axes = action.axes
        self.action, self.world = action, world
        self.slices, self.me = slices, world.members(axes).index(world.rank)
        first = slices[0][0]
        self.chunks = [chunks([tuple(t.shape) for t in tensors], action.elements) for tensors in slices]
        self.group, self.turn = world.group(axes, "gradients"), 0
        self.size = action.elements * first.element_size()
        self.areas: list[list[Tensor]] = []
        if action.path == "shared":
            self.board = world.board(axes)
            memory = shared_memory(self.group, 2 * len(slices) * self.size)
            places = [[(half * len(slices) + k) * self.size for k in range(len(slices))] for half in range(2)]
            self.areas = [[viewed(memory, first.dtype, (action.elements,), at) for at in row] for row in places]

    @property
    def own(self) -> list[Tensor]:
        """This rank's areas: memory that no allocator counts."""
        return [row[self.me] for row in self.areas]

    @torch.no_grad()
    def share(self) -> None:
        """Fill this rank's views of what the others have updated; all must call."""
        for number in range(self.action.rounds):
            self.world.note("all_gather", self.action.path, self.action.axes, self.size, "slices")
            rows = self._through_memory(number) if self.areas else self._by_collective(number)
            for k, row in enumerate(rows):
                if k != self.me:
                    for part, piece in self._pieces(k, number, row):
                        part.copy_(piece)

    def _through_memory(self, number: int) -> Sequence[Tensor]:
        self.turn += 1
        rows = self.areas[self.turn % 2]
        for part, piece in self._pieces(self.me, number, rows[self.me]):
            piece.copy_(part)
        self.board.barrier()
        return rows

    def _by_collective(self, number: int) -> Sequence[Tensor]:
        row = self.slices[0][0].new_zeros(self.action.elements)
        for part, piece in self._pieces(self.me, number, row):
            piece.copy_(part)
        rows = row.new_empty((len(self.slices), self.action.elements))
        gloo_p2p.all_gather(rows, row, self.group, direct=self.action.path == "direct").wait()
        return list(rows)

    def _pieces(self, member: int, number: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A member's chunk of a round: parts of its slices, each with its place in a row."""
        out, at = [], 0
        for k, low, high in self.chunks[member][number] if number < len(self.chunks[member]) else []:
            part = self.slices[member][k][low:high]
            out.append((part, row[at : at + part.numel()].view(part.shape)))
            at += part.numel()
        return out
