"""Exchanges on real tensors: each `plans.layout.exchange.ExchangeStep` bound to this rank, and the autograd function
that runs it with its adjoint.

What to send, from where and to where is computed once, when a program is bound. A training step then only copies and calls
one collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.plans.layout.exchange import Exchange, ExchangeStep, Transfer, transfers
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm.world import World

Mover = Callable[[Tensor], Tensor]
Finish = Callable[[], Tensor]
Launcher = Callable[[Tensor], Finish]
"""Starts an exchange; the returned function waits for it and returns the result."""
Spans = tuple[tuple[tuple[int, int], ...], ...]

_MANY_SPANS = 16  # beyond this an index tensor beats a chain of slices


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers: it may have a gradient, and is compared by distance."""
    return tensor.is_floating_point() or tensor.is_complex()


def take(tensor: Tensor, spans: Spans) -> Tensor:
    """The sub-box at the given spans of every dim."""
    for dim, pieces in enumerate(spans):
        if len(pieces) == 1:
            low, high = pieces[0]
            if high - low != tensor.shape[dim]:
                tensor = tensor.narrow(dim, low, high - low)
        elif len(pieces) > _MANY_SPANS:
            tensor = tensor.index_select(dim, _index(pieces, tensor.device))
        elif pieces:
            tensor = torch.cat([tensor.narrow(dim, low, high - low) for low, high in pieces], dim)
        else:
            tensor = tensor.narrow(dim, 0, 0)
    return tensor


def put(target: Tensor, spans: Spans, value: Tensor, *, add: bool) -> None:
    """Write or add a sub-box."""
    many = [d for d, pieces in enumerate(spans) if len(pieces) > _MANY_SPANS]
    if many:
        dim = many[0]
        rest = tuple(((0, target.shape[d]),) if d == dim else p for d, p in enumerate(spans))
        index = _index(spans[dim], target.device)
        whole = torch.zeros_like(target) if add else target
        grown = whole.narrow(dim, 0, 0).new_zeros(tuple(target.shape[d] if d == dim else n for d, n in enumerate(value.shape)))
        grown.index_copy_(dim, index, value)
        if not add:
            kept = take(target, rest).clone()
            kept.index_copy_(dim, index, value)
            grown = kept
        put(target, rest, grown, add=add)
        return
    starts = [list(itertools.accumulate((h - low for low, h in pieces), initial=0)) for pieces in spans]
    for combo in itertools.product(*(range(len(pieces)) for pieces in spans)):
        where = tuple(slice(*spans[d][k]) for d, k in enumerate(combo))
        what = tuple(slice(starts[d][k], starts[d][k + 1]) for d, k in enumerate(combo))
        if add:
            target[where] += value[what]
        else:
            target[where] = value[what]


def _index(pieces: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(low, high, device=device) for low, high in pieces])


def launcher(exchange: Exchange, world: World, name: str = "") -> Launcher:
    """A function that starts this rank's part of an exchange; where it `overlaps`, its last collective runs while others
    compute. `name`: of the value, for the journal."""
    *first, last = [_step_launcher(step, world, name) for step in exchange.steps] or [_synchronous(lambda tensor: tensor)]

    def launch(tensor: Tensor) -> Finish:
        tensor = tensor.resolve_conj().resolve_neg()  # transports read memory, where a lazy conjugate is not
        for step in first:
            tensor = step(tensor)()
        return last(tensor)

    return launch


def mover(exchange: Exchange, world: World, name: str = "") -> Mover:
    """A function that runs this rank's part of an exchange."""
    launch = launcher(exchange, world, name)
    return lambda tensor: launch(tensor)()


def _step_launcher(step: ExchangeStep, world: World, name: str) -> Launcher:
    if step.pattern == "local":
        return _synchronous(_local(step, world))
    if step.pattern == "all_reduce":
        return _synchronous(_all_reduce(step, world, name))
    if step.pattern == "all_gather":
        return _all_gather(step, world, name)
    if step.pattern == "reduce_scatter":
        return _synchronous(_reduce_scatter(step, world, name))
    return _all_to_all(step, world, name)


def _synchronous(move: Mover) -> Launcher:
    """A launcher whose exchange is complete when it returns."""

    def launch(tensor: Tensor) -> Finish:
        out = move(tensor)
        return lambda: out

    return launch


def _local(step: ExchangeStep, world: World) -> Mover:
    shape = step.target.local_shape(world.coords)
    incoming = [t for t in transfers(step, world.rank, incoming=True) if t.peer == world.rank]
    outgoing = [t for t in transfers(step, world.rank, incoming=False) if t.peer == world.rank]

    def move(tensor: Tensor) -> Tensor:
        if incoming and incoming[0].shape == shape:
            return take(tensor, outgoing[0].spans).contiguous()
        out = tensor.new_zeros(shape)
        for target, source in zip(incoming, outgoing, strict=True):
            put(out, target.spans, take(tensor, source.spans), add=False)
        return out

    return move


def _all_reduce(step: ExchangeStep, world: World, name: str) -> Mover:
    world.group(step.axes)  # created now, because all ranks must take part
    return lambda tensor: world.all_reduce(tensor, step.axes, name)


def _all_gather(step: ExchangeStep, world: World, name: str) -> Launcher:
    group, count = world.group(step.axes), world.extent(step.axes)
    shape = step.target.local_shape(world.coords)
    if math.prod(shape) == 0:
        return _synchronous(lambda tensor: tensor.new_zeros(shape))
    path = world.paths.one_to_all("all_gather", step.axes, world.rank, step.received_elements(world.rank))

    def launch(tensor: Tensor) -> Finish:
        tensor, bools = _sendable(tensor.contiguous())
        parts = tensor.new_empty((count, *tensor.shape))
        world.note("all_gather", path, step.axes, tensor.nbytes, name)
        work = gloo_p2p.all_gather(parts, tensor.view(-1), group, direct=path == "direct")

        def finish() -> Tensor:
            work.wait()
            out = parts.movedim(0, step.dim).reshape(shape)  # one copy; none where the parts are adjacent
            return out.bool() if bools else out

        return finish

    return launch


def _reduce_scatter(step: ExchangeStep, world: World, name: str) -> Mover:
    group, count = world.group(step.axes), world.extent(step.axes)
    shape = step.target.local_shape(world.coords)
    if math.prod(shape) == 0:
        return lambda tensor: tensor.new_zeros(shape)
    path = world.paths.one_to_all("reduce_scatter", step.axes, world.rank, step.received_elements(world.rank))

    def move(tensor: Tensor) -> Tensor:
        out = tensor.new_empty(shape)
        parts = tensor.unflatten(step.dim, (count, -1)).movedim(step.dim, 0)  # one copy, or none
        world.note("reduce_scatter", path, step.axes, out.nbytes, name)
        gloo_p2p.reduce_scatter(out, parts, group, direct=path == "direct")
        return out

    return move


def _sendable(tensor: Tensor) -> tuple[Tensor, bool]:
    """gloo carries no booleans."""
    return (tensor.to(torch.uint8), True) if tensor.dtype == torch.bool else (tensor, False)


def by_peer(items: list[Transfer], members: tuple[int, ...]) -> list[Transfer | None]:
    """The transfer with each member of a group, if there is one."""
    found = {t.peer: t for t in items}
    return [found.get(peer) for peer in members]


def _all_to_all(step: ExchangeStep, world: World, name: str) -> Launcher:
    members = world.members(step.axes)
    incoming = by_peer(transfers(step, world.rank, incoming=True), members)
    outgoing = by_peer(transfers(step, world.rank, incoming=False), members)
    me = members.index(world.rank)
    send_counts = [t.numel if t is not None and k != me else 0 for k, t in enumerate(outgoing)]
    receive_counts = [t.numel if t is not None and k != me else 0 for k, t in enumerate(incoming)]
    shape = step.target.local_shape(world.coords)
    silent = step.is_silent(world.rank)
    group = world.group(step.axes)  # all ranks must create groups together, even if only other groups will use theirs
    path, add = world.paths.several([step], step.axes, world.rank), not tiles([t for t in incoming if t is not None], shape)

    def launch(tensor: Tensor) -> Finish:
        tensor, bools = _sendable(tensor)
        pieces = [take(tensor, t.spans).reshape(-1) for k, t in enumerate(outgoing) if t is not None and k != me]
        packed = torch.cat(pieces) if pieces else tensor.new_empty(0)
        received = tensor.new_empty(sum(receive_counts))
        work = None
        if not silent:
            world.note("all_to_all", path, step.axes, packed.nbytes, name)
            work = gloo_p2p.all_to_all(received, packed, receive_counts, send_counts, group, direct=path == "direct")
        out = tensor.new_zeros(shape) if add else tensor.new_empty(shape)
        mine, own = incoming[me], outgoing[me]
        if mine is not None and own is not None:
            put(out, mine.spans, take(tensor, own.spans), add=add)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            offset = 0
            for t, count in zip(incoming, receive_counts, strict=True):
                if t is not None and count:
                    put(out, t.spans, received[offset : offset + count].view(t.shape), add=add)
                    offset += count
            return out.bool() if bools else out

        return finish

    return launch


def tiles(items: list[Transfer], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a local tensor exactly once, so that they may be written rather than added."""
    if sum(t.numel for t in items) != math.prod(shape):
        return False
    return not any(all(len(x & y) for x, y in zip(a.box, b.box, strict=True)) for a, b in itertools.combinations(items, 2))


class _ExchangeFunction(torch.autograd.Function):
    """An exchange and, backward, its adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, finish: Finish, backward: Mover) -> Tensor:
        ctx.move = backward
        out = finish()
        return out.view_as(out) if out is tensor else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.move(grads[0]), None, None


def differentiable_mover(exchange: Exchange, world: World, name: str = "") -> Mover:
    """The differentiable exchange."""
    launch = differentiable_launcher(exchange, world, name)
    return lambda tensor: launch(tensor)()


def differentiable_launcher(exchange: Exchange, world: World, name: str = "") -> Launcher:
    """The differentiable exchange in two halves: start it now, wait when the result is needed."""
    forward, backward = launcher(exchange, world, name), mover(exchange.adjoint, world, name)

    def launch(tensor: Tensor) -> Finish:
        finish = forward(tensor.detach())
        return lambda: apply(tensor, finish)

    def apply(tensor: Tensor, finish: Finish) -> Tensor:
        if not is_inexact(tensor):
            return finish()
        return _ExchangeFunction.apply(tensor, finish, backward)  # type: ignore[no-untyped-call]

    return launch
