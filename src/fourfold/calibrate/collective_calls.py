"""The collectives that a calibration times, each as a function that runs it once. `collectives` times them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fourfold.cluster import NON_WAITING, Collective
from fourfold.errors import InvalidInput
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.comm_batches import RING_BYTES, gradient_bytes
from fourfold.plans.lists.paths import Paths
from fourfold.plans.lowering.program import Move
from fourfold.plans.spec.policy import DEFAULT
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm.shared.memory import SharedRows
from fourfold.runtime.comm.shared.sums import SharedSum
from fourfold.runtime.comm.world import World, running_placement
from fourfold.runtime.zero.weight_transport import GatheredWeight
from fourfold.runtime.zero.zero3_shared import SharedTransport

T = TypeVar("T")

PROCESSOR = torch.device("cpu")
DATA = ("data",)  # the axis of the ranks of a group
PLACES = 8  # for gradients that are dealt out: ranks may be so many repetitions apart


@dataclass(frozen=True, kw_only=True)
class CurveRequest:
    """One curve to measure: the groups that communicate at once."""

    collective: Collective
    groups: tuple[tuple[int, ...], ...]
    level: str
    crowd: float = 1.0  # of the ranks that communicate, how many take turns on a core


def collective_call(
    request: CurveRequest, mine: tuple[int, ...] | None, group: Any, device: torch.device = PROCESSOR
) -> Callable[[int], Callable[[], Any] | None]:
    """A function of a size in bytes; it returns one that runs the collective once, or None where shared memory has no room for
    it. Ranks outside all groups do nothing. All ranks must call."""
    placement = running_placement(device, dist.get_world_size())
    if mine is None:
        return lambda size: lambda: None
    count, kind, mesh = len(mine), request.collective, Mesh.of(data=len(mine))
    paths = Paths(mesh, mine, placement, DEFAULT)
    world = World(mesh, rank=mine.index(dist.get_rank()), device=device, ranks=mine, paths=paths)
    world._groups["inline", DATA] = group
    if kind.startswith("shared"):
        return _shared(kind, group, world) if paths.share_memory(DATA) else lambda size: None

    def run(size: int) -> Callable[[], Any]:
        n = max(size // 4, 1)
        one, all_of = (torch.zeros(numel, device=device) for numel in (n, n * count))
        if kind == "all_reduce":
            return lambda: dist.all_reduce(one, group=group)
        direct = paths.one_to_all(kind, DATA, world.rank, n * (count - 1)) == "direct"
        if kind == "all_gather":
            return lambda: gloo_p2p.all_gather(all_of, one, group, direct=direct).wait()
        if kind == "reduce_scatter":
            return lambda: gloo_p2p.reduce_scatter(one, all_of, group, direct=direct)
        if kind == "all_to_all":
            return _all_to_all(world, max(n // (count - 1), 1), group)
        return lambda: _ping(one, mine, group)  # there and back: `time_collective` halves it

    return run


def _all_to_all(world: World, each: int, group: Any) -> Callable[[], Any]:
    """So many elements from every rank for every other; within a host gloo copies as many for the rank itself, about what a
    program does beside it."""
    count, me = world.mesh.size, world.rank
    direct = world.paths.all_to_all(DATA, me, each * (count - 1)) == "direct"
    parts = [0 if direct and k == me else each for k in range(count)]
    total = sum(parts)

    def once() -> None:
        received, packed = torch.empty(total, device=world.device), torch.zeros(total, device=world.device)
        gloo_p2p.all_to_all(received, packed, parts, parts, group, direct=direct).wait()

    return once


def _ping(tensor: torch.Tensor, pair: tuple[int, ...], group: Any) -> None:
    """A message from the first to the second and back."""
    mine, other = (pair[0], pair[1]) if dist.get_rank() == pair[0] else (pair[1], pair[0])
    if mine == pair[0]:
        dist.send(tensor, other, group=group)
        dist.recv(tensor, other, group=group)
    else:
        dist.recv(tensor, other, group=group)
        dist.send(tensor, other, group=group)


def _shared(kind: str, group: Any, world: World) -> Callable[[int], Callable[[], Any] | None]:
    if kind == "shared_gather":
        rows = _if_room(lambda: SharedRows.open(group, 60.0, DEFAULT.small_bytes))
        return lambda size: None if rows is None else lambda: rows.gather(torch.zeros(max(size // 4, 1)))
    if kind in NON_WAITING:
        return lambda size: _divided(kind, world, -(-size // 4))

    def run(size: int) -> Callable[[], Any] | None:
        parameter = torch.zeros(max(size // 4, 1), requires_grad=True)
        shared = _if_room(lambda: SharedSum.open([parameter], DATA, world))
        gradient = torch.zeros(parameter.shape)
        if shared is None:
            return None

        def once() -> None:
            parameter.grad = gradient
            shared.sum()

        return once

    return run


def _divided(kind: str, world: World, numel: int) -> Callable[[], Any] | None:
    """Two weights stored divided, as ZeRO-3 has them: copied together, or their gradients dealt out, one after the other as
    those of a layer are. `time_collective` halves it."""
    whole = Layout.same((numel,))
    exchange = Exchange(world.mesh, whole.fully_sharded(world.mesh), replace(whole, replicate=frozenset(world.mesh.names)))
    shards = {name: torch.zeros(exchange.source.local_shape(world.coords), requires_grad=True) for name in ("weight", "bias")}
    moves = [Move(exchange=exchange, source=name, target=f"{name}@0", value=name, kind="parameter") for name in shards]
    weights = [GatheredWeight(move, (numel,), shards[move.value]) for move in moves]
    gradient = gradient_bytes(exchange.adjoint.steps[0], 4)
    ring = max(min(RING_BYTES, 2 * PLACES * gradient), 2 * gradient)
    transport = _if_room(lambda: SharedTransport(weights, shards, world, ring))
    if transport is None:
        return None
    gradients = [torch.zeros(numel) for _ in weights]

    def fetch() -> None:
        for weight in weights:
            transport.fetch(weight)

    def give() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.shard.grad = None
            transport.give(weight, gradient)

    if kind == "shared_fetch":
        return fetch
    for _ in range(PLACES):  # in training the places of gradients are known from the step before
        give()
    return give


def _if_room(make: Callable[[], T]) -> T | None:
    """What uses shared memory; None where there is no room for it."""
    try:
        return make()
    except InvalidInput:
        return None
