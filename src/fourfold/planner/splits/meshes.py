"""The meshes a number of devices can form, and which splits are tried on each of their axes.

The last axis joins neighbours, the first reaches furthest: ranks are numbered node by node. On the last every split is tried,
on those before it the batch and, if examples are fewer than devices, the domain, which need least from slow links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.plans.layout.mesh import Mesh, divisors

EVERY = ("batch", "filter", "channel", "domain:0", "replicate")
FAR = ("batch", "domain:0")
WIDEST = 64  # of an axis on which weights are split; where devices are many more, two nodes
DATA, MODEL, SPACE = "data", "model", "space"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A mesh and the splits to try on its axes."""

    mesh: Mesh
    splits: dict[str, tuple[str, ...]]


def grids(devices: int, batch: int, *, node_size: int, domains: int) -> Iterator[Grid]:
    """All grids of so many devices, `node_size` of which make a node; `domains`: dims of the domain the inputs have."""
    widest = WIDEST if devices <= WIDEST or batch < devices else min(WIDEST, max(2 * node_size, 2))
    far = FAR if batch < devices else ("batch",)
    for inner in divisors(devices):
        outer = devices // inner
        if outer == 1 and (inner <= WIDEST or batch < devices):
            yield Grid(mesh=Mesh.of(model=inner), splits={MODEL: EVERY})
        elif outer > 1 and 1 < inner <= widest:
            yield Grid(mesh=Mesh.of(data=outer, model=inner), splits={DATA: far, MODEL: EVERY})
    if domains > 1 and batch < devices:
        yield from _volumes(devices, batch)


def _volumes(devices: int, batch: int) -> Iterator[Grid]:
    """Where examples are fewer than devices: two dims of the domain, examples outside."""
    for outer in (d for d in divisors(devices) if d <= batch and devices // d > 3):
        rest = devices // outer
        first = min((d for d in divisors(rest) if d > 1), key=lambda d: (abs(d - rest / d), d))
        if first == rest:
            continue
        mesh = Mesh.of(data=outer, space=first, model=rest // first)
        yield Grid(mesh=mesh, splits={DATA: ("batch",), SPACE: ("domain:0",), MODEL: ("domain:1", "filter", "replicate")})
