"""How gradients are put into buckets, weights into bunches, slices of parameters into chunks: functions of names and sizes
alone. `messages` calls them with the sizes of a plan's `Policy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.plans.layout.exchange import Exchange, ExchangeStep
from fourfold.plans.lowering.program import Move, Program

RING_BYTES = 16 * 2**20
"""The least shared memory through which gradients of gathered weights go, per rank: small ones need not wait for each other."""
Chunk = list[tuple[int, int, int]]
"""Number of a tensor, and its rows from one to before another."""


def gradient_bytes(step: ExchangeStep, item: int) -> int:
    """The place a gradient has in that memory: of the largest any rank has, in whole cache lines."""
    return -(-item * math.prod(max(own.counts) for own in step.source.dims) // 64) * 64


def ring_bytes(moves: Sequence[Move], items: Sequence[int]) -> int:
    """Bytes of a rank's area in the ring: at least two of the largest gradient."""
    sizes = [gradient_bytes(move.exchange.adjoint.steps[0], item) for move, item in zip(moves, items, strict=True)]
    return max(RING_BYTES, 2 * max(sizes, default=0))


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient to be summed over axes."""

    name: str
    bytes: int
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype that are summed at once over the same axes."""

    key: str
    names: tuple[str, ...]
    axes: tuple[str, ...]
    bytes: int


def buckets(gradients: Sequence[Gradient], *, most: int, last: int) -> tuple[Bucket, ...]:
    """Gradients of parameters in the order of their first use, in buckets of at most so many bytes in the order they come: last
    used first. A larger one has its own. `last`: bytes of those that come last."""
    filling: dict[tuple[tuple[str, ...], str], list[Gradient]] = {}
    out: list[Sequence[Gradient]] = []
    for gradient in reversed(gradients):
        if gradient.bytes >= most:
            out.append([gradient])
            continue
        key = (gradient.axes, gradient.dtype)
        if sum(g.bytes for g in filling.get(key, [])) + gradient.bytes > most:
            out.append(filling.pop(key))
        filling.setdefault(key, []).append(gradient)
    for found in filling.values():
        cut = _tail(found, last)
        out += [part for part in (found[:cut], found[cut:]) if part]
    return tuple(
        Bucket(f"bucket {k}", tuple(g.name for g in some), some[0].axes, sum(g.bytes for g in some))
        for k, some in enumerate(out)
    )


def _tail(gradients: Sequence[Gradient], most: int) -> int:
    """Where the last, small bucket begins."""
    total = 0
    for k in reversed(range(len(gradients))):
        total += gradients[k].bytes
        if total > most:
            return k + 1
    return 0


def weight_gathers(program: Program) -> list[Move]:
    """The moves that gather a parameter from where it is stored, divided, for the ops that read it (ZeRO-3)."""
    stored = {p.name for p in program.graph.parameters if not p.buffer}
    return [move for move in dict.fromkeys(program.moves()) if move.source in stored and is_gather(move)]


def is_gather(move: Move) -> bool:
    """Whether a parameter is brought from where it is stored in one exchange, and its gradient back in one."""
    return move.kind == "parameter" and all(map(_travels, (move.exchange, move.exchange.adjoint)))


def _travels(exchange: Exchange) -> bool:
    return len(exchange.steps) == 1 and exchange.steps[0].pattern != "local"


def weight_bunches(
    steps: Sequence[ExchangeStep], items: Sequence[int], dtypes: Sequence[object], *, most: int
) -> list[list[int]]:
    """Numbers of exchanges that travel together: neighbours of the same axes and dtype, up to so many bytes of results.
    `items`: bytes of an element."""
    out: list[list[int]] = []
    size = 0
    for k, step in enumerate(steps):
        more = math.prod(step.target.shape) * items[k]
        alike = bool(out) and (steps[out[-1][0]].axes, dtypes[out[-1][0]]) == (step.axes, dtypes[k])
        if not alike or size + more > most:
            out.append([])
            size = 0
        out[-1].append(k)
        size += more
    return out


def chunks(shapes: Sequence[tuple[int, ...]], length: int) -> list[Chunk]:
    """Tensors cut by rows, in order, into chunks of at most `length` elements; no row is longer."""
    out: list[Chunk] = [[]]
    room = length
    for k, shape in enumerate(shapes):
        low, width = 0, math.prod(shape[1:])
        while width and low < shape[0]:
            if room < width:
                out.append([])
                room = length
            high = min(shape[0], low + room // width)
            out[-1].append((k, low, high))
            low, room = high, room - (high - low) * width
    return [chunk for chunk in out if chunk]
