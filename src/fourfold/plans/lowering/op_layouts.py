"""The layouts of one op: from its nest, its splits and the incoming layouts to what each operand must hold and what each result
becomes.

Per mesh axis an op splits one loop, passes partial sums through, or runs alike on all ranks. The choice is explicit (a
split from the plan) or follows the incoming layouts; the division of the loop is inherited from them where it fits, so
that a chain of ops needs no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fourfold.errors import Infeasible
from fourfold.ops.nest import Concat, Dim, Loop, Need, Nest, Window
from fourfold.ops.window import ShiftedWindow
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own, concatenated, joined

PASS = "<partial>"
"""The choice of an axis along which a linear op lets partial sums through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLayouts:
    """One op on a mesh: layouts of operands and results, and the division of every loop."""

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    loops: Mapping[str, Own]
    choice: Mapping[str, str | None]  # axis -> loop name, PASS or None


def op_layouts(
    nest: Nest,
    mesh: Mesh,
    splits: Mapping[str, str],
    given: Sequence[Layout | None],
    *,
    wanted: Layout | None = None,
    where: str = "op",
) -> OpLayouts:
    """The layouts of an op. `given[i]` is None for operands that take any layout (parameters, constants, free inputs).

    `wanted` steers an op that is itself free: its first result's layout as a consumer asks for it.
    """
    choice: dict[str, str | None] = {}
    for axis in mesh.names:
        if mesh.extent(axis) == 1:
            choice[axis] = None
        elif axis in splits:
            choice[axis] = _explicit(nest, mesh, axis, splits[axis], where)
        elif wanted is not None:
            choice[axis] = _towards(nest, axis, wanted)
        else:
            choice[axis] = _followed(nest, mesh, axis, given)
    owns = {loop.name: _division(nest, mesh, loop, choice, given, wanted) for loop in nest.loops}
    needs = tuple(_need(nest, mesh, i, dims, owns, choice) for i, dims in enumerate(nest.operands))
    gives = tuple(_give(nest, mesh, dims, owns, choice) for dims in nest.results)
    return OpLayouts(needs=needs, gives=gives, loops=owns, choice=choice)


def _explicit(nest: Nest, mesh: Mesh, axis: str, split: str, where: str) -> str | None:
    if split == "replicate":
        return None
    if split.startswith("loop:"):
        return split[5:]
    loops = nest.loops_with_label(split)
    if not loops:
        offered = sorted({label for loop in nest.loops if loop.kind != "whole" for label in loop.labels})
        raise Infeasible(f"{where} cannot be split by {split}; it offers {', '.join(offered) or 'no split'} or replicate")
    extent = mesh.extent(axis)
    best = max(loops, key=lambda loop: min(loop.size // loop.unit // loop.outer, extent))
    size = best.size // best.unit // best.outer
    if size < extent and split in ("filter", "channel"):
        raise Infeasible(
            f"{where} has {size} {split}s to split, axis {axis} has {extent} ranks; use at most {size} ranks or another split"
        )
    return best.name


def _loops_on(nest: Nest, dims: tuple[Dim, ...], layout: Layout, axis: str) -> list[Loop]:
    """The loops that an axis of an incoming layout may continue on, best first."""
    dim = layout.dim_of(axis)
    if dim is None:
        return []
    terms = dims[dim]
    names: list[str] = []
    if len(terms) > 1:
        owns = layout.dims[dim].factors(tuple(_size(nest, t) for t in terms))
        if owns is not None:
            names = [n for t, own in zip(terms, owns, strict=True) if axis in own.axes for n in _names(t)]
    names = names or [n for t in terms for n in _names(t)]
    return [loop for loop in map(nest.loop, dict.fromkeys(names)) if loop.kind != "whole"]


def _names(term: object) -> tuple[str, ...]:
    if isinstance(term, str):
        return (term,)
    if isinstance(term, Window):
        return (term.loop,)
    return term.loops if isinstance(term, Concat) else ()


def _size(nest: Nest, term: object) -> int:
    if isinstance(term, int):
        return term
    return sum(nest.loop(name).size for name in _names(term))


def _by_size(given: Sequence[Layout | None]) -> list[int]:
    """Operand indices with a known layout, largest tensor first."""
    sizes = []
    for i, layout in enumerate(given):
        if layout is not None:
            numel = 1
            for own in layout.dims:
                numel *= own.size
            sizes.append((-numel, i))
    return [i for _, i in sorted(sizes)]


def _followed(nest: Nest, mesh: Mesh, axis: str, given: Sequence[Layout | None]) -> str | None:
    linear = [given[i] for i in nest.linear]
    if linear and all(g is not None and axis in g.partial for g in linear):
        return PASS
    for i in _by_size(given):
        layout = given[i]
        assert layout is not None
        for loop in _loops_on(nest, nest.operands[i], layout, axis):
            return loop.name
    return None


def _towards(nest: Nest, axis: str, wanted: Layout) -> str | None:
    loops = _loops_on(nest, nest.results[0], wanted, axis)
    return loops[0].name if loops else None


def _division(
    nest: Nest,
    mesh: Mesh,
    loop: Loop,
    choice: Mapping[str, str | None],
    given: Sequence[Layout | None],
    wanted: Layout | None,
) -> Own:
    group = {loop.name} | {other.name for other in nest.loops if loop.tie and other.tie == loop.tie}
    axes = [axis for axis in mesh.names if choice[axis] in group]
    if not axes:
        return Own.whole(loop.size)
    own = _inherited(nest, mesh, loop, axes, given, wanted) or Own.whole(loop.size)
    for axis in axes:
        if axis not in own.axes:
            own = own.refine(mesh, axis, outer=loop.outer, unit=loop.unit)
    return own


def _inherited(
    nest: Nest, mesh: Mesh, loop: Loop, axes: list[str], given: Sequence[Layout | None], wanted: Layout | None
) -> Own | None:
    """An incoming division of this loop that can be kept."""
    sources: list[tuple[tuple[Dim, ...], Layout]] = []
    for i in _by_size(given):
        layout = given[i]
        assert layout is not None
        sources.append((nest.operands[i], layout))
    if wanted is not None:
        sources.append((nest.results[0], wanted))
    for dims, layout in sources:
        for dim, terms in enumerate(dims):
            own = _part(nest, loop, terms, layout.dims[dim])
            if own is None:
                continue
            own = own.project(axes)
            disjoint = own.total == loop.size
            if own.axes and disjoint and own.cuts_at(loop.outer, loop.unit) and (not loop.tie or own.spread):
                return own
    return None


def _part(nest: Nest, loop: Loop, terms: Dim, own: Own) -> Own | None:
    """What a division of a whole dim says about one of its loops."""
    if len(terms) == 1:
        term = terms[0]
        if term == loop.name:
            return own
        if isinstance(term, Concat) and loop.name in term.loops:
            start = sum(nest.loop(n).size for n in term.loops[: term.loops.index(loop.name)])
            return own.shift(-start, loop.size)
        if isinstance(term, Window) and term.loop == loop.name and isinstance(term.need, ShiftedWindow):
            shifted = own.shift(-term.need.start, term.need.count)
            return shifted if shifted.balanced else None
        return None
    if loop.name not in terms:
        return None
    owns = own.factors(tuple(_size(nest, t) for t in terms))
    return owns[terms.index(loop.name)] if owns is not None else None


def _dims(nest: Nest, mesh: Mesh, dims: tuple[Dim, ...], owns: Mapping[str, Own]) -> tuple[Own, ...]:
    return tuple(joined(mesh, (_term(nest, mesh, t, owns) for t in terms)) if terms else Own.whole(1) for terms in dims)


def _term(nest: Nest, mesh: Mesh, term: object, owns: Mapping[str, Own]) -> Own:
    if isinstance(term, int):
        return Own.whole(term)
    if isinstance(term, str):
        return owns[term]
    if isinstance(term, Concat):
        return concatenated(mesh, (owns[name] for name in term.loops))
    assert isinstance(term, Window)
    own = owns[term.loop]
    if not own.axes:  # unsplit: the kernel sees the whole dim, whatever the windows leave out
        return Own.whole(term.need(own.sets[0]).size)
    return _windowed(own, term.need)


@lru_cache(maxsize=65536)
def _windowed(own: Own, need: Need) -> Own:
    """What must be there to compute a division of the results."""
    return Own(own.axes, own.extents, tuple(need(members) for members in own.sets))


def _need(
    nest: Nest, mesh: Mesh, index: int, dims: tuple[Dim, ...], owns: Mapping[str, Own], choice: Mapping[str, str | None]
) -> Layout:
    layout = Layout(_dims(nest, mesh, dims, owns))
    split = {axis for axis, name in choice.items() if name is not None} - layout.sharded
    passing = {axis for axis, name in choice.items() if name == PASS}
    if index in nest.linear:
        return Layout(layout.dims, frozenset(passing), frozenset(split - passing))
    return Layout(layout.dims, frozenset(), frozenset(split))


def _give(nest: Nest, mesh: Mesh, dims: tuple[Dim, ...], owns: Mapping[str, Own], choice: Mapping[str, str | None]) -> Layout:
    layout = Layout(_dims(nest, mesh, dims, owns))
    partial = set()
    for axis, name in choice.items():
        if name == PASS or (name is not None and axis not in layout.sharded and nest.loop(name).kind == "sum"):
            partial.add(axis)
    return Layout(layout.dims, frozenset(partial))
