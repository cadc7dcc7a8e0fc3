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
        self.incoming = [by_peer(transfers(step, world.rank, incoming=True), members) for step in steps]
        self.outgoing = [by_peer(transfers(step, world.rank, incoming=False), members) for step in steps]
        pairs = zip(self.incoming, self.shapes, strict=True)
        self.adds = [not tiles([t for t in incoming if t is not None], shape) for incoming, shape in pairs]
        self.send_counts = [sum(t.numel for t in column if t is not None) for column in zip(*self.outgoing, strict=True)]
        self.receive_counts = [sum(t.numel for t in column if t is not None) for column in zip(*self.incoming, strict=True)]
        self.send_counts[self.me] = self.receive_counts[self.me] = 0
        self.path = world.paths.several(steps, axes, world.rank)

    def launch(self, tensors: Sequence[Tensor]) -> FinishAll:
        """Start; the returned function waits and returns the results."""
        pieces = [
            take(tensor, transfer.spans).reshape(-1)
            for k, column in enumerate(zip(*self.outgoing, strict=True))
            for tensor, transfer in zip(tensors, column, strict=True)
            if transfer is not None and k != self.me
        ]
        packed = torch.cat(pieces) if pieces else tensors[0].new_empty(0)
        received = packed.new_empty(sum(self.receive_counts))
        self.world.note("all_to_all", self.path, self.bunch.axes, packed.nbytes, self.bunch.key)
        direct = self.path == "direct"
        work = gloo_p2p.all_to_all(received, packed, self.receive_counts, self.send_counts, self.group, direct=direct)
        outs = [self._own_part(k, tensor) for k, tensor in enumerate(tensors)]

        def finish() -> list[Tensor]:
            work.wait()
            self.world.journal.note("await", name=self.bunch.key)
            self._unpack(received, outs)
            return outs

        return finish

    def _own_part(self, number: int, tensor: Tensor) -> Tensor:
        """A result that holds this rank's own part already."""
        shape, add = self.shapes[number], self.adds[number]
        out = tensor.new_zeros(shape) if add else tensor.new_empty(shape)
        mine, own = self.incoming[number][self.me], self.outgoing[number][self.me]
        if mine is not None and own is not None:
            put(out, mine.spans, take(tensor, own.spans), add=add)
        return out

    def _unpack(self, received: Tensor, outs: Sequence[Tensor]) -> None:
        offset = 0
        for k, column in enumerate(zip(*self.incoming, strict=True)):
            for out, transfer, add in zip(outs, column, self.adds, strict=True):
                if transfer is not None and k != self.me:
                    put(out, transfer.spans, received[offset : offset + transfer.numel].view(transfer.shape), add=add)
                    offset += transfer.numel
