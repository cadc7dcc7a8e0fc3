"""Networks and clusters drawn at random: what the planner finds runs, with one device's numbers and the memory foretold."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.cluster import Cluster, cluster_named, local
from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.prices.prices import Prices
from fourfold.planner import Ranking, SearchTask, search
from fourfold.planner.explain import with_scaled_links, with_scaled_memory
from fourfold.plans import Plan
from ranks import pool
from small import Subject, assert_equal, observed, subject

PRESETS = ("ethernet-1g", "ethernet-10g", "ethernet-25g-gpu", "abci", "dgx-h100", "cori-knl")
UNDER = 0.03


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    """Two ways from one tensor, joined along a dim."""

    def __init__(self, one: nn.Module, other: nn.Module, dim: int) -> None:
        super().__init__()
        self.one, self.other, self.dim = one, other, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.other(x)), self.dim)


def pictures(rng: random.Random, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Convolutions with skips and branches over images or volumes, then a classifier."""
    flat = rng.random() < 0.7
    conv, pooling = (nn.Conv2d, nn.MaxPool2d) if flat else (nn.Conv3d, nn.MaxPool3d)
    channels, size = rng.randint(1, 3), [rng.randint(6, 11) for _ in range(2 if flat else 3)]
    x = torch.randn(batch, channels, *size)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(2, 4)):
        kind, width = rng.choice(["plain", "residual", "branches", "norm", "pool"]), rng.randint(2, 6)
        if kind == "residual":
            inner = nn.Sequential(conv(channels, width, 3, padding=1), nn.GELU(), conv(width, channels, 1))
            layers.append(Residual(inner))
            continue
        if kind == "branches":
            layers.append(Branches(conv(channels, width, 1), conv(channels, width, 3, padding=1), 1))
            channels = 2 * width
            continue
        layers += [conv(channels, width, 3, padding=1, bias=rng.random() < 0.5), nn.ReLU()]
        channels = width
        if kind == "norm":
            layers.append(nn.GroupNorm(1, channels))
        if kind == "pool" and min(size) >= 6:
            layers.append(pooling(2))
            size = [n // 2 for n in size]
    hidden = rng.randint(5, 40)
    head = nn.Sequential(nn.Flatten(), nn.Linear(channels * math.prod(size), hidden), nn.Tanh(), nn.Linear(hidden, 5))
    return nn.Sequential(*layers, head), x, torch.randint(0, 5, (batch,))


class Words(nn.Module):
    """A table, a few mixing blocks, a classifier of the mean."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        heads = rng.randint(1, 4)
        width, self.heads = heads * rng.randint(2, 4), heads
        self.table = nn.Embedding(13, width)
        inner = rng.randint(4, 24)
        blocks: list[nn.Module] = []
        for _ in range(rng.randint(1, 3)):
            feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            joined = Branches(nn.Linear(width, 1), nn.Linear(width, width - 1), 2)
            blocks.append(Residual(feed) if rng.random() < 0.7 else joined)
        self.blocks = nn.Sequential(*blocks)
        self.mixes = nn.Linear(width, 3 * width) if rng.random() < 0.6 else None
        self.out = nn.Linear(width, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.table(ids))
        if self.mixes is not None:
            q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.mixes(x).chunk(3, 2))
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(x.mean(1))


def words(rng: random.Random, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    return Words(rng), torch.randint(0, 13, (batch, rng.randint(3, 9))), torch.randint(0, 7, (batch,))


def cluster(rng: random.Random) -> Cluster:
    """Two to four devices of some kind, with links and memories of any size."""
    found = cluster_named(rng.choice(PRESETS), devices=rng.randint(2, 4))
    return with_scaled_memory(with_scaled_links(found, 10 ** rng.uniform(-2, 2)), 10 ** rng.uniform(-6, 0))


def drawn(seed: int) -> tuple[Graph, Subject, int, random.Random]:
    """A network with what one process makes of it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = rng.randint(2, 7)
    module, x, target = rng.choice([pictures, pictures, words])(rng, batch)
    graph = capture(module, (x,), (target,), F.cross_entropy)
    start = {key: tensor.detach().clone() for key, tensor in module.named_parameters()}
    return graph, subject(graph, start, [x, target], batch), batch, rng


def searched(graph: Graph, batch: int, where: Cluster) -> Ranking:
    return search(SearchTask(graph=graph, batch=batch, setting=Setting(prices=Prices(cluster=where), optimizer="momentum")))


def printed(found: Ranking) -> list[Plan]:
    """What a user would be shown first: the best, and the best that the planner made itself."""
    own = [c.plan for c in found.candidates if c.plan.strategy == "auto"]
    return [*([found.best.plan] if found.best is not None else []), *own[:1]]


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(100, 220), marks=pytest.mark.slow)])
def test_what_is_found_for_any_network_and_cluster_gives_the_numbers_of_one_device(seeds: range) -> None:
    ran = 0
    for seed in seeds:
        graph, one, batch, rng = drawn(seed)
        where = cluster(rng)
        for plan in printed(searched(graph, batch, where)):
            try:
                assert_equal(one.errors(plan))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {plan.strategy} on {plan.mesh}, {len(plan.stages)} stages") from error
            ran += 1
    assert ran >= len(seeds)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(300, 340), marks=pytest.mark.slow)])
def test_no_plan_needs_more_memory_than_foretold(seeds: range) -> None:
    """Of the fullest rank, by which a plan fits or does not."""
    for seed in seeds:
        graph, one, batch, rng = drawn(seed)
        best = searched(graph, batch, local(rng.randint(2, 4))).best
        assert best is not None
        task = replace(one.task, plan=best.plan, precision="fp32", optimizer="momentum")
        fullest = max(real for (real,) in pool(best.plan.size)(observed, task))
        told = f"seed {seed}, {best.plan.strategy} on {best.plan.mesh}, {len(best.plan.stages)} stages"
        assert fullest <= best.peak_bytes * (1 + UNDER), told
