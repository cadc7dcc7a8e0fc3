"""Weights and gradients of ZeRO-3 between ranks of one host: shards on a shelf, gradients through a ring.

A gathered weight is copied from where all ranks keep their shards; nobody else need take part. Of a gradient each rank keeps
its own part and writes the others' into its area of the ring, then says so by a counter; it adds what others wrote for it
when they have, looking whenever it gives something itself, and at the end. Areas have the same places on all ranks, so
that a place is used again once every rank has taken what lay there. Ranks may thus drift apart by as much as the ring
holds, and wait for each other only beyond. As with `board.py`, stores must become visible in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.plans.buckets import RING_BYTES
from fourfold.plans.exchange import Transfer, transfers
from fourfold.runtime.board import shared_memory, viewed, wait_for
from fourfold.runtime.carrier import Gathered, add_gradient
from fourfold.runtime.exchange import put, take
from fourfold.runtime.shelf import Shelf, reader
from fourfold.runtime.world import TIMEOUT, World

_LINE = 64  # bytes: counters and areas begin at cache lines


class Way:
    """The gradient of one weight: what is this rank's own, what it writes for others, and where it finds what they wrote."""

    def __init__(self, gathered: Gathered, world: World) -> None:
        step, me = gathered.back, world.rank
        taken = transfers(step, me, incoming=True)
        given = {rank: transfers(step, rank, incoming=False) for rank in range(world.mesh.size)}
        self.gives = [t for t in given[me] if t.peer != me]
        self.own = [(t, g) for t in taken if t.peer == me for g in given[me] if g.peer == me]
        self.takes = [(t, *_place(given[t.peer], t.peer, me)) for t in taken if t.peer != me]
        most = max(sum(t.numel for t in items if t.peer != rank) for rank, items in given.items())
        self.size = -(-most * gathered.shard.element_size() // _LINE) * _LINE

    def start(self, shard: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the shard as far as this rank has it: new memory, so that the whole gradient can go."""
        if len(self.own) == 1 and self.own[0][0].shape == shard.shape:
            return take(grad, self.own[0][1].spans).clone(memory_format=torch.contiguous_format)
        out = grad.new_zeros(shard.shape)
        for mine, there in self.own:
            put(out, mine.spans, take(grad, there.spans), add=True)
        return out


def _place(given: list[Transfer], giver: int, taker: int) -> tuple[int, int]:
    """Where, in what a rank writes for others, the piece for one of them begins and ends."""
    at = 0
    for item in given:
        if item.peer == taker:
            return at, at + item.numel
        at += item.numel if item.peer != giver else 0
    raise AssertionError(f"rank {giver} gives rank {taker} nothing")


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
        self.waiting: deque[tuple[int, Gathered, int, Tensor]] = deque()  # number, weight, begin, this rank's own part

    @staticmethod
    def open(gathered: Sequence[Gathered], world: World) -> Ring | None:
        """A ring that holds two of the largest gradients; all ranks must call."""
        ways = {g: Way(g, world) for g in gathered if g.shard.requires_grad}
        capacity = max(RING_BYTES, 2 * max((way.size for way in ways.values()), default=0))
        count = world.mesh.size
        memory = shared_memory(world.group(world.wide), count * (2 * _LINE + capacity))
        return Ring(memory, ways, world, capacity) if memory is not None else None

    @torch.no_grad()
    def give(self, gathered: Gathered, grad: Tensor) -> None:
        way = self.ways[gathered]
        begin = self._room(way.size)
        area = self.areas[self.me][begin : begin + way.size].view(grad.dtype)
        at = 0
        for item in way.gives:
            area[at : at + item.numel].view(item.shape).copy_(take(grad, item.spans))
            at += item.numel
        self.given[self.me] = self.count
        self.waiting.append((self.count, gathered, begin, way.start(gathered.shard, grad)))
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
            number, gathered, begin, total = self.waiting.popleft()
            way, dtype = self.ways[gathered], gathered.shard.dtype
            for item, low, high in way.takes:
                area = self.areas[item.peer][begin : begin + way.size].view(dtype)
                put(total, item.spans, area[low:high].view(item.shape), add=True)
            add_gradient(gathered.shard, total)
            self.taken[self.me] = number

    @torch.no_grad()
    def finish(self) -> None:
        wait_for(self.given, self.count, TIMEOUT.total_seconds(), self._take)
        self._take()


class Shared:
    """The carrier of ranks that share a host."""

    def __init__(self, gathered: Sequence[Gathered], world: World, shelf: Shelf, ring: Ring) -> None:
        self.shelf, self.ring = shelf, ring
        self.readers = {g: reader(g.there, world, [row[g.name] for row in shelf.rows]) for g in gathered}

    @staticmethod
    def open(gathered: Sequence[Gathered], state: Mapping[str, Tensor], world: World) -> Shared | None:
        """None where the ranks share no host with room for the shards; all must call."""
        kept = {g.name: (g.there.source, g.shard.dtype) for g in gathered}
        shelf = Shelf.open(kept, world)
        ring = Ring.open(gathered, world) if shelf is not None else None
        if shelf is None or ring is None:
            return None
        shelf.adopt({name: state[name] for name in kept}, world)
        return Shared(gathered, world, shelf, ring)

    @property
    def kept(self) -> list[Tensor]:
        return [self.ring.areas[self.ring.me]]

    def begin(self) -> None:
        self.shelf.board.barrier()

    def finish(self) -> None:
        self.ring.finish()
        self.shelf.board.barrier()

    def forward(self, size: int) -> None:
        """Nothing to prepare."""

    def forward_done(self, size: int) -> None:
        """Nothing to do."""

    def ran(self, user: str, out: Any) -> None:
        """Nothing depends on it."""

    def saved(self, gathered: Gathered, user: str) -> None:
        """Nothing depends on it: a weight is there whenever it is wanted."""

    @torch.no_grad()
    def fetch(self, gathered: Gathered) -> Tensor:
        out = gathered.shard.new_empty(gathered.shape)
        self.readers[gathered](out)
        return out

    def refill(self, gathered: Gathered, user: str) -> Tensor:
        return self.fetch(gathered)

    def give(self, gathered: Gathered, grad: Tensor) -> None:
        self.ring.give(gathered, grad)
