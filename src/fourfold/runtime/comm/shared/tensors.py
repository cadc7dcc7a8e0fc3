"""Stored tensors in memory that the ranks of one host share, so that a peer's part is copied and never sent.

Every rank writes its own tensors only, and only when its optimizer updates them; the other ranks read. Barriers before and
after the update keep readers and writers apart: steps (8) and (9) of the package's docstring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fourfold.plans.layout.exchange import ExchangeStep, Transfer, transfers
from fourfold.plans.layout.layout import Layout
from fourfold.runtime.comm.exchange import Spans, put, take
from fourfold.runtime.comm.shared.memory import SharedRows, shared_memory, tensor_at
from fourfold.runtime.comm.world import World

Reader = Callable[[], Tensor]
_LINE = 64  # bytes: a tensor begins at a cache line


class SharedTensors:
    """Tensors by rank of the mesh and name; `sync`: for barriers between those ranks."""

    def __init__(self, rows: list[dict[str, Tensor]], sync: SharedRows) -> None:
        self.rows, self.sync = rows, sync

    @staticmethod
    def open(layouts: Mapping[str, tuple[Layout, torch.dtype]], world: World) -> SharedTensors:
        """Memory for tensors of these layouts, of ranks that share memory; all must call."""
        points = [world.mesh.coords(rank) for rank in range(world.mesh.size)]
        shapes = [{name: layout.local_shape(at) for name, (layout, _) in layouts.items()} for at in points]
        sizes = [math.prod(shape) * layouts[name][1].itemsize for row in shapes for name, shape in row.items()]
        starts = itertools.accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0)
        *offsets, total = starts
        memory, at = shared_memory(world.group(world.paths.wide), max(total, _LINE)), iter(offsets)
        rows = [{n: tensor_at(memory, layouts[n][1], shape, next(at)) for n, shape in row.items()} for row in shapes]
        return SharedTensors(rows, world.shared_rows(world.paths.wide))

    def move_in(self, tensors: Mapping[str, Tensor], world: World) -> None:
        """Move the data of this rank's tensors into its row; they stay the same objects."""
        for name, tensor in tensors.items():  # step (8)
            stored = self.rows[world.rank][name]
            stored.copy_(tensor.detach())
            tensor.data = stored
        self.sync.barrier()


def reader(step: ExchangeStep, world: World, sources: Sequence[Tensor]) -> Reader:
    """A function that returns what this rank receives in a step, read from each rank's row: step (9). Parts that lie side by
    side are joined by one call, because between computing, when caches hold something else, a call costs as much as copying 100
    KB."""
    received = transfers(step, world.rank, incoming=True)
    parts = [(t.spans, sources[t.peer], transfer_between(step, t.peer, world.rank).spans) for t in received]
    shape = step.target.local_shape(world.coords)
    dim = concatenation_dim([place for place, _, _ in parts], shape)
    if dim is not None and all(is_one_box(spans) for _, _, spans in parts):
        views = [take(source, spans) for place, source, spans in sorted(parts, key=lambda part: part[0][dim])]
        return lambda: torch.cat(views, dim)

    def read() -> Tensor:
        out = sources[0].new_empty(shape)
        for place, source, spans in parts:
            put(out, place, take(source, spans), add=False)
        return out

    return read


def concatenation_dim(places: Sequence[Spans], shape: tuple[int, ...]) -> int | None:
    """The dim along which boxes follow each other and together fill a shape; None where they do not."""
    if not shape or not places or not all(map(is_one_box, places)):
        return None
    whole = [all(place[dim] == ((0, size),) for place in places) for dim, size in enumerate(shape)]
    if whole.count(False) > 1:
        return None
    dim = whole.index(False) if False in whole else 0
    pieces = sorted(place[dim][0] for place in places)
    ends = [0, *(high for _, high in pieces)]
    return dim if [low for low, _ in pieces] == ends[:-1] and ends[-1] == shape[dim] else None


def is_one_box(spans: Spans) -> bool:
    """Whether they are one piece of every dim, so that `take` returns a view."""
    return all(len(pieces) == 1 for pieces in spans)


def transfer_between(step: ExchangeStep, sender: int, receiver: int) -> Transfer:
    """What one rank sends another in a step."""
    return next(t for t in transfers(step, sender, incoming=False) if t.peer == receiver)
