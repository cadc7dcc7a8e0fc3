"""Divided weights (ZeRO-3) between ranks that do not share memory: several weights in one message, started while ops before
them compute. The lists say which, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lowering.program import Move
from fourfold.runtime.comm.packed_exchange import Arrived, PackedExchange
from fourfold.runtime.comm.world import World
from fourfold.runtime.zero.weight_transport import Gathered, add_gradient


class CollectiveTransport:
    """The messages of one stage."""

    def __init__(self, bunches: Iterable[Bunch], known: Mapping[Move, Gathered], world: World) -> None:
        self.known = known
        self.parcels = {bunch: PackedExchange(bunch, world) for bunch in dict.fromkeys(bunches)}
        self.flying: dict[Bunch, Arrived] = {}
        self.here: dict[tuple[Bunch, Move], Tensor] = {}  # weights that have arrived and were not taken yet
        self.came: dict[Move, Tensor] = {}  # gradients that wait for the others of their message
        self.flights: deque[tuple[Bunch, Arrived]] = deque()  # messages with gradients, the oldest first

    @property
    def kept(self) -> list[Tensor]:
        return []

    @torch.no_grad()
    def launch(self, bunch: Bunch) -> None:
        """Start a message. A weight without a gradient on this rank has gradient zero."""
        members = [self.known[move] for move in bunch.moves]
        if bunch.gradients:
            came = [self.came.pop(g.move, None) for g in members]
            grads = [g.shard.new_zeros(g.shape) if grad is None else grad for g, grad in zip(members, came, strict=True)]
            self.flights.append((bunch, self.parcels[bunch].launch(grads)))
        else:
            self.flying[bunch] = self.parcels[bunch].launch([g.shard.detach() for g in members])

    def arrive(self, bunch: Bunch) -> None:
        """Wait for a message with weights."""
        weights = self.flying.pop(bunch)()
        self.here.update({(bunch, move): weight for move, weight in zip(bunch.moves, weights, strict=True)})

    def fetch(self, gathered: Gathered, source: Bunch | None) -> Tensor:
        assert source is not None
        return self.here.pop((source, gathered.move))

    @torch.no_grad()
    def give(self, gathered: Gathered, grad: Tensor, target: Bunch | None) -> None:
        move = gathered.move
        self.came[move] = self.came[move] + grad if move in self.came else grad

    @torch.no_grad()
    def limit(self, most: int) -> None:
        while len(self.flights) > most:
            bunch, arrived = self.flights.popleft()
            for move, grad in zip(bunch.moves, arrived(), strict=True):
                add_gradient(self.known[move].shard, grad)
