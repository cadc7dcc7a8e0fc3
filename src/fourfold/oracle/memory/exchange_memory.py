"""Memory of an exchange on one rank: what it makes, and what it holds beside that while it is under way.

It follows `runtime.comm.exchange` step by step. gloo's own buffers count where torch's allocator gives them (the flat result of
an all-gather, the flat operand of a reduce-scatter); those inside the library do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.plans.layout.exchange import Exchange, ExchangeStep, Transfer, transfers
from fourfold.plans.lists.paths import Paths


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """One step: bytes of the result (None: a view of the source) and of what else is alive until it is there."""

    result: int | None
    beside: int = 0


def exchange_memory(exchange: Exchange, rank: int, item: int, paths: Paths) -> tuple[ExchangeMemory, ...]:
    """The steps of an exchange on a rank."""
    return tuple(_moved(step, rank, item, paths) for step in exchange.steps)


def _moved(step: ExchangeStep, rank: int, item: int, paths: Paths) -> ExchangeMemory:
    coords = step.mesh.coords(rank)
    size = math.prod(step.target.local_shape(coords)) * item
    source = math.prod(step.source.local_shape(coords)) * item
    count = math.prod(step.mesh.extent(a) for a in step.axes)
    if step.pattern == "none":
        return ExchangeMemory(None)
    if step.pattern == "local":
        return _local(step, rank, size, item)
    if step.pattern == "all_reduce":
        return ExchangeMemory(size, count * size if paths.of(step, rank, item) == "shared" else 0)  # whose rows are copied out
    if step.pattern == "all_gather":
        direct = paths.of(step, rank, item) == "direct"
        return ExchangeMemory(size, 0 if direct and joins(step, rank) else size)
    if step.pattern == "reduce_scatter":
        return ExchangeMemory(size, source if joins(step, rank) else 2 * source)
    return _all_to_all(step, rank, size, item)


def joins(step: ExchangeStep, rank: int) -> bool:
    """Whether the parts of an all-gather or a reduce-scatter lie one after the other in the whole: nothing is copied."""
    whole = step.target if step.pattern == "all_gather" else step.source
    return math.prod(whole.local_shape(step.mesh.coords(rank))[: step.dim]) == 1


def _local(step: ExchangeStep, rank: int, size: int, item: int) -> ExchangeMemory:
    shape = step.target.local_shape(step.mesh.coords(rank))
    gives = [t for t in transfers(step, rank, incoming=False) if t.peer == rank]
    if len(gives) == 1 and gives[0].shape == shape:
        held = step.source.local_shape(step.mesh.coords(rank))
        return ExchangeMemory(None if _run(gives[0], held) else size, max(0, item * _joining(gives[0], held) - size))
    return ExchangeMemory(size)


def _run(transfer: Transfer, held: tuple[int, ...]) -> bool:
    """Whether a box is a run of memory in what a rank holds: cut along the first dim that has more than one index."""
    cut = [d for d, (a, b) in enumerate(zip(transfer.shape, held, strict=True)) if a != b]
    whole = all(len(spans) == 1 for spans in transfer.spans)
    return whole and (not cut or (math.prod(transfer.shape[: cut[-1]]) == 1))


def _joining(transfer: Transfer, held: tuple[int, ...]) -> int:
    """Elements that are alive at once while a box of several spans is put together, dim by dim; none where it is a view."""
    sizes, made = list(held), [0]
    for d, spans in enumerate(transfer.spans):
        sizes[d] = transfer.shape[d]
        if len(spans) > 1:
            made.append(math.prod(sizes))
    return max(a + b for a, b in zip([0, *made], made, strict=False))


def _all_to_all(step: ExchangeStep, rank: int, size: int, item: int) -> ExchangeMemory:
    """Pieces that are no runs of memory are copied, then packed; what arrives is unpacked from a buffer. All that is still
    there when the rank's own part is put into the result."""
    held = step.source.local_shape(step.mesh.coords(rank))
    outgoing = transfers(step, rank, incoming=False)
    own = sum(_joining(t, held) for t in outgoing if t.peer == rank)
    gives = [t for t in outgoing if t.peer != rank]
    takes = [t for t in transfers(step, rank, incoming=True) if t.peer != rank]
    packed = sum(t.numel for t in gives)
    copies = sum(t.numel for t in gives if not _run(t, held))
    return ExchangeMemory(size, item * (packed + copies + own + sum(t.numel for t in takes)))
