"""Sets of indices along one tensor dim: shards, halos, blocks and merged dims are all described by them.

A set is a sorted tuple of disjoint half-open spans inside ``range(size)``. A local tensor holds the rows of its set in
increasing order, so the position of an index inside the set is its local index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Span = tuple[int, int]


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    out: list[Span] = []
    for low, high in sorted(spans):
        if low >= high:
            continue
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class IndexSet:
    """A subset of ``range(size)`` as sorted, disjoint, non-touching spans."""

    size: int
    spans: tuple[Span, ...]

    @staticmethod
    def consecutive(counts: Sequence[int]) -> tuple[IndexSet, ...]:
        """Sets that follow one another, `counts[k]` indices in set k."""
        total, start, out = sum(counts), 0, []
        for count in counts:
            out.append(IndexSet.of(total, [(start, start + count)]))
            start += count
        return tuple(out)

    @staticmethod
    def whole(size: int) -> IndexSet:
        return _whole(size)

    @staticmethod
    def of(size: int, spans: Iterable[Span]) -> IndexSet:
        """The union of the given spans, clipped to ``range(size)``."""
        return IndexSet(size, _merge((max(0, low), min(size, high)) for low, high in spans))

    @staticmethod
    def of_indices(size: int, indices: Iterable[int]) -> IndexSet:
        return IndexSet(size, _merge((i, i + 1) for i in indices))

    def __len__(self) -> int:
        return sum(high - low for low, high in self.spans)

    def __iter__(self) -> Iterator[int]:
        for low, high in self.spans:
            yield from range(low, high)

    @property
    def is_whole(self) -> bool:
        return self.spans == ((0, self.size),) or self.size == 0

    @property
    def bounds(self) -> Span:
        """The one span of a contiguous set; ``(0, 0)`` if empty."""
        if not self.spans:
            return (0, 0)
        if len(self.spans) > 1:
            raise ValueError(f"{self} is not contiguous")
        return self.spans[0]

    def __and__(self, other: IndexSet) -> IndexSet:
        return _intersection(self, other)

    def __or__(self, other: IndexSet) -> IndexSet:
        return IndexSet(self.size, _merge(self.spans + other.spans))

    def __le__(self, other: IndexSet) -> bool:
        return len(self & other) == len(self)

    def positions(self, part: IndexSet) -> tuple[Span, ...]:
        """Where the members of `part`, a subset, lie among the members of this set."""
        out: list[Span] = []
        base, mine = 0, iter(self.spans)
        low, high = next(mine, (0, 0))
        for start, stop in part.spans:
            while stop > high:
                base += high - low
                low, high = next(mine)
            out.append((base + start - low, base + stop - low))
        return _merge(out)

    def shift(self, offset: int, size: int) -> IndexSet:
        """The same members moved by `offset` inside a dim of `size`, clipped to it."""
        return IndexSet.of(size, ((low + offset, high + offset) for low, high in self.spans))

    def parts(self, count: int, *, outer: int = 1, unit: int = 1) -> tuple[IndexSet, ...]:
        """`count` balanced parts. The members form `outer` equal blocks; each block is cut in the same way, at multiples of
        `unit`. The first parts get the remainder, so the first part is empty only if the set is."""
        return _parts(self, count, outer, unit)

    def product(self, inner: IndexSet) -> IndexSet:
        """Indices ``i * inner.size + j`` of a merged dim whose outer factor is this set's."""
        return _product(self, inner)

    def factors(self, sizes: tuple[int, ...]) -> tuple[IndexSet, ...] | None:
        """The sets whose product this one is, for a dim split into `sizes`; None if there are none."""
        return _factors(self, sizes)


@lru_cache(maxsize=65536)
def _whole(size: int) -> IndexSet:
    return IndexSet(size, ((0, size),) if size else ())


@lru_cache(maxsize=65536)
def _intersection(a: IndexSet, b: IndexSet) -> IndexSet:
    if a.is_whole:
        return b
    if b.is_whole:
        return a
    out: list[Span] = []
    i = j = 0
    while i < len(a.spans) and j < len(b.spans):
        low, high = max(a.spans[i][0], b.spans[j][0]), min(a.spans[i][1], b.spans[j][1])
        if low < high:
            out.append((low, high))
        if a.spans[i][1] < b.spans[j][1]:
            i += 1
        else:
            j += 1
    return IndexSet(a.size, tuple(out))


def _slice(a: IndexSet, start: int, stop: int) -> list[Span]:
    """The spans of the members at positions start..stop."""
    out: list[Span] = []
    base = 0
    for low, high in a.spans:
        begin, end = max(start, base), min(stop, base + high - low)
        if begin < end:
            out.append((low + begin - base, low + end - base))
        base += high - low
    return out


@lru_cache(maxsize=65536)
def _parts(a: IndexSet, count: int, outer: int, unit: int) -> tuple[IndexSet, ...]:
    total = len(a)
    if total % (outer * unit):
        outer = unit = 1
    block = total // outer
    share, extra = divmod(block // unit, count)
    out = []
    begin = 0
    for k in range(count):
        end = begin + (share + (k < extra)) * unit
        spans = [s for j in range(outer) for s in _slice(a, j * block + begin, j * block + end)]
        out.append(IndexSet(a.size, _merge(spans)))
        begin = end
    return tuple(out)


@lru_cache(maxsize=65536)
def _product(outer: IndexSet, inner: IndexSet) -> IndexSet:
    m = inner.size
    if inner.is_whole:
        return IndexSet(outer.size * m, tuple((low * m, high * m) for low, high in outer.spans) if m else ())
    return IndexSet(outer.size * m, _merge((i * m + low, i * m + high) for i in outer for low, high in inner.spans))


@lru_cache(maxsize=65536)
def _factors(a: IndexSet, sizes: tuple[int, ...]) -> tuple[IndexSet, ...] | None:
    if len(sizes) <= 1:
        return (a,) if sizes else ()
    n = sizes[0]
    m = a.size // n if n else 0
    if not a.spans or m == 0:
        return (IndexSet(n, ()), *(IndexSet.whole(s) for s in sizes[1:]))
    rows: dict[int, list[Span]] = {}
    full: list[Span] = []
    for low, high in a.spans:
        first, last = low // m, (high - 1) // m
        whole_first, whole_last = -(-low // m), high // m
        if whole_first < whole_last:
            full.append((whole_first, whole_last))
        if first < whole_first:
            rows.setdefault(first, []).append((low - first * m, min(high, (first + 1) * m) - first * m))
        if last >= whole_last and not (last == first and first < whole_first):
            rows.setdefault(last, []).append((0, high - last * m))
    if full and rows:
        return None
    patterns = {tuple(spans) for spans in rows.values()} or {((0, m),)}
    if len(patterns) != 1:
        return None
    outer = IndexSet(n, _merge(full + [(r, r + 1) for r in rows]))
    rest = _factors(IndexSet(m, next(iter(patterns))), sizes[1:])
    return None if rest is None else (outer, *rest)
