"""Ranks whose shards have the same sizes: what is true of one is true of all."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.plans.layout import Layout, Own
from fourfold.plans.mesh import Coords
from fourfold.plans.pipeline import Pipeline
from fourfold.plans.program import Program


def alike(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The ranks of each place in sets whose shards have the same sizes."""
    out: list[tuple[int, ...]] = []
    for place in pipeline.places:
        parts = [part for part in pipeline.parts if part.stage.ranks == place]
        sizes = [_sizes(program) for part in parts for program in part.programs.values()]
        found: dict[tuple[object, ...], list[int]] = {}
        for index, rank in enumerate(place):
            coords = parts[0].stage.mesh.coords(index)
            found.setdefault(tuple(_at(coords, own) for known in sizes for own in known), []).append(rank)
        out += [tuple(ranks) for ranks in found.values()]
    return out


Division = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Axes and extents that divide some dim, and the sizes of the parts."""


def _sizes(program: Program) -> list[Division]:
    """The distinct divisions of dims in a program."""
    owns: dict[Own, None] = {}
    for layout in _layouts(program):
        owns.update(dict.fromkeys(own for own in layout.dims if own.axes))
    return list(dict.fromkeys((own.axes, own.extents, tuple(map(len, own.sets))) for own in owns))


def _layouts(program: Program) -> Iterator[Layout]:
    yield from (*program.stored.values(), *program.updates.values())
    for compute in program.computes():
        yield from (*compute.needs, *compute.gives)
    for move in program.moves():
        yield from (move.exchange.source, move.exchange.target)


def _at(coords: Coords, division: Division) -> int:
    axes, extents, sizes = division
    flat = 0
    for axis, extent in zip(axes, extents, strict=True):
        flat = flat * extent + coords[axis]
    return sizes[flat]
