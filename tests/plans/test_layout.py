"""Laws of divisions and layouts: refine and project, factors, concatenation, duals."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.index import IndexSet
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own, concatenated, joined

laws = settings(max_examples=100, deadline=None)
MESH = Mesh.of(a=2, b=3, c=2)
EVERYWHERE = [MESH.coords(rank) for rank in range(MESH.size)]


@st.composite
def owns(draw: st.DrawFn, *, size: int | None = None, among: str = "abc") -> Own:
    """A division by successive refinement, in any order of axes."""
    own = Own.whole(draw(st.integers(1, 12)) if size is None else size)
    for axis in draw(st.permutations(among))[: draw(st.integers(0, len(among)))]:
        own = own.refine(MESH, axis)
    return own


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_and_coordinates_are_inverse(sizes: list[int]) -> None:
    mesh = Mesh(tuple((f"x{i}", size) for i, size in enumerate(sizes)))
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


def test_a_group_spans_its_axes_and_keeps_the_other_coordinates() -> None:
    for rank in range(MESH.size):
        group = MESH.group(rank, ("a", "c"))
        assert len(group) == 4
        assert rank in group
        assert {MESH.coords(r)["b"] for r in group} == {MESH.coords(rank)["b"]}


@laws
@given(owns())
def test_a_refined_division_covers_the_dim_once(own: Own) -> None:
    assert sorted(i for s in own.sets for i in s) == list(range(own.size))
    assert own.balanced


@laws
@given(owns(among="ab"), st.integers(1, 2), st.integers(1, 2))
def test_project_undoes_refine(own: Own, outer: int, unit: int) -> None:
    assert own.refine(MESH, "c", outer=outer, unit=unit).project(own.axes) == own


@laws
@given(st.integers(1, 12), st.permutations("abc"))
def test_the_order_of_refinement_is_part_of_the_division(size: int, order: list[str]) -> None:
    own = Own.whole(size)
    for axis in order:
        own = own.refine(MESH, axis)
    first = own.project({order[0]})
    assert first == Own.whole(size).refine(MESH, order[0])


@laws
@given(owns(), st.sets(st.sampled_from("abc")))
def test_projection_unites_what_the_given_up_axes_divided(own: Own, kept: set[str]) -> None:
    projected = own.project(kept)
    for point in projected.points():
        members = {i for p in own.points() if all(p[a] == point[a] for a in projected.axes) for i in own.at(p)}
        assert set(projected.at(point)) == members


@laws
@given(st.integers(1, 12), st.data())
def test_reduced_drops_exactly_the_axes_along_which_nothing_differs(size: int, data: st.DataObject) -> None:
    sets = [IndexSet.of(size, [data.draw(st.tuples(st.integers(0, 3), st.integers(3, 6)))]) for _ in range(6)]
    own = Own(("a", "b"), (2, 3), tuple(sets))
    reduced = own.reduced()
    assert all(reduced.at(point) == own.at(point) for point in own.points())
    for axis in reduced.axes:
        without = reduced.project(set(reduced.axes) - {axis})
        assert any(without.at(point) != reduced.at(point) for point in reduced.points())


@laws
@given(owns(size=4, among="a"), owns(size=6, among="bc"))
def test_a_merged_dim_is_owned_by_products_and_falls_apart_again(first: Own, second: Own) -> None:
    merged = joined(MESH, (first, second))
    for coords in EVERYWHERE:
        assert list(merged.at(coords)) == [i * 6 + j for i in first.at(coords) for j in second.at(coords)]
    if all(len(s) for s in merged.sets):
        assert merged.factors((4, 6)) == (first.reduced(), second.reduced())


def test_factors_of_a_merged_dim_with_an_empty_shard_still_join_to_it() -> None:
    own = Own.whole(2).refine(MESH, "b")  # the third rank holds nothing
    merged = joined(MESH, (own, Own.whole(5)))
    factors = merged.factors((2, 5))
    assert factors is not None
    assert [len(s) for s in joined(MESH, factors).sets] == [5, 5, 0]
    assert factors[1].axes == ()


def test_a_division_that_cuts_through_rows_has_no_factors() -> None:
    assert Own.whole(10).refine(MESH, "b").factors((2, 5)) is None


@laws
@given(owns(among="ab"), owns(among="bc"))
def test_concatenated_divisions_lie_one_after_another(first: Own, second: Own) -> None:
    both = concatenated(MESH, (first, second))
    assert both.size == first.size + second.size
    for coords in EVERYWHERE:
        assert list(both.at(coords)) == [*first.at(coords), *(i + first.size for i in second.at(coords))]


@laws
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_a_division_cut_in_blocks_says_so(outer: int, units: int, unit: int) -> None:
    own = Own.whole(outer * units * unit).refine(MESH, "b", outer=outer, unit=unit)
    assert own.cuts_at(outer, unit)
    assert own.cuts_at(1, unit)


def test_an_even_cut_through_fused_blocks_is_noticed() -> None:
    own = Own.whole(12).refine(MESH, "a")  # rank 0 would hold the first block and a half
    assert not own.cuts_at(3, 1)
    assert not Own.whole(10).refine(MESH, "b").cuts_at(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    states = {axis: draw(st.sampled_from(["shard0", "shard1", "partial", "replicate", "same"])) for axis in "abc"}
    dims = []
    for d, size in enumerate((5, 6)):
        own = Own.whole(size)
        for axis in "abc":
            if states[axis] == f"shard{d}":
                own = own.refine(MESH, axis)
        dims.append(own)
    chosen = {kind: frozenset(a for a, s in states.items() if s == kind) for kind in ("partial", "replicate")}
    return Layout(tuple(dims), chosen["partial"], chosen["replicate"])


@laws
@given(layouts())
def test_the_dual_swaps_partial_and_replicate_and_is_its_own_inverse(layout: Layout) -> None:
    swap = {"partial": "replicate", "replicate": "partial"}
    for axis in MESH.names:
        assert layout.dual.state(axis) == swap.get(layout.state(axis), layout.state(axis))
    assert layout.dual.dual == layout


@laws
@given(layouts())
def test_each_axis_is_in_one_state_and_boxes_have_the_local_shape(layout: Layout) -> None:
    for axis in MESH.names:
        dim = layout.dim_of(axis)
        assert (
            layout.state(axis) == f"shard({dim})" if dim is not None else layout.state(axis) in ("partial", "replicate", "same")
        )
    for coords in EVERYWHERE:
        assert layout.local_shape(coords) == tuple(len(s) for s in layout.box(coords))
    held = sum(len(x) * len(y) for x, y in (layout.box(c) for c in EVERYWHERE))
    copies = [MESH.extent(a) for a in MESH.names if layout.dim_of(a) is None]
    assert held == 5 * 6 * math.prod(copies)


def test_a_layout_describes_itself_axis_by_axis() -> None:
    layout = Layout((Own.whole(4).refine(MESH, "a"), Own.whole(3)), frozenset("b"), frozenset("c"))
    assert layout.describe(MESH) == "a: shard(0), b: partial, c: replicate"
    assert Layout.same((4, 3)).describe(MESH) == "a: same, b: same, c: same"
    assert layout.stored.describe(MESH) == "a: shard(0), b: same, c: same"
