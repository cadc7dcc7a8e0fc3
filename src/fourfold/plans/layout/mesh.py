"""The ranks of a stage as a grid of named axes. *Axis* is of the mesh, *dim* of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Coords = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with their sizes, the last varying fastest with the rank."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(**sizes: int) -> Mesh:
        return Mesh(tuple(sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def extent(self, axis: str) -> int:
        return next(size for name, size in self.axes if name == axis)

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes in mesh order."""
        wanted = set(axes)
        return tuple(name for name in self.names if name in wanted)

    def coords(self, rank: int) -> dict[str, int]:
        out: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return dict(reversed(out.items()))

    def rank(self, coords: Coords) -> int:
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coords[name]
        return rank

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on the given axes only, in row-major order."""
        own, offsets = self.coords(rank), self.offsets(axes)
        first = rank - sum(own[name] * stride for name, stride in self._strides(axes))
        return tuple(first + offset for offset in offsets)

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ on the given axes only, in the order of their first ranks."""
        wanted = set(axes)
        offsets = self.offsets(wanted)
        firsts = self.offsets(name for name in self.names if name not in wanted)
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def offsets(self, axes: Iterable[str]) -> tuple[int, ...]:
        """How far the ranks at all coordinates along the given axes, row-major, are from the one at the origin."""
        out = [0]
        for name, stride in self._strides(axes):
            out = [base + k * stride for base in out for k in range(self.extent(name))]
        return tuple(out)

    def _strides(self, axes: Iterable[str]) -> list[tuple[str, int]]:
        """Of the given axes, in mesh order: how far neighbours are apart."""
        wanted, stride, out = set(axes), 1, []
        for name, size in reversed(self.axes):
            if name in wanted:
                out.append((name, stride))
            stride *= size
        return out[::-1]

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes)


def divisors(number: int) -> list[int]:
    """The sizes an axis of so many ranks may have."""
    return [d for d in range(1, number + 1) if number % d == 0]
