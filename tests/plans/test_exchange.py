"""Exchanges against their definition: for every rank by numpy, then on real ranks, forward and adjoint.

**The definition.** A tensor in layout L is one array per rank. Its *meaning* is what the arrays add up to: along Shard and
Partial axes the ranks' parts are added at their places (parts that overlap, as the gradients of halos do, add too), along
Same and Replicate axes one coordinate stands for all. An exchange gives every rank its box of that meaning; along an axis
that stays Partial each coordinate is moved by itself.

**The pairing.** ``<x, g>`` of a tensor in L with a gradient in dual(L) sums the ranks' inner products over all axes but
the Same ones, where one coordinate counts. Shards add up to the whole; of a Partial and a Replicate one is a sum and the
other a copy, so that summing over ranks pairs the copy with the sum; on a Same axis both are copies of one thing. In this
pairing the adjoint of an exchange from A to B is the exchange from dual(B) to dual(A).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fourfold.index import IndexSet
from fourfold.plans.layout.exchange import Exchange, ExchangeStep, transfers
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own
from layouts import Array, assembled, case, definition, pairing, valid, whole_box

laws = settings(max_examples=200, deadline=None)
seeds = st.integers(0, 10**9)


def stepped(step: ExchangeStep, values: list[Array]) -> list[Array]:
    """One step by the boxes `transfers` lists, from the takers' side."""
    mesh = step.mesh
    out = []
    for rank in range(mesh.size):
        result = np.zeros(step.target.local_shape(mesh.coords(rank)))
        for t in transfers(step, rank, incoming=True):
            (given_box,) = [o for o in transfers(step, t.peer, incoming=False) if o.peer == rank]
            assert given_box.box == t.box  # both sides name the same box
            result[whole_box(t.spans)] += values[t.peer][whole_box(given_box.spans)]
        out.append(result)
    return out


def collective(step: ExchangeStep, values: list[Array]) -> list[Array]:
    """One step by the textbook meaning of its named pattern."""
    mesh = step.mesh
    out = []
    for rank in range(mesh.size):
        group = mesh.group(rank, step.axes)
        at = group.index(rank)
        if step.pattern == "all_reduce":
            out.append(sum(values[r] for r in group))
        elif step.pattern == "all_gather":
            out.append(np.concatenate([values[r] for r in group], step.dim))
        else:
            out.append(np.split(sum(values[r] for r in group), len(group), step.dim)[at])
    return out


def run(exchange: Exchange, values: list[Array]) -> list[Array]:
    for step in exchange.steps:
        moved = stepped(step, values)
        if step.pattern in ("all_reduce", "all_gather", "reduce_scatter"):
            assert_equal(collective(step, values), moved)
        values = moved
    return values


def assert_equal(got: list[Array], expected: list[Array]) -> None:
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape, rank
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@laws
@given(seeds)
def test_what_a_step_counts_is_what_its_transfers_list(seed: int) -> None:
    exchange = case(random.Random(seed))
    for step in (*exchange.steps, *exchange.adjoint.steps):
        for rank in range(step.mesh.size):
            listed = [sum(t.numel for t in transfers(step, rank, incoming=way) if t.peer != rank) for way in (True, False)]
            assert step.sent_elements(rank) == listed[1]
            assert step.pattern == "all_reduce" or step.received_elements(rank) == listed[0]


@laws
@given(seeds)
def test_the_steps_of_a_random_exchange_do_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    exchange = case(rng)
    values = valid(exchange.mesh, exchange.source, np.random.default_rng(seed))
    assert_equal(run(exchange, values), definition(exchange, values))


@laws
@given(seeds)
@example(89122)  # the gradient of a halo, partial, cut by one axis more
def test_the_adjoint_of_a_random_exchange_does_what_the_definition_says(seed: int) -> None:
    adjoint = case(random.Random(seed)).adjoint
    values = valid(adjoint.mesh, adjoint.source, np.random.default_rng(seed))
    assert_equal(run(adjoint, values), definition(adjoint, values))


@laws
@given(seeds)
def test_inner_products_agree_across_an_exchange_and_its_adjoint(seed: int) -> None:
    exchange, rng = case(random.Random(seed)), np.random.default_rng(seed)
    x = valid(exchange.mesh, exchange.source, rng)
    y = valid(exchange.mesh, exchange.target.dual, rng)
    forward = pairing(exchange.mesh, exchange.target, run(exchange, x), y)
    backward = pairing(exchange.mesh, exchange.source, x, run(exchange.adjoint, y))
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


@laws
@given(seeds)
def test_the_adjoint_of_the_adjoint_is_the_exchange(seed: int) -> None:
    exchange = case(random.Random(seed))
    assert exchange.adjoint.adjoint == exchange


@laws
@given(seeds)
def test_an_exchange_keeps_the_meaning_of_a_tensor(seed: int) -> None:
    """Where the target divides without overlap and leaves nothing out, nothing is lost or counted twice."""
    rng = random.Random(seed)
    exchange = case(rng, halo=False)
    values = valid(exchange.mesh, exchange.source, np.random.default_rng(seed))
    before = assembled(exchange.mesh, exchange.source, values)
    after = assembled(exchange.mesh, exchange.target, run(exchange, values))
    np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)


@laws
@given(seeds)
def test_a_move_to_where_a_tensor_already_lies_takes_no_step(seed: int) -> None:
    exchange = case(random.Random(seed))
    assert Exchange(exchange.mesh, exchange.source, exchange.source).steps == ()


@laws
@given(seeds)
def test_what_a_rank_receives_is_never_more_than_it_needs_from_each_partial(seed: int) -> None:
    exchange = case(random.Random(seed))
    mesh = exchange.mesh
    for step in exchange.steps:
        for rank in range(mesh.size):
            terms = int(np.prod([mesh.extent(a) for a in step.source.partial - step.target.partial], dtype=int))
            needed = int(np.prod(step.target.local_shape(mesh.coords(rank)), dtype=int))
            assert 0 <= step.received_elements(rank) <= max(2, terms) * needed


# --- the textbook cases -------------------------------------------------------------------------------------------------

TWO = Mesh.of(a=2)
SHAPE = (4, 6)


def state(name: str, mesh: Mesh = TWO, shape: tuple[int, ...] = SHAPE) -> Layout:
    dims = [Own.whole(size) for size in shape]
    if name.startswith("shard"):
        dim = int(name[-1])
        dims[dim] = dims[dim].refine(mesh, "a")
    kinds = {kind: frozenset("a" if name == kind else "") for kind in ("partial", "replicate")}
    return Layout(tuple(dims), kinds["partial"], kinds["replicate"])


TABLE = [
    ("same", "replicate", [], ["all_reduce"]),
    ("same", "shard0", ["local"], ["all_gather"]),
    ("shard0", "same", ["all_gather"], ["local"]),
    ("shard1", "replicate", ["all_gather"], ["reduce_scatter"]),
    ("partial", "same", ["all_reduce"], []),
    ("partial", "replicate", ["all_reduce"], ["all_reduce"]),
    ("partial", "shard1", ["reduce_scatter"], ["all_gather"]),
    ("shard0", "shard1", ["all_to_all"], ["all_to_all"]),
    ("partial", "partial", [], []),
    ("shard0", "shard0", [], []),
]


@pytest.mark.parametrize(("source", "target", "forward", "backward"), TABLE)
def test_each_edge_of_the_table_is_its_named_collective(
    source: str, target: str, forward: list[str], backward: list[str]
) -> None:
    exchange = Exchange(TWO, state(source), state(target))
    assert [s.pattern for s in exchange.steps] == forward
    assert [s.pattern for s in exchange.adjoint.steps] == backward


def test_uneven_shards_take_the_general_path() -> None:
    exchange = Exchange(TWO, state("shard0", shape=(5, 6)), state("same", shape=(5, 6)))
    assert [s.pattern for s in exchange.steps] == ["all_to_all"]


def test_axes_of_one_rank_move_nothing() -> None:
    mesh = Mesh.of(a=1)
    for source, target in itertools.product(("same", "shard0", "shard1", "partial"), ("same", "shard1", "replicate")):
        exchange = Exchange(mesh, state(source, mesh), state(target, mesh))
        assert all(s.received_elements(0) == 0 and s.pattern in ("none", "local") for s in exchange.steps)


def test_a_partial_sum_needed_in_slices_is_sliced_before_it_is_reduced() -> None:
    """Half the rows travel, not all."""
    mesh = Mesh.of(a=2, b=2)
    source = Layout((Own.whole(8), Own.whole(3)), frozenset("a"))
    target = Layout((Own.whole(8).refine(mesh, "b"), Own.whole(3)))
    steps = Exchange(mesh, source, target).steps
    assert [s.pattern for s in steps] == ["local", "all_reduce"]
    assert steps[1].received_elements(0) == 2 * 12 * 1 // 2


def test_a_halo_receives_its_border_rows_and_no_more() -> None:
    mesh = Mesh.of(a=3)
    have = Own.whole(9).refine(mesh, "a")
    want = Own(("a",), (3,), tuple(IndexSet.of(9, [(low - 1, high + 1)]) for low, high in (s.bounds for s in have.sets)))
    (step,) = Exchange(mesh, Layout((have, Own.whole(5))), Layout((want, Own.whole(5)))).steps
    assert [step.received_elements(r) for r in range(3)] == [5, 10, 5]


def test_only_the_axes_that_move_something_join_the_group() -> None:
    """Channels stay divided along one axis while rows are gathered along the other."""
    mesh = Mesh.of(a=2, b=2)
    columns = Own.whole(6).refine(mesh, "b")
    (step,) = Exchange(mesh, Layout((Own.whole(4).refine(mesh, "a"), columns)), Layout((Own.whole(4), columns))).steps
    assert (step.pattern, step.axes, step.dim) == ("all_gather", ("a",), 0)


def test_a_fused_projection_divided_in_blocks_is_gathered_in_its_own_order() -> None:
    """Rank 0 holds the first half of each of three blocks: a plain concatenation would shuffle them."""
    own = Own.whole(12).refine(TWO, "a", outer=3)
    exchange = Exchange(TWO, Layout((own,)), Layout.same((12,)))
    assert [s.pattern for s in exchange.steps] == ["all_to_all"]
    values = [np.array(list(s), dtype=float) for s in own.sets]
    assert_equal(run(exchange, values), [np.arange(12.0)] * 2)
    assert replace(exchange.steps[0], axes=("a",)) == exchange.steps[0]
