"""Moving a tensor from one layout to another: one definition under every collective, halo and redistribution.

``result_r[needed_r] = sum over sources s of value_s[owned_s & needed_r]``, where the sources of rank r are the ranks that
differ from it only on axes along which the source is a Shard, or a Partial that the target no longer is. The gradient
moves by the same definition from dual(target) to dual(source), so all-reduce, all-gather, reduce-scatter, slice, halo and
their adjoints are cases of one function. `pattern` names the case, so that the runtime may take a faster collective and
the oracle a better price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from fourfold.index import IndexSet
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own

Pattern = Literal["none", "local", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
OVERLAPPING: tuple[Pattern, ...] = ("all_gather", "all_to_all")
"""Patterns that the runtime can start, and wait for later."""


@dataclass(frozen=True)
class Exchange:
    """A move between two layouts of one tensor."""

    mesh: Mesh
    source: Layout
    target: Layout

    @cached_property
    def adjoint(self) -> Exchange:
        return Exchange(self.mesh, self.target.dual, self.source.dual)

    @cached_property
    def steps(self) -> tuple[ExchangeStep, ...]:
        return _steps(self)

    @property
    def overlaps(self) -> bool:
        """Whether its last step can travel while others compute."""
        return bool(self.steps) and self.steps[-1].pattern in OVERLAPPING


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """One collective: its pattern and the axes its groups span."""

    mesh: Mesh
    source: Layout
    target: Layout
    pattern: Pattern
    axes: tuple[str, ...]
    dim: int = 0  # of all_gather and reduce_scatter

    @property
    def free(self) -> frozenset[str]:
        """The axes along which a rank's sources differ from it."""
        return _free(self.source, self.target) & set(self.axes)

    def received_elements(self, rank: int) -> int:
        """Elements that a rank receives from others."""
        if self.pattern in ("none", "local"):
            return 0
        if self.pattern == "all_reduce":
            group = math.prod(self.mesh.extent(a) for a in self.axes)
            numel = math.prod(self.target.local_shape(self.mesh.coords(rank)))
            return 2 * numel * (group - 1) // group
        return _element_count(self, rank, incoming=True)

    def sent_elements(self, rank: int) -> int:
        """Elements that a rank sends to others, counted once for each receiver."""
        return _element_count(self, rank, incoming=False)

    def size(self, rank: int, item: int) -> int:
        """Bytes of the collective on a rank, as `cluster.Curve` defines them: what it gives to others in an all-to-all, its own
        part in an all-gather, otherwise its result. `item`: bytes of an element."""
        if self.pattern == "all_to_all":
            return item * self.sent_elements(rank)
        layout = self.source if self.pattern == "all_gather" else self.target
        return item * math.prod(layout.local_shape(self.mesh.coords(rank)))

    def is_silent(self, rank: int) -> bool:
        """Whether nothing travels in the group that a rank is in."""
        return not any(self.received_elements(peer) for peer in self.mesh.group(rank, self.axes))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of one tensor between this rank and a peer, with its place in this rank's local tensor."""

    peer: int
    box: tuple[IndexSet, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(s) for s in self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def transfers(step: ExchangeStep, rank: int, *, incoming: bool) -> list[Transfer]:
    """The boxes a rank takes from (or gives to) each member of its group, itself included; empty ones left out."""
    mesh, own = step.mesh, step.mesh.coords(rank)
    layout, other = (step.target, step.source) if incoming else (step.source, step.target)
    mine = layout.box(own)
    out = []
    for peer in other.owners(mesh, mine, own, step.free):
        box = tuple(a & b for a, b in zip(mine, other.box(mesh.coords(peer)), strict=True))
        if all(len(s) for s in box):
            spans = tuple(m.positions(b) for m, b in zip(mine, box, strict=True))
            out.append(Transfer(peer, box, spans))
    return out


@lru_cache(maxsize=65536)
def _element_count(step: ExchangeStep, rank: int, *, incoming: bool) -> int:
    """Elements of `transfers` with others, without listing these."""
    mine, theirs = (step.target, step.source) if incoming else (step.source, step.target)
    at = step.mesh.coords(rank)
    box = mine.box(at)
    alone = math.prod(len(a & b) for a, b in zip(box, theirs.box(at), strict=True))
    return theirs.overlap(step.mesh, box, at, step.free) - alone


def _free(source: Layout, target: Layout) -> frozenset[str]:
    return source.sharded | (source.partial - target.partial)


@lru_cache(maxsize=65536)
def _steps(exchange: Exchange) -> tuple[ExchangeStep, ...]:
    """All-reduce what is partial and wanted everywhere, then move the rest at once."""
    mesh, source, target = exchange.mesh, exchange.source, exchange.target
    out: list[ExchangeStep] = []
    reduce = mesh.ordered(a for a in source.partial - target.partial - target.sharded if mesh.extent(a) > 1)
    if reduce:
        cut = _local_slice(mesh, source, target)
        if cut != source:
            out.append(ExchangeStep(mesh, source, cut, "local", ()))
        whole = Layout(cut.dims, cut.partial - set(reduce))
        out.append(ExchangeStep(mesh, cut, whole, "all_reduce", reduce))
        source = whole
    axes = _communication_axes(mesh, source, target)
    if axes:
        out.append(_collective_step(mesh, source, target, axes))
    elif source.dims != target.dims:
        out.append(ExchangeStep(mesh, source, target, "local", ()))
    return tuple(out)


def _local_slice(mesh: Mesh, source: Layout, target: Layout) -> Layout:
    """The source cut down, without communication, to what the target needs on axes where the source is whole. Parts of other
    ranks that overlap, as the gradients of halos do, must be added first: there nothing is cut."""
    dims = []
    for have, want in zip(source.dims, target.dims, strict=True):
        new = set(want.axes) - set(have.axes) - source.partial
        subset = new and not new & source.sharded and set(have.axes) <= set(want.axes) and not (set(want.axes) & source.partial)
        nested = subset and all(want.at(p) <= have.at(p) for p in want.points())
        nested = nested and all(_never_overlap(have, want, axis) for axis in have.axes)
        dims.append(want if nested else have)
    taken = {a for own in dims for a in own.axes}
    return Layout(tuple(dims), source.partial, source.replicate - taken)


def _communication_axes(mesh: Mesh, source: Layout, target: Layout) -> tuple[str, ...]:
    """The axes across which something must travel."""
    free = _free(source, target)
    return mesh.ordered(a for a in free if mesh.extent(a) > 1 and not _is_local_along(source, target, a))


def _is_local_along(source: Layout, target: Layout, axis: str) -> bool:
    """Whether every rank finds all it needs at its own coordinate along a sharded axis."""
    if axis in source.partial:
        return False
    dim = source.dim_of(axis)
    assert dim is not None
    have, want = source.dims[dim], target.dims[dim]
    if have == want:
        return True
    return axis in want.axes and _never_overlap(have, want, axis)


@lru_cache(maxsize=65536)
def _never_overlap(have: Own, want: Own, axis: str) -> bool:
    """Whether sets at different coordinates along `axis` never meet."""
    a, b = have.project({axis}), want.project({axis})
    return all(place == k for k, members in enumerate(a.sets) for place in b.overlapping(members))


def _collective_step(mesh: Mesh, source: Layout, target: Layout, axes: tuple[str, ...]) -> ExchangeStep:
    changed = [d for d, (a, b) in enumerate(zip(source.dims, target.dims, strict=True)) if a != b]
    if len(changed) == 1 and len(axes) == 1:
        (dim,), (axis,) = changed, axes
        have, want = source.dims[dim], target.dims[dim]
        rest = source.partial == target.partial
        if axis in have.axes and want == have.project(set(have.axes) - {axis}) and rest and _is_even_and_in_order(have, axis):
            return ExchangeStep(mesh, source, target, "all_gather", axes, dim)
        summed = source.partial - target.partial == {axis} and axis not in have.axes
        if summed and have == want.project(set(want.axes) - {axis}) and _is_even_and_in_order(want, axis):
            return ExchangeStep(mesh, source, target, "reduce_scatter", axes, dim)
    return ExchangeStep(mesh, source, target, "all_to_all", axes)


@lru_cache(maxsize=65536)
def _is_even_and_in_order(own: Own, axis: str) -> bool:
    """Whether, along an axis, parts are equally long, contiguous and in order, and next to each other."""
    whole = own.project(set(own.axes) - {axis})
    for point in whole.points() or [{}]:
        spans: list[tuple[int, int]] = []
        for k in range(dict(zip(own.axes, own.extents, strict=True))[axis]):
            part = own.at({**point, axis: k})
            if len(part.spans) != 1:
                return False
            spans.append(part.spans[0])
        if len({high - low for low, high in spans}) != 1:
            return False
        if any(spans[i][1] != spans[i + 1][0] for i in range(len(spans) - 1)):
            return False
    return True
