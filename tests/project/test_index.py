"""Laws of index sets, against plain Python sets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.index import IndexSet

laws = settings(max_examples=150, deadline=None)


@st.composite
def index_sets(draw: st.DrawFn, *, size: int | None = None, most: int = 14) -> IndexSet:
    size = draw(st.integers(0, most)) if size is None else size
    members = draw(st.sets(st.integers(0, size - 1))) if size else set()
    return IndexSet.of_indices(size, members)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[IndexSet, IndexSet]:
    size = draw(st.integers(0, 14))
    return draw(index_sets(size=size)), draw(index_sets(size=size))


spans = st.lists(st.tuples(st.integers(-3, 18), st.integers(-3, 18)), max_size=4)


@laws
@given(st.integers(0, 14), spans)
def test_of_is_the_clipped_union_of_its_spans(size: int, given_spans: list[tuple[int, int]]) -> None:
    members = {i for low, high in given_spans for i in range(low, high) if 0 <= i < size}
    assert list(IndexSet.of(size, given_spans)) == sorted(members)


@laws
@given(index_sets())
def test_spans_are_sorted_disjoint_and_do_not_touch(a: IndexSet) -> None:
    assert all(low < high for low, high in a.spans)
    assert all(first[1] < second[0] for first, second in zip(a.spans, a.spans[1:], strict=False))
    assert len(a) == len(list(a))
    assert a.is_whole == (len(a) == a.size)


@laws
@given(pairs())
def test_and_or_and_inclusion_are_those_of_sets(two: tuple[IndexSet, IndexSet]) -> None:
    a, b = two
    assert set(a & b) == set(a) & set(b)
    assert set(a | b) == set(a) | set(b)
    assert (a <= b) == (set(a) <= set(b))


@laws
@given(pairs())
def test_positions_say_where_a_part_lies_in_its_set(two: tuple[IndexSet, IndexSet]) -> None:
    whole, other = two
    part = whole & other
    members = list(whole)
    assert [members[p] for low, high in whole.positions(part) for p in range(low, high)] == list(part)


@laws
@given(index_sets(), st.integers(-16, 16), st.integers(0, 20))
def test_shifting_moves_every_member_and_clips(a: IndexSet, offset: int, size: int) -> None:
    assert list(a.shift(offset, size)) == [i + offset for i in a if 0 <= i + offset < size]


@laws
@given(index_sets(), st.integers(1, 5))
def test_parts_cover_the_set_are_disjoint_ordered_and_balanced(a: IndexSet, count: int) -> None:
    parts = a.parts(count)
    assert [i for part in parts for i in part] == list(a)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the first part is empty only if the set is


@laws
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_every_block_is_cut_alike_and_at_whole_units(outer: int, units: int, unit: int, count: int) -> None:
    block = units * unit
    whole = IndexSet.whole(outer * block)
    parts = whole.parts(count, outer=outer, unit=unit)
    assert sorted(i for part in parts for i in part) == list(whole)
    for part in parts:
        inside = [[i % block for i in part if i // block == j] for j in range(outer)]
        assert all(rows == inside[0] for rows in inside)
        assert all(low % unit == 0 and high % unit == 0 for low, high in part.spans)
    held = [len(part) // outer // unit for part in parts]
    assert max(held) - min(held) <= 1


def test_blocks_that_do_not_fit_are_cut_evenly_instead() -> None:
    assert [len(p) for p in IndexSet.whole(7).parts(2, outer=3, unit=2)] == [4, 3]


@laws
@given(index_sets(most=5), index_sets(most=5))
def test_product_holds_every_pair_of_members(a: IndexSet, b: IndexSet) -> None:
    merged = a.product(b)
    assert merged.size == a.size * b.size
    assert list(merged) == [i * b.size + j for i in a for j in b]


@laws
@given(index_sets(most=4), index_sets(most=4), index_sets(most=4))
def test_factors_undo_a_product(a: IndexSet, b: IndexSet, c: IndexSet) -> None:
    if not (len(a) and len(b) and len(c)):
        return
    assert a.product(b).product(c).factors((a.size, b.size, c.size)) == (a, b, c)


@laws
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_factors_are_found_exactly_if_the_set_is_a_product(n: int, m: int, data: st.DataObject) -> None:
    a = data.draw(index_sets(size=n * m))
    members = set(a)
    rows, columns = {i // m for i in members}, {i % m for i in members}
    is_product = members == {i * m + j for i in rows for j in columns}
    found = a.factors((n, m))
    assert (found is not None) == is_product
    if found is not None:
        assert found[0].product(found[1]) == a


def test_bounds_of_a_scattered_set_are_an_error_of_ours() -> None:
    assert IndexSet.of(9, []).bounds == (0, 0)
    assert IndexSet.of(9, [(2, 5)]).bounds == (2, 5)
    try:
        _ = IndexSet.of(9, [(0, 1), (3, 4)]).bounds
    except ValueError as error:
        assert "not contiguous" in str(error)
    else:
        raise AssertionError("a scattered set has no bounds")
