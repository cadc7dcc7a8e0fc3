"""Slices of many tensors gathered a few megabytes at a time, so that what is on its way costs next to no memory.

Every rank's slices are cut by rows into chunks; in each round all ranks give their next chunk and take the others'. Ranks of
one host write theirs into shared memory, by turns into one of two areas: a rank comes to write an area again only after a
barrier that all have reached, having read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.plans.buckets import CHUNK_BYTES
from fourfold.runtime import wire
from fourfold.runtime.board import shared_memory, viewed
from fourfold.runtime.world import World

Chunk = list[tuple[int, int, int]]
"""Number of a tensor, and its rows from one to before another."""


class Rounds:
    """Tensors of one dtype. `slices[k]` are this rank's views of what member k of the group updates."""

    def __init__(self, slices: Sequence[Sequence[Tensor]], axes: tuple[str, ...], world: World) -> None:
        self.slices, self.me = slices, world.members(axes).index(world.rank)
        first = slices[0][0]
        row = max((t[:1].numel() for tensors in slices for t in tensors), default=1)
        self.length = max(CHUNK_BYTES // first.element_size(), row)
        self.chunks = [chunks([tuple(t.shape) for t in tensors], self.length) for tensors in slices]
        self.count = max(len(found) for found in self.chunks)
        self.group, self.turn = world.group(axes, "gradients"), 0
        size = self.length * first.element_size()
        self.board = world.board(axes) if first.device.type == "cpu" else None
        self.first = wire.alone(world, axes, self.length * (len(slices) - 1), "gradients")
        memory = shared_memory(self.group, 2 * len(slices) * size) if self.board is not None else None
        self.shared = memory is not None
        if memory is not None:
            places = [[(half * len(slices) + k) * size for k in range(len(slices))] for half in range(2)]
            self.areas = [[viewed(memory, first.dtype, (self.length,), at) for at in row] for row in places]

    @property
    def own(self) -> list[Tensor]:
        """This rank's areas: memory that no allocator counts."""
        return [row[self.me] for row in self.areas] if self.shared else []

    @torch.no_grad()
    def share(self) -> None:
        """Fill this rank's views of what the others have updated; all must call."""
        for number in range(self.count):
            rows = self._through_memory(number) if self.shared else self._by_collective(number)
            for k, row in enumerate(rows):
                if k != self.me:
                    for part, piece in self._pieces(k, number, row):
                        part.copy_(piece)

    def _through_memory(self, number: int) -> Sequence[Tensor]:
        assert self.board is not None
        self.turn += 1
        rows = self.areas[self.turn % 2]
        for part, piece in self._pieces(self.me, number, rows[self.me]):
            piece.copy_(part)
        self.board.barrier()
        return rows

    def _by_collective(self, number: int) -> Sequence[Tensor]:
        row = self.slices[0][0].new_zeros(self.length)
        for part, piece in self._pieces(self.me, number, row):
            piece.copy_(part)
        rows = row.new_empty((len(self.slices), self.length))
        wire.all_gather(rows, row, self.group, first=self.first).wait()
        return list(rows)

    def _pieces(self, member: int, number: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A member's chunk of a round: parts of its slices, each with its place in a row."""
        out, at = [], 0
        for k, low, high in self.chunks[member][number] if number < len(self.chunks[member]) else []:
            part = self.slices[member][k][low:high]
            out.append((part, row[at : at + part.numel()].view(part.shape)))
            at += part.numel()
        return out


def chunks(shapes: Sequence[tuple[int, ...]], length: int) -> list[Chunk]:
    """Tensors cut by rows, in order, into chunks of at most `length` elements; no row is longer."""
    out: list[Chunk] = [[]]
    room = length
    for k, shape in enumerate(shapes):
        low, width = 0, math.prod(shape[1:])
        while width and low < shape[0]:
            if room < width:
                out.append([])
                room = length
            high = min(shape[0], low + room // width)
            out[-1].append((k, low, high))
            low, room = high, room - (high - low) * width
    return [chunk for chunk in out if chunk]
