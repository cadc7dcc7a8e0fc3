"""Divided weights (ZeRO-3) between ranks that do not share memory: several weights in one collective, which runs while earlier
ops compute. The lists say which weights, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fourfold.plans.lists.actions import Bunch
from fourfold.plans.lowering.program import Move
from fourfold.runtime.comm.packed_exchange import FinishAll, PackedExchange
from fourfold.runtime.comm.world import World
from fourfold.runtime.zero.weight_transport import GatheredWeight, add_gradient


class CollectiveTransport:
    """The messages of one stage."""

    def __init__(self, bunches: Iterable[Bunch], weights: Mapping[Move, GatheredWeight], world: World) -> None:
        self.weights = weights
        self.exchanges = {bunch: PackedExchange(bunch, world) for bunch in dict.fromkeys(bunches)}
        self.gathers: dict[Bunch, FinishAll] = {}  # in flight
        self.weights_to_fetch: dict[tuple[Bunch, Move], Tensor] = {}  # gathered weights
        self.gradients: dict[Move, Tensor] = {}  # complete, until the others of their message are
        self.reductions: deque[tuple[Bunch, FinishAll]] = deque()  # in flight, the oldest first

    @property
    def buffers(self) -> list[Tensor]:
        return []

    @torch.no_grad()
    def launch(self, bunch: Bunch) -> None:
        """Start a message. A weight without a gradient on this rank sends zeros."""
        members = [self.weights[move] for move in bunch.moves]
        if bunch.gradients:
            own = [self.gradients.pop(w.move, None) for w in members]
            grads = [w.shard.new_zeros(w.shape) if grad is None else grad for w, grad in zip(members, own, strict=True)]
            self.reductions.append((bunch, self.exchanges[bunch].launch(grads)))
        else:
            self.gathers[bunch] = self.exchanges[bunch].launch([w.shard.detach() for w in members])

    def wait(self, bunch: Bunch) -> None:
        """Wait for a message with weights."""
        weights = self.gathers.pop(bunch)()
        self.weights_to_fetch.update({(bunch, move): weight for move, weight in zip(bunch.moves, weights, strict=True)})

    def fetch(self, weight: GatheredWeight, source: Bunch | None) -> Tensor:
        assert source is not None
        return self.weights_to_fetch.pop((source, weight.move))

    @torch.no_grad()
    def give(self, weight: GatheredWeight, grad: Tensor, target: Bunch | None) -> None:
        move = weight.move
        self.gradients[move] = self.gradients[move] + grad if move in self.gradients else grad

    @torch.no_grad()
    def limit(self, most: int) -> None:
        while len(self.reductions) > most:
            bunch, finish = self.reductions.popleft()
            for move, grad in zip(bunch.moves, finish(), strict=True):
                add_gradient(self.weights[move].shard, grad)
