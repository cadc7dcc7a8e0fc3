"""What travels together: gradients summed in buckets, weights gathered in bunches, slices of them in chunks. Facts of names and
sizes alone, for the runtime that sends them and for whoever counts their time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.plans.exchange import Exchange, Step
from fourfold.plans.program import Move, Program

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The last gradients to come are the first layers': a small bucket ends the step sooner."""
BUNCH_BYTES = 4 * 2**20
SUMS_AHEAD = 2
"""Sums of bunches of gradients under way at once."""
CHUNK_BYTES = 4 * 2**20
"""What a rank gives at a time when slices of parameters are gathered (ZeRO-1)."""
LARGE = 2**15
"""Elements that a rank takes from others: from so many on, messages between hosts go by themselves (`runtime.wire`)."""
RING_BYTES = 16 * 2**20
"""The least common memory through which gradients of gathered weights go, per rank: small ones need not wait for each other."""


def gradient_bytes(step: Step, item: int) -> int:
    """The place a gradient has in that memory: of the largest any rank has, in whole cache lines."""
    return -(-item * math.prod(max(own.counts) for own in step.source.dims) // 64) * 64


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

    names: tuple[str, ...]
    axes: tuple[str, ...]
    bytes: int


def buckets(gradients: Sequence[Gradient]) -> list[Bucket]:
    """Gradients of parameters in the order of their first use, in buckets in the order they come: last used first. One larger
    than a bucket has its own."""
    filling: dict[tuple[tuple[str, ...], str], list[Gradient]] = {}
    out: list[Bucket] = []
    for gradient in reversed(gradients):
        if gradient.bytes >= BUCKET_BYTES:
            out.append(_bucket([gradient]))
            continue
        key = (gradient.axes, gradient.dtype)
        if sum(g.bytes for g in filling.get(key, [])) + gradient.bytes > BUCKET_BYTES:
            out.append(_bucket(filling.pop(key)))
        filling.setdefault(key, []).append(gradient)
    for found in filling.values():
        cut = _tail(found)
        out += [_bucket(part) for part in (found[:cut], found[cut:]) if part]
    return out


def _bucket(gradients: Sequence[Gradient]) -> Bucket:
    return Bucket(tuple(g.name for g in gradients), gradients[0].axes, sum(g.bytes for g in gradients))


def _tail(gradients: Sequence[Gradient]) -> int:
    """Where the last, small bucket begins."""
    total = 0
    for k in reversed(range(len(gradients))):
        total += gradients[k].bytes
        if total > FIRST_BUCKET_BYTES:
            return k + 1
    return 0


def gathered(program: Program) -> list[Move]:
    """The moves that gather a parameter from where it is stored, divided, for the ops that read it (ZeRO-3)."""
    stored = {p.name for p in program.graph.parameters if not p.buffer}
    return [move for move in dict.fromkeys(program.moves()) if move.source in stored and is_gather(move)]


def is_gather(move: Move) -> bool:
    """Whether a parameter is brought from where it is stored in one exchange, and its gradient back in one."""
    return move.kind == "parameter" and all(map(_travels, (move.exchange, move.exchange.adjoint)))


def _travels(exchange: Exchange) -> bool:
    return len(exchange.steps) == 1 and exchange.steps[0].pattern != "local"


def bunched(steps: Sequence[Step], items: Sequence[int], dtypes: Sequence[object]) -> list[list[int]]:
    """Numbers of exchanges that travel together: neighbours of the same axes and dtype, up to a few megabytes of results.
    `items`: bytes of an element."""
    out: list[list[int]] = []
    size = 0
    for k, step in enumerate(steps):
        more = math.prod(step.target.shape) * items[k]
        alike = bool(out) and (steps[out[-1][0]].axes, dtypes[out[-1][0]]) == (step.axes, dtypes[k])
        if not alike or size + more > BUNCH_BYTES:
            out.append([])
            size = 0
        out[-1].append(k)
        size += more
    return out
