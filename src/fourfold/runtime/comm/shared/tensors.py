"""Stored tensors in memory that the ranks of one host share, so that a peer's part is copied and never sent.

Every rank writes its own tensors only, and only when an optimizer updates them; the others read. Barriers of the board
around the updates keep the two apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fourfold.plans.layout.exchange import Step, Transfer, transfers
from fourfold.plans.layout.layout import Layout
from fourfold.runtime.comm.exchange import Spans, put, take
from fourfold.runtime.comm.shared.memory import SharedRows, shared_memory, viewed
from fourfold.runtime.comm.world import World

Reader = Callable[[], Tensor]
_LINE = 64  # bytes: a tensor begins at a cache line


class SharedTensors:
    """Tensors by rank of the mesh and name, and the board of all ranks."""

    def __init__(self, rows: list[dict[str, Tensor]], board: SharedRows) -> None:
        self.rows, self.board = rows, board

    @staticmethod
    def open(kept: Mapping[str, tuple[Layout, torch.dtype]], world: World) -> SharedTensors:
        """A shelf for tensors laid out so, of ranks that share memory; all must call."""
        points = [world.mesh.coords(rank) for rank in range(world.mesh.size)]
        shapes = [{name: layout.local_shape(at) for name, (layout, _) in kept.items()} for at in points]
        sizes = [math.prod(shape) * kept[name][1].itemsize for row in shapes for name, shape in row.items()]
        starts = itertools.accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0)
        *offsets, total = starts
        memory, at = shared_memory(world.group(world.paths.wide), max(total, _LINE)), iter(offsets)
        rows = [{n: viewed(memory, kept[n][1], shape, next(at)) for n, shape in row.items()} for row in shapes]
        return SharedTensors(rows, world.board(world.paths.wide))

    def adopt(self, tensors: Mapping[str, Tensor], world: World) -> None:
        """Move this rank's tensors here; they stay the same objects."""
        for name, tensor in tensors.items():
            mine = self.rows[world.rank][name]
            mine.copy_(tensor.detach())
            tensor.data = mine
        self.board.barrier()


def reader(step: Step, world: World, sources: Sequence[Tensor]) -> Reader:
    """A function that gives what a step takes, read from where each rank keeps its part. Parts that lie side by side are
    joined by one call: between computing, when caches hold something else, a call costs as much as copying 100 KB."""
    taken = transfers(step, world.rank, incoming=True)
    ways = [(t.spans, sources[t.peer], given(step, t.peer, world.rank).spans) for t in taken]
    shape = step.target.local_shape(world.coords)
    dim = side_by_side([place for place, _, _ in ways], shape)
    if dim is not None and all(one_box(spans) for _, _, spans in ways):
        parts = [take(source, spans) for place, source, spans in sorted(ways, key=lambda way: way[0][dim])]
        return lambda: torch.cat(parts, dim)

    def read() -> Tensor:
        out = sources[0].new_empty(shape)
        for place, source, spans in ways:
            put(out, place, take(source, spans), add=False)
        return out

    return read


def side_by_side(places: Sequence[Spans], shape: tuple[int, ...]) -> int | None:
    """The dim along which boxes follow each other and together fill a shape; None where they do not."""
    if not shape or not places or not all(map(one_box, places)):
        return None
    whole = [all(place[dim] == ((0, size),) for place in places) for dim, size in enumerate(shape)]
    if whole.count(False) > 1:
        return None
    dim = whole.index(False) if False in whole else 0
    pieces = sorted(place[dim][0] for place in places)
    ends = [0, *(high for _, high in pieces)]
    return dim if [low for low, _ in pieces] == ends[:-1] and ends[-1] == shape[dim] else None


def one_box(spans: Spans) -> bool:
    """Whether they are one piece of every dim, so that `take` gives a view."""
    return all(len(pieces) == 1 for pieces in spans)


def given(step: Step, giver: int, taker: int) -> Transfer:
    """What one rank gives another."""
    return next(t for t in transfers(step, giver, incoming=False) if t.peer == taker)
