"""Several tensors exchanged in one collective.

A layer's weight and bias, or the biases of ten small layers, would take a collective each, and the time of a small collective
is latency. A packed exchange sends them as one message per peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.plans.layout.exchange import transfers
from fourfold.plans.lists.actions import Bunch
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm.exchange import by_peer, put, take, tiles
from fourfold.runtime.comm.world import World

FinishAll = Callable[[], list[Tensor]]


class PackedExchange:
    """A bunch on this rank: tensors of one dtype, all along the same axes."""

    def __init__(self, bunch: Bunch, world: World) -> None:
        steps, axes = bunch.steps, bunch.axes
        assert all(step.axes == axes for step in steps)
        members = world.members(axes)
        self.bunch, self.world = bunch, world
        self.group, self.me = world.group(axes, "gradients"), members.index(world.rank)
        self.shapes = [step.target.local_shape(world.coords) for step in steps]
        self.takes = [by_peer(transfers(step, world.rank, incoming=True), members) for step in steps]
        self.gives = [by_peer(transfers(step, world.rank, incoming=False), members) for step in steps]
        found = zip(self.takes, self.shapes, strict=True)
        self.tiled = [tiles([t for t in takes if t is not None], shape) for takes, shape in found]
        self.sends = [sum(t.numel for t in column if t is not None) for column in zip(*self.gives, strict=True)]
        self.receives = [sum(t.numel for t in column if t is not None) for column in zip(*self.takes, strict=True)]
        self.sends[self.me] = self.receives[self.me] = 0
        self.path = world.paths.several(steps, axes, world.rank)

    def launch(self, tensors: Sequence[Tensor]) -> FinishAll:
        """Start; the returned function waits and returns the results."""
        pieces = [
            take(tensor, given.spans).reshape(-1)
            for k, column in enumerate(zip(*self.gives, strict=True))
            for tensor, given in zip(tensors, column, strict=True)
            if given is not None and k != self.me
        ]
        packed = torch.cat(pieces) if pieces else tensors[0].new_empty(0)
        received = packed.new_empty(sum(self.receives))
        self.world.note("all_to_all", self.path, self.bunch.axes, packed.nbytes, self.bunch.key)
        direct = self.path == "direct"
        work = gloo_p2p.all_to_all(received, packed, self.receives, self.sends, self.group, direct=direct)
        outs = [self._own(k, tensor) for k, tensor in enumerate(tensors)]

        def finish() -> list[Tensor]:
            work.wait()
            self.world.journal.note("await", name=self.bunch.key)
            self._unpack(received, outs)
            return outs

        return finish

    def _own(self, number: int, tensor: Tensor) -> Tensor:
        """A result that holds this rank's own part already."""
        shape, add = self.shapes[number], not self.tiled[number]
        out = tensor.new_zeros(shape) if add else tensor.new_empty(shape)
        mine, own = self.takes[number][self.me], self.gives[number][self.me]
        if mine is not None and own is not None:
            put(out, mine.spans, take(tensor, own.spans), add=add)
        return out

    def _unpack(self, received: Tensor, outs: Sequence[Tensor]) -> None:
        offset = 0
        for k, column in enumerate(zip(*self.takes, strict=True)):
            for out, taken, tiled in zip(outs, column, self.tiled, strict=True):
                if taken is not None and k != self.me:
                    put(out, taken.spans, received[offset : offset + taken.numel].view(taken.shape), add=not tiled)
                    offset += taken.numel
