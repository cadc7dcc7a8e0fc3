"""Who sends what to whom where a tensor passes from the ranks of one stage to those of another.

Each taker gets every index it needs exactly once: along axes that divide the tensor from all givers, along axes that
repeat it from one of the replicas, which take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from fourfold.index import IndexSet
from fourfold.plans.layout.exchange import Transfer
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh


@dataclass(frozen=True)
class StageTensor:
    """A tensor on the ranks of a stage."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]

    @cached_property
    def place(self) -> dict[int, int]:
        """Where in the mesh each rank is."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    def box(self, index: int) -> tuple[IndexSet, ...]:
        return self.layout.box(self.mesh.coords(index))


def outgoing(source: StageTensor, target: StageTensor, rank: int) -> list[Transfer]:
    """The boxes a rank of the source gives, in the order of their takers."""
    me = source.place[rank]
    box, coords, out = source.box(me), source.mesh.coords(me), []
    for taker in target.layout.owners(target.mesh, box, {}, frozenset(target.mesh.names)):
        if all(coords[axis] == k for axis, k in _replica(source, target, taker).items()):
            out += _transfer(target.ranks[taker], box, target.box(taker))
    return out


def incoming(source: StageTensor, target: StageTensor, rank: int) -> list[Transfer]:
    """The boxes a rank of the target takes."""
    me = target.place[rank]
    box, out = target.box(me), []
    for giver in source.layout.owners(source.mesh, box, _replica(source, target, me), source.layout.sharded):
        out += _transfer(source.ranks[giver], box, source.box(giver))
    return out


def sizes(source: StageTensor, target: StageTensor) -> list[tuple[int, int, int]]:
    """All messages from one side to the other: giver, taker, elements."""
    shared = source.ranks if set(source.ranks) & set(target.ranks) else ()
    found = _sizes(source.layout, source.mesh, target.layout, target.mesh, shared, target.ranks if shared else ())
    return [(source.ranks[giver], target.ranks[taker], numel) for giver, taker, numel in found]


@lru_cache(maxsize=1024)
def _sizes(
    have: Layout, mesh: Mesh, want: Layout, other: Mesh, givers: tuple[int, ...], takers: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """By places in the two meshes: stages that lie alike send alike, whatever their ranks, unless they have some in common."""
    source, target = _sides(have, mesh, want, other, givers, takers)
    found = ((transfer, place) for place, rank in enumerate(target.ranks) for transfer in incoming(source, target, rank))
    return [(source.place[transfer.peer], place, transfer.numel) for transfer, place in found]


def differing_message(source: StageTensor, target: StageTensor) -> bool:
    """Whether a rank gives something that its taker does not take, or takes what is not given."""
    shared = source.ranks if set(source.ranks) & set(target.ranks) else ()
    return _differing(source.layout, source.mesh, target.layout, target.mesh, shared, target.ranks if shared else ())


@lru_cache(maxsize=1024)
def _differing(have: Layout, mesh: Mesh, want: Layout, other: Mesh, givers: tuple[int, ...], takers: tuple[int, ...]) -> bool:
    source, target = _sides(have, mesh, want, other, givers, takers)
    given = {(rank, t.peer, t.numel) for rank in source.ranks for t in outgoing(source, target, rank)}
    return given != {(t.peer, rank, t.numel) for rank in target.ranks for t in incoming(source, target, rank)}


def _sides(
    have: Layout, mesh: Mesh, want: Layout, other: Mesh, givers: tuple[int, ...], takers: tuple[int, ...]
) -> tuple[StageTensor, StageTensor]:
    source = StageTensor(have, mesh, givers or tuple(range(mesh.size)))
    return source, StageTensor(want, other, takers or tuple(range(mesh.size, mesh.size + other.size)))


def _transfer(peer: int, mine: tuple[IndexSet, ...], theirs: tuple[IndexSet, ...]) -> list[Transfer]:
    box = tuple(a & b for a, b in zip(mine, theirs, strict=True))
    if not all(len(s) for s in box):
        return []
    return [Transfer(peer, box, tuple(m.positions(b) for m, b in zip(mine, box, strict=True)))]


def _replica(source: StageTensor, target: StageTensor, taker: int) -> dict[str, int]:
    """Where a member of the target takes a tensor from, along the axes that repeat it: from its own replica if it has one."""
    mesh, sharded = source.mesh, source.layout.sharded
    free = [axis for axis in mesh.names if axis not in sharded]
    own = source.place.get(target.ranks[taker])
    if own is None:
        replicas = mesh.offsets(free)
        own = replicas[taker % len(replicas)]
    coords = mesh.coords(own)
    return {axis: coords[axis] for axis in free}
