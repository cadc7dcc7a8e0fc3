"""Weights and gradients of ZeRO-3 between ranks of one host: shards on a shelf, gradients through a ring.

A gathered weight is copied from where all ranks keep their shards; nobody else need take part. A gradient is copied into the
rank's area of the ring, which it says by a counter; the part that is its own it adds up from all areas when everyone has
copied theirs, looking whenever it gives something itself, and at the end. Areas have the same places on all ranks, so
that a place is used again once every rank has taken what lay there. Ranks may thus drift apart by as much as the ring
holds, and wait for each other only beyond. As with `board.py`, stores must become visible in order.

Calls are few and views of common memory are kept: between computing, when caches hold something else, a call costs 25 us.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.plans.layout.exchange import transfers
from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lists.comm_batches import gradient_bytes
from fourfold.runtime.comm.exchange import put, take
from fourfold.runtime.comm.shared.memory import shared_memory, viewed, wait_for
from fourfold.runtime.comm.shared.tensors import SharedTensors, given, one_box, reader
from fourfold.runtime.comm.world import TIMEOUT, World
from fourfold.runtime.zero.weight_transport import Gathered, add_gradient

_LINE = 64  # bytes: counters and areas begin at cache lines


class Way:
    """The gradient of one weight: how each rank has it, and which boxes of whose this rank adds up."""

    def __init__(self, gathered: Gathered, world: World) -> None:
        step, mesh = gathered.back, world.mesh
        self.shapes = [step.source.local_shape(mesh.coords(rank)) for rank in range(mesh.size)]
        taken = transfers(step, world.rank, incoming=True)
        self.takes = [(t.spans, t.peer, given(step, t.peer, world.rank).spans) for t in taken]
        whole = tuple(((0, size),) for size in gathered.shard.shape)
        self.alike = all(place == whole and one_box(spans) for place, _, spans in self.takes)
        self.size = gradient_bytes(step, gathered.shard.element_size())


class Places:
    """Where in the ring one gradient lies: this rank's, and of all ranks' the boxes that are added up."""

    def __init__(self, way: Way, areas: Sequence[Tensor], me: int) -> None:
        self.way = way
        rows = [area[: math.prod(shape)].view(shape) for area, shape in zip(areas, way.shapes, strict=True)]
        self.mine, self.rows = rows[me], rows
        self.parts = [take(rows[peer], spans) for _, peer, spans in way.takes] if way.alike else []

    def total(self, shape: tuple[int, ...]) -> Tensor:
        """The gradient of this rank's shard, added up in one order on whichever rank."""
        if len(self.parts) > 1:
            first, second, *rest = self.parts
            out = first + second
            for part in rest:
                out += part
            return out
        out = self.mine.new_zeros(shape)
        for place, peer, spans in self.way.takes:
            put(out, place, take(self.rows[peer], spans), add=True)
        return out


class Ring:
    """Areas of all ranks in shared memory and, per rank, how many gradients it has given and taken."""

    def __init__(self, memory: Any, ways: Mapping[Gathered, Way], world: World, capacity: int) -> None:
        self.ways, self.world, self.capacity = ways, world, capacity
        count, me = world.mesh.size, world.rank
        whole = np.frombuffer(memory, dtype=np.uint8)
        counters = whole[: 2 * count * _LINE].view(np.int64)[:: _LINE // 8]
        self.given, self.taken = counters[:count], counters[count:]
        self.areas = [viewed(memory, torch.uint8, (capacity,), 2 * count * _LINE + k * capacity) for k in range(count)]
        self.me, self.count, self.head = me, 0, 0
        self.used: deque[tuple[int, int, int]] = deque()  # places others may not have read yet: number, begin, end
        self.waiting: deque[tuple[int, Gathered, Places]] = deque()  # given, not yet added up
        self.places: dict[tuple[Gathered, int], Places] = {}  # by weight and begin

    @staticmethod
    def open(gathered: Sequence[Gathered], world: World, capacity: int) -> Ring:
        """A ring of so many bytes a rank; all ranks must call."""
        ways = {g: Way(g, world) for g in gathered if g.shard.requires_grad}
        count = world.mesh.size
        memory = shared_memory(world.group(world.paths.wide), count * (2 * _LINE + capacity))
        return Ring(memory, ways, world, capacity)

    def rewind(self) -> None:
        """Begin anew where all ranks have taken everything: the same gradient then lies in the same place in every step."""
        self.head = 0
        self.used.clear()

    @torch.no_grad()
    def give(self, gathered: Gathered, grad: Tensor) -> None:
        way = self.ways[gathered]
        begin = self._room(way.size)
        places = self.places.get((gathered, begin))
        if places is None:
            areas = [area[begin : begin + way.size].view(grad.dtype) for area in self.areas]
            places = self.places[gathered, begin] = Places(way, areas, self.me)
        places.mine.copy_(grad)
        self.given[self.me] = self.count
        self.waiting.append((self.count, gathered, places))
        self._take()

    def _room(self, size: int) -> int:
        """The place of the next gradient, once everyone has read what lay there."""
        begin = self.head if self.head + size <= self.capacity else 0
        self.head, self.count = begin + size, self.count + 1
        over = [number for number, low, high in self.used if low < begin + size and begin < high]
        if over:
            wait_for(self.taken, over[-1], TIMEOUT.total_seconds(), self._take)
        while self.used and self.used[0][0] <= max(over, default=0):
            self.used.popleft()
        self.used.append((self.count, begin, begin + size))
        return begin

    def _take(self) -> None:
        """Add what everyone has given: in one order, whoever was first."""
        reached = int(self.given.min())
        while self.waiting and self.waiting[0][0] <= reached:
            number, gathered, places = self.waiting.popleft()
            add_gradient(gathered.shard, places.total(gathered.shard.shape))
            self.taken[self.me] = number

    @torch.no_grad()
    def finish(self) -> None:
        wait_for(self.given, self.count, TIMEOUT.total_seconds(), self._take)
        self._take()


class SharedTransport:
    """Divided weights of ranks that share a host."""

    def __init__(self, gathered: Sequence[Gathered], state: Mapping[str, Tensor], world: World, ring_bytes: int) -> None:
        """A ring of so many bytes a rank, at least two of the largest gradients; all ranks must call."""
        kept = {g.name: (g.there.source, g.shard.dtype) for g in gathered}
        self.shelf, self.ring = SharedTensors.open(kept, world), Ring.open(gathered, world, ring_bytes)
        self.shelf.adopt({name: state[name] for name in kept}, world)
        self.readers = {g: reader(g.there, world, [row[g.name] for row in self.shelf.rows]) for g in gathered}

    @property
    def kept(self) -> list[Tensor]:
        return [self.ring.areas[self.ring.me]]

    def barrier(self) -> None:
        """All ranks are done with what they do to weights and gradients: places in the ring may be used anew."""
        self.shelf.board.barrier()
        self.ring.rewind()

    @torch.no_grad()
    def fetch(self, gathered: Gathered, source: Bunch | None = None) -> Tensor:
        assert source is None
        return self.readers[gathered]()

    def give(self, gathered: Gathered, grad: Tensor, target: Bunch | None = None) -> None:
        self.ring.give(gathered, grad)

    def limit(self, most: int) -> None:
        """Nothing is under way once every rank has given all it has."""
        assert most == 0
        self.ring.finish()
