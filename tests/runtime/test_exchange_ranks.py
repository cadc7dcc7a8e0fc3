"""Exchanges on real ranks: fast paths, the general path and the definition agree, forward and through autograd."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold.index import IndexSet
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own
from fourfold.runtime.comm import exchange as runtime
from layouts import Array, case, definition, pairing, valid
from ranks import between_hosts, pool, world_of

MESHES = {
    2: [Mesh.of(a=2), Mesh.of(a=1, b=2)],
    3: [Mesh.of(a=3)],
    4: [Mesh.of(a=4), Mesh.of(a=2, b=2), Mesh.of(a=2, b=1, c=2)],
}
Case = tuple[Exchange, list[Array], list[Array]]  # an exchange, a tensor in its source, a gradient in its target's dual


def random_cases(ranks: int, count: int) -> list[Case]:
    out = []
    for seed in range(count):
        rng, numbers = random.Random(1000 * ranks + seed), np.random.default_rng(seed)
        exchange = case(rng, mesh=rng.choice(MESHES[ranks]))
        out.append(_filled(exchange, numbers))
    return out


def named_cases(ranks: int) -> list[Case]:
    """Every pattern, on every dim, alone and beside another axis."""
    out = []
    numbers = np.random.default_rng(0)
    for mesh in MESHES[ranks]:
        axis = next(a for a in mesh.names if mesh.extent(a) > 1)
        others = [a for a in mesh.names if a != axis]
        for dim in range(3):
            shape = (4, 6, 2)
            lengths = [12 if d == dim else size for d, size in enumerate(shape)]
            whole = Layout.same(lengths)
            shard = Layout(tuple(Own.whole(n).refine(mesh, axis) if d == dim else Own.whole(n) for d, n in enumerate(lengths)))
            partial, replicate = Layout(whole.dims, frozenset({axis})), Layout(whole.dims, frozenset(), frozenset({axis}))
            both = shard
            for other in others:
                at = (dim + 1) % 3
                dims = [own.refine(mesh, other) if d == at else own for d, own in enumerate(both.dims)]
                both = Layout(tuple(dims))
            pairs = [(shard, whole), (shard, replicate), (partial, shard), (partial, whole), (partial, replicate),
                     (whole, shard), (whole, replicate), (both, whole), (both, shard)]  # fmt: skip
            out += [_filled(Exchange(mesh, source, target), numbers) for source, target in pairs]
        thin = (Own.whole(6), Own.whole(mesh.extent(axis)))  # what each rank gets lies apart
        divided = Layout((thin[0], thin[1].refine(mesh, axis)))
        out.append(_filled(Exchange(mesh, Layout(thin, frozenset({axis})), divided), numbers))
    return out


def _filled(exchange: Exchange, numbers: np.random.Generator) -> Case:
    x = valid(exchange.mesh, exchange.source, numbers)
    return exchange, x, valid(exchange.mesh, exchange.target.dual, numbers)


def carried_out(cases: list[Case]) -> list[tuple[Any, ...]]:
    """On a rank: each case by its fast path, by the general path only, and its gradient by autograd."""
    out = []
    for exchange, x, gradient in cases:
        world = world_of(exchange.mesh)
        tensor = torch.from_numpy(x[world.rank]).requires_grad_()
        result = runtime.differentiable_mover(exchange, world)(tensor)
        result.backward(torch.from_numpy(gradient[world.rank]))
        assert tensor.grad is not None
        general = tensor.detach()
        for step in exchange.steps:
            axes = exchange.mesh.ordered({*step.axes, *step.source.sharded})
            plain = replace(step, pattern="all_to_all", axes=axes, dim=0)
            general = runtime._step_launcher(plain, world, "")(general)()
        out.append((result.detach().numpy(), general.numpy(), tensor.grad.numpy()))
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["random", "named"])
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "hosts"])
def test_fast_paths_the_general_path_and_the_definition_agree_with_their_adjoints(ranks: int, kind: str, apart: bool) -> None:
    cases = random_cases(ranks, 120) if kind == "random" else named_cases(ranks)
    if apart:
        answers, travelled = zip(*pool(ranks)(between_hosts, carried_out, cases), strict=True)
        assert any(travelled)
    else:
        answers = pool(ranks)(carried_out, cases)
    for number, (exchange, x, gradient) in enumerate(cases):
        results, general, gradients = ([answers[r][number][k] for r in range(ranks)] for k in range(3))
        for expected, got in ((definition(exchange, x), results), (definition(exchange, x), general),
                              (definition(exchange.adjoint, gradient), gradients)):  # fmt: skip
            for a, b in zip(expected, got, strict=True):
                assert a.shape == b.shape, exchange
                np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12, err_msg=str(exchange))
        forward = pairing(exchange.mesh, exchange.target, results, gradient)
        assert forward == pytest.approx(pairing(exchange.mesh, exchange.source, x, gradients), rel=1e-12, abs=1e-10)


def test_the_named_cases_take_every_fast_path() -> None:
    patterns = {step.pattern for exchange, _, _ in named_cases(4) for e in (exchange, exchange.adjoint) for step in e.steps}
    assert patterns == {"local", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def typed(exchange: Exchange, dtype: torch.dtype) -> tuple[Tensor, bool]:
    world = world_of(exchange.mesh)
    whole = torch.arange(30).reshape(5, 6).remainder(7)
    whole = whole > 3 if dtype == torch.bool else whole.to(dtype)
    part = runtime.take(whole, tuple(s.spans for s in exchange.source.box(world.coords)))
    expected = runtime.take(whole, tuple(s.spans for s in exchange.target.box(world.coords)))
    got = runtime.differentiable_mover(exchange, world)(part)
    return got, got.dtype == dtype and bool((got == expected).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.int32, torch.float16, torch.bfloat16])
def test_every_dtype_travels_as_it_is(dtype: torch.dtype) -> None:
    mesh = Mesh.of(a=3)
    rows, columns = Own.whole(5).refine(mesh, "a"), Own.whole(6).refine(mesh, "a")
    divided = [Layout((rows, Own.whole(6))), Layout((Own.whole(5), columns)), Layout.same((5, 6))]
    for source in divided:
        for target in divided:
            exchange = Exchange(mesh, source, target)
            assert [ok for _, ok in pool(3)(typed, exchange, dtype)] == [True] * 3
            assert [ok for (_, ok), _ in pool(3)(between_hosts, typed, exchange, dtype)] == [True] * 3


def several_dims(exchange: Exchange) -> bool:
    world = world_of(exchange.mesh)
    whole = torch.arange(float(np.prod(exchange.source.shape))).reshape(exchange.source.shape)
    part = runtime.take(whole, tuple(s.spans for s in exchange.source.box(world.coords)))
    return torch.equal(runtime.mover(exchange, world)(part),
                       runtime.take(whole, tuple(s.spans for s in exchange.target.box(world.coords))))  # fmt: skip


def test_sets_of_many_spans_and_empty_shards_arrive_in_order() -> None:
    """Beyond a few spans rows are picked by index; a rank that owns nothing still takes part."""
    mesh = Mesh.of(a=3)
    odd, even = (IndexSet.of_indices(80, range(k, 80, 2)) for k in (1, 0))
    combed = Own(("a",), (3,), (odd, IndexSet.of(80, []), even))

    exchange = Exchange(mesh, Layout((combed, Own.whole(3))), Layout.same((80, 3)))
    assert pool(3)(several_dims, exchange) == [True] * 3
    back = Exchange(mesh, exchange.target, exchange.source)
    assert pool(3)(several_dims, back) == [True] * 3
    across = Exchange(mesh, exchange.source, Layout((Own.whole(80), Own.whole(3).refine(mesh, "a"))))
    assert pool(3)(several_dims, across) == [True] * 3
