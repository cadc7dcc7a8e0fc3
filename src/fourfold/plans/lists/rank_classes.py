"""Ranks whose shards have the same sizes: what is true of one is true of all, so that one of them stands for the others.

Most divisions give every rank as much, and say nothing; the others put ranks apart by the size of their part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Coords, Mesh
from fourfold.plans.layout.ownership import Own
from fourfold.plans.lowering.program import Compute, Program, inside


def rank_classes(mesh: Mesh, programs: Iterable[Program]) -> list[tuple[int, ...]]:
    """The members of a mesh in sets whose shards have the same sizes in all these programs, in the order of their firsts."""
    owns = dict.fromkeys(own for program in programs for layout in _layouts(program) for own in layout.dims)
    divisions = dict.fromkeys((own.axes, own.counts) for own in owns if own.uneven)
    places = {axes: _places(mesh, axes) for axes in {axes for axes, _ in divisions}}
    found: dict[tuple[int, ...], list[int]] = {}
    for member in range(mesh.size):
        found.setdefault(tuple(counts[places[axes][member]] for axes, counts in divisions), []).append(member)
    return list(map(tuple, found.values()))


def share_of(step: Compute, coords: Coords) -> tuple[int, ...]:
    """What tells a rank's share of one step from another's: its sizes along the divisions that are uneven."""
    layouts = (own for layout in (*step.needs, *step.gives) for own in layout.dims)
    owns = dict.fromkeys(own for own in (*layouts, *step.loops.values()) if own.uneven)
    return tuple(own.counts[own.place(coords)] for own in owns)


def _layouts(program: Program) -> Iterator[Layout]:
    yield from (*program.stored.values(), *program.updates.values())
    for step in program.steps:
        for inner in inside(step):
            if isinstance(inner, Compute):
                yield from (*inner.needs, *inner.gives)
            else:
                yield from (inner.exchange.source, inner.exchange.target)


def _places(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """Which part of a division along some axes each member has."""
    own = Own(axes, tuple(mesh.extent(axis) for axis in axes), ())
    return [own.place(mesh.coords(member)) for member in range(mesh.size)]
