"""Who owns what of one dim: an index set for every coordinate of the mesh axes that divide it.

Sets of a produced tensor are disjoint; sets an op asks for may overlap (halos). There may be thousands of sets, and the same
few divisions serve all tensors of a program: what follows from one is found once and kept.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fourfold.errors import Infeasible
from fourfold.index import IndexSet, Span
from fourfold.plans.layout.mesh import Coords, Mesh

MOST_PIECES = 2**19  # of a merged dim on all ranks: a second and 100 MB each time


@dataclass(frozen=True, eq=False)
class Own:
    """Who owns what of one dim: an index set for each coordinate along `axes`, row-major. No axes: the whole dim.

    Two divisions are compared set by set only if their hashes agree.
    """

    axes: tuple[str, ...]
    extents: tuple[int, ...]
    sets: tuple[IndexSet, ...]

    @staticmethod
    def whole(size: int) -> Own:
        return _whole(size)

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.extents, self.sets))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Own) or self._hash != other._hash:
            return False
        return (self.axes, self.extents, self.sets) == (other.axes, other.extents, other.sets)

    def __reduce__(self) -> tuple[object, ...]:
        return Own, (self.axes, self.extents, self.sets)  # hashes of another process mean nothing here

    @property
    def size(self) -> int:
        return self.sets[0].size

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many indices each coordinate owns."""
        return tuple(map(len, self.sets))

    @cached_property
    def uneven(self) -> bool:
        """Whether some coordinates own more than others."""
        return len(set(self.counts)) > 1

    @cached_property
    def total(self) -> int:
        """How many indices all coordinates own, one that several own counted for each."""
        return sum(self.counts)

    def place(self, coords: Coords) -> int:
        """Which of the sets belongs to some coordinates."""
        if len(self.axes) < 2:
            return coords[self.axes[0]] if self.axes else 0
        flat = 0
        for axis, extent in zip(self.axes, self.extents, strict=True):
            flat = flat * extent + coords[axis]
        return flat

    def at(self, coords: Coords) -> IndexSet:
        return self.sets[self.place(coords)]

    def points(self) -> list[dict[str, int]]:
        grid = itertools.product(*(range(e) for e in self.extents))
        return [dict(zip(self.axes, point, strict=True)) for point in grid]

    def point(self, place: int) -> dict[str, int]:
        """The coordinates of one of the sets."""
        out: dict[str, int] = {}
        for axis, extent in zip(reversed(self.axes), reversed(self.extents), strict=True):
            place, out[axis] = divmod(place, extent)
        return out

    @cached_property
    def _sorted(self) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
        """Where spans begin, in order; how far those up to each reach; the spans with the places of their sets."""
        spans = sorted((low, high, k) for k, members in enumerate(self.sets) for low, high in members.spans)
        reach = itertools.accumulate((high for _, high, _ in spans), max)
        return [low for low, _, _ in spans], list(reach), spans

    def overlapping(self, members: IndexSet) -> list[int]:
        """The places of the sets that have an index in common with this one; the others are not looked at."""
        begins, reach, spans = self._sorted
        found: set[int] = set()
        for low, high in members.spans:
            at = bisect_left(begins, high)
            while at and reach[at - 1] > low:
                at -= 1
                if spans[at][1] > low:
                    found.add(spans[at][2])
        return sorted(found)

    def refine(self, mesh: Mesh, axis: str, *, outer: int = 1, unit: int = 1) -> Own:
        """Divide every set evenly along one more axis."""
        return _refined(self, mesh, axis, outer, unit)

    def project(self, axes: Iterable[str]) -> Own:
        """Give up the division along all axes but these: sets along the others are united."""
        return _projected(self, frozenset(axes))

    def shift(self, offset: int, size: int) -> Own:
        """The same division of the indices moved by `offset` inside a dim of `size`, clipped to it."""
        return _shifted(self, offset, size)

    def reduced(self) -> Own:
        """Without the axes along which nothing differs."""
        own = self
        for axis in self.axes:
            without = own.project(set(own.axes) - {axis})
            if all(without.at(point) == own.at(point) for point in own.points()):
                own = without
        return own

    def factors(self, sizes: tuple[int, ...]) -> tuple[Own, ...] | None:
        """One `Own` per factor of the dim, if this division is a product of divisions of the factors."""
        return _own_factors(self, sizes)

    def partition(self, mesh: Mesh) -> Own:
        """This division if it holds every index exactly once, else an even one along the same axes."""
        if self.total == self.size == self.project(()).total:
            return self
        own = Own.whole(self.size)
        for axis in self.axes:
            own = own.refine(mesh, axis)
        return own

    @property
    def balanced(self) -> bool:
        """Whether no coordinate owns more than an even share, rounded up."""
        return max(self.counts) <= -(-self.size // len(self.sets))

    @property
    def spread(self) -> bool:
        """Whether no coordinate owns twice an even share: true of heads dealt out unevenly, not of a piece on one rank."""
        return max(self.counts) * len(self.sets) < 2 * self.size

    def cuts_at(self, outer: int, unit: int) -> bool:
        """Whether every span begins and ends at a multiple of `unit`, alike in each of `outer` blocks."""
        return (outer, unit) == (1, 1) or _cuts_at(self, outer, unit)


def joined(mesh: Mesh, owns: Iterable[Own]) -> Own:
    """The division of a dim whose factors, outermost first, are divided as given."""
    parts = tuple(owns)
    if len(parts) == 1:
        return parts[0]
    return _joined(mesh, parts)


def concatenated(mesh: Mesh, owns: Iterable[Own]) -> Own:
    """The division of dims laid one after another."""
    return _concatenated(mesh, tuple(owns))


@lru_cache(maxsize=65536)
def _cuts_at(own: Own, outer: int, unit: int) -> bool:
    if unit > 1 and any(low % unit or high % unit for s in own.sets for low, high in s.spans):
        return False
    return outer == 1 or all(s.factors((outer, s.size // outer)) is not None for s in own.sets)


@lru_cache(maxsize=65536)
def _concatenated(mesh: Mesh, parts: tuple[Own, ...]) -> Own:
    axes = mesh.ordered(a for own in parts for a in own.axes)
    extents = tuple(mesh.extent(a) for a in axes)
    total = sum(own.size for own in parts)
    sets = []
    for point in Own(axes, extents, ()).points():
        spans, offset = [], 0
        for own in parts:
            spans += [(low + offset, high + offset) for low, high in own.at(point).spans]
            offset += own.size
        sets.append(IndexSet.of(total, spans))
    return Own(axes, extents, tuple(sets))


@lru_cache(maxsize=65536)
def _whole(size: int) -> Own:
    return Own((), (), (IndexSet.whole(size),))


@lru_cache(maxsize=65536)
def _shifted(own: Own, offset: int, size: int) -> Own:
    return Own(own.axes, own.extents, tuple(members.shift(offset, size) for members in own.sets))


@lru_cache(maxsize=65536)
def _refined(own: Own, mesh: Mesh, axis: str, outer: int, unit: int) -> Own:
    axes = mesh.ordered({*own.axes, axis})
    extents = tuple(mesh.extent(a) for a in axes)
    points = Own(axes, extents, ()).points()
    sets = tuple(own.at(p).parts(mesh.extent(axis), outer=outer, unit=unit)[p[axis]] for p in points)
    return Own(axes, extents, sets)


@lru_cache(maxsize=65536)
def _projected(own: Own, axes: frozenset[str]) -> Own:
    kept = tuple(a for a in own.axes if a in axes)
    if kept == own.axes:
        return own
    extents = tuple(e for a, e in zip(own.axes, own.extents, strict=True) if a in axes)
    united: dict[tuple[int, ...], list[Span]] = {}
    for point, members in zip(own.points(), own.sets, strict=True):
        united.setdefault(tuple(point[a] for a in kept), []).extend(members.spans)
    return Own(kept, extents, tuple(IndexSet.of(own.size, united[key]) for key in sorted(united)))


@lru_cache(maxsize=65536)
def _joined(mesh: Mesh, parts: tuple[Own, ...]) -> Own:
    axes = mesh.ordered(a for own in parts for a in own.axes)
    extents = tuple(mesh.extent(a) for a in axes)
    sets, pieces = [], 0
    for point in Own(axes, extents, ()).points():
        members = IndexSet.whole(1)
        for own in parts:
            inner = own.at(point)
            pieces += 0 if inner.is_whole else len(members) * len(inner.spans)
            if pieces > MOST_PIECES:
                sizes = " x ".join(str(own.size) for own in parts)
                where = f"in more than {MOST_PIECES:,} pieces on the ranks of {mesh}"
                raise Infeasible(f"a dim of {sizes} merged would lie {where}; use a smaller batch, or split by another dim")
            members = members.product(inner)
        sets.append(members)
    return Own(axes, extents, tuple(sets))


@lru_cache(maxsize=65536)
def _own_factors(own: Own, sizes: tuple[int, ...]) -> tuple[Own, ...] | None:
    found = [s.factors(sizes) if s.spans else None for s in own.sets]
    if any(f is None and s.spans for f, s in zip(found, own.sets, strict=True)):
        return None
    filled = [f for f in found if f is not None]
    varying = [len({f[i] for f in filled}) > 1 for i in range(len(sizes))]
    first = next((i for i, varies in enumerate(varying) if varies), 0)
    out = []
    for i, size in enumerate(sizes):
        empty = IndexSet(size, ()) if i == first else IndexSet.whole(size)
        sets = tuple(empty if f is None else f[i] for f in found)
        out.append(Own(own.axes, own.extents, sets).reduced())
    return tuple(out)


@lru_cache(maxsize=65536)
def overlap(own: Own, members: IndexSet, fixed: tuple[tuple[str, int], ...]) -> int:
    """How many of some indices the sets with these coordinates own."""
    if not fixed and members.is_whole:
        return own.total
    places = own.overlapping(members)
    if fixed:
        points = [(place, own.point(place)) for place in places]
        places = [place for place, point in points if all(point[axis] == k for axis, k in fixed)]
    return sum(len(own.sets[place] & members) for place in places)
