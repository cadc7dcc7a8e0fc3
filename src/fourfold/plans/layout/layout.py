"""Where a tensor lies on a mesh: one small algebra for shards, halos, replicas and partial sums.

Per axis a tensor is one of four things. `Shard`: some dim is divided along it. `Partial`: the values of the ranks sum to
the truth. `Same`: equal everywhere, and so is the gradient. `Replicate`: equal everywhere, but each rank's gradient is
only its share. Ops produce Same, Shard and Partial; they ask for any of the four.

A shard is explicit: an `Own` for each dim (`plans.layout.ownership`). `Layout.dual` is the layout of the gradient, and the
adjoint of an exchange from A to B is the exchange from dual(B) to dual(A).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from fourfold.index import IndexSet
from fourfold.plans.layout.mesh import Coords, Mesh
from fourfold.plans.layout.ownership import Own, overlap


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of every dim, and the state of the axes that divide none: partial, replicate, else same."""

    dims: tuple[Own, ...]
    partial: frozenset[str] = frozenset()
    replicate: frozenset[str] = frozenset()

    @staticmethod
    def same(shape: Iterable[int]) -> Layout:
        return Layout(tuple(Own.whole(size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(own.size for own in self.dims)

    @property
    def sharded(self) -> frozenset[str]:
        return frozenset(axis for own in self.dims for axis in own.axes)

    @property
    def dual(self) -> Layout:
        """The layout of the gradient."""
        return Layout(self.dims, self.replicate, self.partial)

    @property
    def stored(self) -> Layout:
        """As a stored tensor that feeds this need: replicas are the same everywhere."""
        return Layout(self.dims)

    def partition(self, mesh: Mesh) -> Layout:
        """How a parameter that feeds this need is stored: where windows overlap or leave rows out, every row once."""
        return Layout(tuple(own.partition(mesh) for own in self.dims))

    def fully_sharded(self, mesh: Mesh) -> Layout:
        """Sharded along every axis that divides nothing yet, so that no element is held twice.

        The first dim is preferred, where it has an index for everyone: shards are then runs of memory. Otherwise it is the
        dim with most indices, and some shards may be empty. A tensor without dims stays as it is.
        """
        dims = list(self.dims)
        for axis in mesh.names:
            if mesh.extent(axis) > 1 and axis not in self.sharded and dims:
                fewest = [min(own.counts) for own in dims]
                dim = 0 if fewest[0] >= mesh.extent(axis) else fewest.index(max(fewest))
                dims[dim] = dims[dim].refine(mesh, axis)
        return Layout(tuple(dims), self.partial, self.replicate)

    def dim_of(self, axis: str) -> int | None:
        """The dim divided along an axis."""
        return next((d for d, own in enumerate(self.dims) if axis in own.axes), None)

    def box(self, coords: Coords) -> tuple[IndexSet, ...]:
        return tuple(own.at(coords) for own in self.dims)

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        return tuple(own.counts[own.place(coords)] for own in self.dims)

    def owners(self, mesh: Mesh, box: tuple[IndexSet, ...], at: Coords, axes: Set[str]) -> list[int]:
        """The ranks at these coordinates, but for any along the given axes, that may own a part of a box: those that own
        none of it along a dim divided by the axes are not looked at."""
        points: list[dict[str, int]] = [{}]
        for own, members in zip(self.dims, box, strict=True):
            if axes.isdisjoint(own.axes):
                continue
            here = [point for place in own.overlapping(members) if _agree(point := own.point(place), at, axes)]
            points = [{**a, **b} for a in points for b in here if all(a.get(k, v) == v for k, v in b.items())]
        for axis in axes - self.sharded:
            points = [{**point, axis: k} for point in points for k in range(mesh.extent(axis))]
        return sorted(mesh.rank({**at, **point}) for point in points)

    def overlap(self, mesh: Mesh, box: tuple[IndexSet, ...], at: Coords, axes: Set[str]) -> int:
        """The elements of a box that those ranks own, one that several own counted for each."""
        assert len(self.sharded) == sum(len(own.axes) for own in self.dims), "an axis divides one dim"
        each = (
            overlap(own, members, tuple((a, at[a]) for a in own.axes if a not in axes))
            for own, members in zip(self.dims, box, strict=True)
        )
        return math.prod(each) * math.prod(mesh.extent(axis) for axis in axes - self.sharded)

    def state(self, axis: str) -> str:
        dim = self.dim_of(axis)
        if dim is not None:
            return f"shard({dim})"
        return "partial" if axis in self.partial else "replicate" if axis in self.replicate else "same"

    def describe(self, mesh: Mesh) -> str:
        return ", ".join(f"{axis}: {self.state(axis)}" for axis in mesh.names)


def _agree(point: Coords, at: Coords, axes: Set[str]) -> bool:
    return all(k == at[axis] for axis, k in point.items() if axis not in axes)
