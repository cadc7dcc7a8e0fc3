"""Random layouts and exchanges, and what they mean on whole arrays: the numpy half of the exchange tests.

`test_exchange.py` states the definition and the pairing used here.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.index import IndexSet
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own

Array = NDArray[Any]


def case(rng: random.Random, *, mesh: Mesh | None = None, halo: bool = True) -> Exchange:
    """A random exchange as lowering makes them: from a produced layout to one that an op asks for."""
    mesh = mesh or Mesh(tuple((name, rng.randint(1, 3)) for name in "abc"[: rng.randint(1, 3)]))
    shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
    given = {axis: rng.choice([*range(len(shape)), "partial", "same"]) for axis in mesh.names}
    asked: dict[str, Any] = {}
    for axis, kind in given.items():
        choices: list[Any] = [*range(len(shape)), "same", "replicate"]
        asked[axis] = rng.choice([*choices, "partial"] if kind == "partial" else [*choices, kind])
    source, target = (_layout(rng, mesh, shape, states) for states in (given, asked))
    if halo and rng.random() < 0.5:
        target = Layout(tuple(_windowed(rng, own) for own in target.dims), target.partial, target.replicate)
    return Exchange(mesh, source, target)


def laid(rng: random.Random, mesh: Mesh, shape: list[int]) -> Layout:
    """A random layout of a produced tensor without partial sums: every index once, along some axes repeated."""
    return _layout(rng, mesh, shape, {axis: rng.choice([*range(len(shape)), "same"]) for axis in mesh.names})


def _layout(rng: random.Random, mesh: Mesh, shape: list[int], states: dict[str, Any]) -> Layout:
    dims = []
    for d, size in enumerate(shape):
        axes = [axis for axis, state in states.items() if state == d]
        rng.shuffle(axes)
        own = Own.whole(size)
        for axis in axes:
            own = own.refine(mesh, axis, outer=rng.choice([1, 1, 2, 3]), unit=rng.choice([1, 1, 2]))
        dims.append(_uneven(rng, own) if axes and rng.random() < 0.3 else own)
    chosen = {kind: frozenset(a for a, s in states.items() if s == kind) for kind in ("partial", "replicate")}
    return Layout(tuple(dims), chosen["partial"], chosen["replicate"])


def _uneven(rng: random.Random, own: Own) -> Own:
    """Any other division among the same ranks: thin, empty and scattered shards."""
    owners = [rng.randrange(len(own.sets)) for _ in range(own.size)]
    if rng.random() < 0.5:
        owners.sort()
    sets = [IndexSet.of_indices(own.size, (i for i, o in enumerate(owners) if o == k)) for k in range(len(own.sets))]
    return Own(own.axes, own.extents, tuple(sets))


def _windowed(rng: random.Random, own: Own) -> Own:
    """Sets widened as a halo does, or narrowed as a strided window does."""
    if not own.axes:
        return own
    before, after = rng.randint(-1, 3), rng.randint(-1, 3)
    sets = tuple(IndexSet.of(own.size, ((low - before, high + after) for low, high in s.spans)) for s in own.sets)
    return Own(own.axes, own.extents, sets)


def whole_box(spans: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[Array, ...]:
    """An open grid that picks the members of the spans along every dim."""
    return np.ix_(*(np.concatenate([np.arange(low, high) for low, high in pieces]) for pieces in spans))


def box_of(layout: Layout, coords: dict[str, int]) -> tuple[Array, ...]:
    return np.ix_(*(np.fromiter(s, dtype=int) for s in layout.box(coords)))


def valid(mesh: Mesh, layout: Layout, rng: np.random.Generator) -> list[Array]:
    """Random local arrays that a tensor in this layout may have: copies along Same and Replicate axes."""
    free = layout.sharded | layout.partial
    by_key: dict[tuple[int, ...], Array] = {}
    out = []
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        key = tuple(coords[a] for a in mesh.names if a in free)
        if key not in by_key:
            by_key[key] = rng.integers(-9, 10, layout.local_shape(coords)) + rng.random(layout.local_shape(coords))
        out.append(by_key[key])
    return out


def assembled(mesh: Mesh, layout: Layout, values: list[Array], *, kept: dict[str, int] | None = None) -> Array:
    """What the ranks' arrays add up to; along `kept` axes one coordinate alone."""
    total = np.zeros(layout.shape)
    counted = layout.sharded | layout.partial
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        if kept and any(coords[a] != at for a, at in kept.items()):
            continue
        if all(coords[a] == 0 for a in mesh.names if a not in counted and a not in (kept or {})):
            total[box_of(layout, coords)] += values[rank]
    return total


def definition(exchange: Exchange, values: list[Array]) -> list[Array]:
    """Every rank's box of the meaning; along axes that stay partial, of its own coordinate's share of it."""
    mesh, source, target = exchange.mesh, exchange.source, exchange.target
    passing = source.partial & target.partial
    out = []
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        whole = assembled(mesh, source, values, kept={a: coords[a] for a in passing})
        out.append(whole[box_of(target, coords)])
    return out


def pairing(mesh: Mesh, layout: Layout, x: list[Array], gradient: list[Array]) -> float:
    """The inner product of a tensor in a layout with a gradient in its dual: Same axes count once, all others add up."""
    same = [a for a in mesh.names if layout.state(a) == "same"]
    ranks = [r for r in range(mesh.size) if all(mesh.coords(r)[a] == 0 for a in same)]
    return float(sum((x[r] * gradient[r]).sum() for r in ranks))
