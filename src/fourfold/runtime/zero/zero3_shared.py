"""Divided weights (ZeRO-3) between ranks of one host: shards in shared memory, gradients through a ring in it.

A weight is gathered by copying from where each rank stores its shard; the other ranks need not take part. For a gradient, a
rank copies it into its own area of the ring and publishes it by a counter; once all ranks have published it, each adds up its
own part from all areas. Ranks look for published gradients whenever they publish one themselves, and at the end. A gradient has
the same place in every rank's area, and the place is used again once every rank has consumed what lay there. Steps (8) to (16)
of `runtime.comm.shared` draw this.

Views of shared memory are stored and calls are few: between computing, when caches hold something else, a call costs 25 us.
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
from fourfold.runtime.comm.shared.memory import shared_memory, tensor_at, wait_for
from fourfold.runtime.comm.shared.tensors import SharedTensors, is_one_box, reader, transfer_between
from fourfold.runtime.comm.world import TIMEOUT, World
from fourfold.runtime.zero.weight_transport import GatheredWeight, add_gradient

_LINE = 64  # bytes: counters and areas begin at cache lines


class GradientParts:
    """The gradient of one weight: its shape on each rank, and the boxes of each rank's gradient that this rank adds up."""

    def __init__(self, weight: GatheredWeight, world: World) -> None:
        step, mesh = weight.reduce_step, world.mesh
        self.shapes = [step.source.local_shape(mesh.coords(rank)) for rank in range(mesh.size)]
        received = transfers(step, world.rank, incoming=True)
        self.boxes = [(t.spans, t.peer, transfer_between(step, t.peer, world.rank).spans) for t in received]
        whole = tuple(((0, size),) for size in weight.shard.shape)
        self.are_whole_views = all(place == whole and is_one_box(spans) for place, _, spans in self.boxes)
        self.size = gradient_bytes(step, weight.shard.element_size())


class RingSlot:
    """One gradient's place in the ring, seen in the areas of all ranks."""

    def __init__(self, parts: GradientParts, areas: Sequence[Tensor], me: int) -> None:
        self.boxes = parts.boxes
        self.rows = [area[: math.prod(shape)].view(shape) for area, shape in zip(areas, parts.shapes, strict=True)]
        self.own = self.rows[me]
        self.views = [take(self.rows[peer], spans) for _, peer, spans in parts.boxes] if parts.are_whole_views else []

    def sum(self, shape: tuple[int, ...]) -> Tensor:
        """The gradient of this rank's shard, added in the same order on every rank."""
        if len(self.views) > 1:
            first, second, *rest = self.views
            out = first + second
            for view in rest:
                out += view
            return out
        out = self.own.new_zeros(shape)
        for place, peer, spans in self.boxes:
            put(out, place, take(self.rows[peer], spans), add=True)
        return out


class GradientRing:
    """An area per rank in shared memory and, per rank, the numbers of the last gradients it has published and consumed."""

    def __init__(self, memory: Any, parts: Mapping[GatheredWeight, GradientParts], world: World, capacity: int) -> None:
        self.parts, self.capacity = parts, capacity
        count, self.me = world.mesh.size, world.rank
        counters = np.frombuffer(memory, dtype=np.uint8)[: 2 * count * _LINE].view(np.int64)[:: _LINE // 8]
        self.published, self.consumed = counters[:count], counters[count:]
        start = 2 * count * _LINE
        self.areas = [tensor_at(memory, torch.uint8, (capacity,), start + k * capacity) for k in range(count)]
        self.number, self.head = 0, 0  # of the last gradient, and where its place ends
        self.in_use: deque[tuple[int, int, int]] = deque()  # places others may not have read yet: number, begin, end
        self.pending: deque[tuple[int, GatheredWeight, RingSlot]] = deque()  # published here, not yet added up
        self.slots: dict[tuple[GatheredWeight, int], RingSlot] = {}  # by weight and begin

    @staticmethod
    def open(weights: Sequence[GatheredWeight], world: World, capacity: int) -> GradientRing:
        """A ring of `capacity` bytes per rank; all ranks must call."""
        parts = {weight: GradientParts(weight, world) for weight in weights if weight.shard.requires_grad}
        memory = shared_memory(world.group(world.paths.wide), world.mesh.size * (2 * _LINE + capacity))
        return GradientRing(memory, parts, world, capacity)

    def rewind(self) -> None:
        """Step (16), after all ranks have consumed everything: a gradient then has the same place in every training step."""
        self.head = 0
        self.in_use.clear()

    @torch.no_grad()
    def publish(self, weight: GatheredWeight, grad: Tensor) -> None:
        """Steps (10) to (14) for a gradient of this rank."""
        size = self.parts[weight].size
        begin = self._reserve(size)
        slot = self.slots.get((weight, begin))
        if slot is None:
            areas = [area[begin : begin + size].view(grad.dtype) for area in self.areas]
            slot = self.slots[weight, begin] = RingSlot(self.parts[weight], areas, self.me)
        slot.own.copy_(grad)  # step (11)
        self.published[self.me] = self.number  # step (12)
        self.pending.append((self.number, weight, slot))
        self._consume()

    def _reserve(self, size: int) -> int:
        """Step (10): where the next gradient begins, once every rank has consumed what lay there."""
        begin = self.head if self.head + size <= self.capacity else 0
        self.head, self.number = begin + size, self.number + 1
        overlapped = [number for number, low, high in self.in_use if low < begin + size and begin < high]
        if overlapped:
            wait_for(self.consumed, overlapped[-1], TIMEOUT.total_seconds(), self._consume)
        while self.in_use and self.in_use[0][0] <= max(overlapped, default=0):
            self.in_use.popleft()
        self.in_use.append((self.number, begin, begin + size))
        return begin

    def _consume(self) -> None:
        """Steps (13) and (14) for every gradient that all ranks have published."""
        complete = int(self.published.min())
        while self.pending and self.pending[0][0] <= complete:
            number, weight, slot = self.pending.popleft()
            add_gradient(weight.shard, slot.sum(weight.shard.shape))
            self.consumed[self.me] = number

    @torch.no_grad()
    def finish(self) -> None:
        """Step (15)."""
        wait_for(self.published, self.number, TIMEOUT.total_seconds(), self._consume)
        self._consume()


class SharedTransport:
    """Divided weights of ranks that share a host."""

    def __init__(self, weights: Sequence[GatheredWeight], state: Mapping[str, Tensor], world: World, ring_bytes: int) -> None:
        """`ring_bytes`: of each rank's area, at least two of the largest gradients. All ranks must call."""
        layouts = {weight.name: (weight.gather_step.source, weight.shard.dtype) for weight in weights}
        self.shards, self.ring = SharedTensors.open(layouts, world), GradientRing.open(weights, world, ring_bytes)
        self.shards.move_in({name: state[name] for name in layouts}, world)
        self.readers = {w: reader(w.gather_step, world, [row[w.name] for row in self.shards.rows]) for w in weights}

    @property
    def buffers(self) -> list[Tensor]:
        return [self.ring.areas[self.ring.me]]

    def barrier(self) -> None:
        """The barriers before (9) and before (16): no rank reads or writes weights or gradients any more."""
        self.shards.sync.barrier()
        self.ring.rewind()

    @torch.no_grad()
    def fetch(self, weight: GatheredWeight, source: Bunch | None = None) -> Tensor:
        assert source is None
        return self.readers[weight]()

    def give(self, weight: GatheredWeight, grad: Tensor, target: Bunch | None = None) -> None:
        self.ring.publish(weight, grad)

    def limit(self, most: int) -> None:
        """Add up all published gradients; then none is in flight."""
        assert most == 0
        self.ring.finish()
