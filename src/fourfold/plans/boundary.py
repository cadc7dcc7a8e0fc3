"""Who sends what to whom where a tensor passes from the ranks of one stage to those of another.

Each taker gets every index it needs exactly once: along axes that divide the tensor from all givers, along axes that
repeat it from one of the replicas, which take turns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from fourfold.index import IndexSet
from fourfold.plans.exchange import Transfer
from fourfold.plans.layout import Layout
from fourfold.plans.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Side:
    """A tensor on the ranks of a stage."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]

    def box(self, index: int) -> tuple[IndexSet, ...]:
        return self.layout.box(self.mesh.coords(index))


def outgoing(source: Side, target: Side, rank: int) -> list[Transfer]:
    """The boxes a rank of the source gives, in the order of their takers."""
    me = source.ranks.index(rank)
    out = []
    for taker, peer in enumerate(target.ranks):
        if me in _givers(source, target, taker):
            out += _transfer(peer, source.box(me), target.box(taker))
    return out


def incoming(source: Side, target: Side, rank: int) -> list[Transfer]:
    """The boxes a rank of the target takes."""
    me = target.ranks.index(rank)
    out = []
    for giver in _givers(source, target, me):
        out += _transfer(source.ranks[giver], target.box(me), source.box(giver))
    return out


def _transfer(peer: int, mine: tuple[IndexSet, ...], theirs: tuple[IndexSet, ...]) -> list[Transfer]:
    box = tuple(a & b for a, b in zip(mine, theirs, strict=True))
    if not all(len(s) for s in box):
        return []
    return [Transfer(peer, box, tuple(m.positions(b) for m, b in zip(mine, box, strict=True)))]


def _givers(source: Side, target: Side, taker: int) -> list[int]:
    """The members of the source that a member of the target takes from: all shards of one replica, its own if it has one."""
    free = [a for a in source.mesh.names if a not in source.layout.sharded]
    points = [
        dict(zip(free, point, strict=True)) for point in itertools.product(*(range(source.mesh.extent(a)) for a in free))
    ]
    chosen = points[taker % len(points)]
    if target.ranks[taker] in source.ranks:
        own = source.mesh.coords(source.ranks.index(target.ranks[taker]))
        chosen = {a: own[a] for a in free}
    coords = [source.mesh.coords(k) for k in range(source.mesh.size)]
    return [k for k, at in enumerate(coords) if all(at[a] == chosen[a] for a in free)]
