"""Plans drawn at random: any split on any axis for any op, uneven everywhere, equals one device or is refused."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.errors import Infeasible
from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.ops.nest import nest_of
from fourfold.plans import Mesh, Plan, lower
from fourfold.runs.compare import worst_error
from ranks import Job, Outcome, run_jobs

BATCH = 3


class Pictures(nn.Module):
    """Convolutions of every kind, norms, pooling, a skip joined by concatenation, a residual, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3)
        self.group_norm = nn.GroupNorm(2, 6)
        self.down = nn.Conv2d(6, 5, 2, stride=2, bias=False)
        self.up = nn.ConvTranspose2d(5, 4, 2, stride=2)
        self.join = nn.Conv2d(10, 4, 1)
        self.head = nn.Linear(4 * 3 * 2, 7)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = x + F.gelu(self.group_norm(self.grouped(x)))
        y = self.up(F.silu(self.down(x)))
        x = F.max_pool2d(self.join(torch.cat((x, y), 1)), 3, 2, 1)
        x = F.interpolate(F.adaptive_avg_pool2d(x, (2, 3)), size=(3, 2), mode="bilinear")
        return self.last(torch.tanh(self.head(x.flatten(1))))


class Tokens(nn.Module):
    """Tied embeddings, a fused projection, causal attention, a gated product, layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.places = nn.Parameter(torch.randn(9, 12))
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.gate, self.back = nn.Linear(12, 20), nn.Linear(10, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places[: ids.shape[1]]
        q, k, v = (p.unflatten(2, (3, 4)).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        a, b = self.gate(self.norm2(x)).chunk(2, -1)
        x = x + self.back(a * b.sigmoid())
        return F.linear(x, self.table.weight).flatten(0, 1)


def example(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if kind == "pictures":
        return Pictures().double(), torch.randn(BATCH, 2, 8, 6, dtype=torch.float64), torch.randint(0, 5, (BATCH,))
    return Tokens().double(), torch.randint(0, 11, (BATCH, 7)), torch.randint(0, 11, (BATCH * 7,))


@cache
def reference(kind: str) -> tuple[Graph, dict[str, Tensor], list[Tensor], Outcome]:
    module, x, target = example(kind)
    state = {k: v.detach().clone() for k, v in module.state_dict().items()}
    graph = capture(module, (x,), (target,), F.cross_entropy)
    outputs = module(x)
    F.cross_entropy(outputs, target).backward()
    gradients = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    buffers = {k: v.detach().clone() for k, v in module.named_buffers()}
    return graph, state, [x, target], Outcome(name=kind, outputs={"y": outputs.detach()}, gradients=gradients, state=buffers)


MESHES = {3: [Mesh.of(a=3)], 4: [Mesh.of(a=4), Mesh.of(a=2, b=2), Mesh.of(a=2, b=1, c=2)]}


def drawn(graph: Graph, rng: random.Random, mesh: Mesh) -> Plan | None:
    """A plan that says something about most anchors; None where it is refused."""
    concrete = graph.at(BATCH)
    inputs = {axis: rng.choice(["batch", "domain:0", "domain:1"]) for axis in mesh.names if rng.random() < 0.7}
    splits = []
    for op in concrete.ops:
        nest = nest_of(op, concrete)
        if not nest.anchor:
            continue
        offered = sorted({label for loop in nest.loops if loop.kind != "whole" for label in loop.labels})
        by_axis = {axis: rng.choice([*offered, "replicate"]) for axis in mesh.names if rng.random() < 0.6}
        if by_axis:
            splits.append((op.path, by_axis))
    plan = Plan(graph=graph.hash, batch=BATCH, mesh=mesh, inputs=inputs, splits=tuple(splits))
    try:
        lower(graph, plan)
    except Infeasible:
        return None
    return plan


def jobs(kind: str, ranks: int, seeds: range) -> list[Job]:
    graph, state, inputs, _ = reference(kind)
    plans = {seed: drawn(graph, rng, rng.choice(MESHES[ranks])) for seed, rng in ((s, random.Random(s)) for s in seeds)}
    return [Job(name=str(s), graph=graph, plan=p, state=state, inputs=inputs) for s, p in plans.items() if p is not None]


def described(plan: Plan) -> str:
    return f"mesh {plan.mesh}, inputs {dict(plan.inputs)}, splits {[(p, dict(b)) for p, b in plan.splits]}"


@pytest.mark.parametrize(("ranks", "seeds"), [(3, range(25)), (4, range(100, 150))])
@pytest.mark.parametrize("kind", ["pictures", "tokens"])
def test_random_plans_give_the_numbers_of_one_device(kind: str, ranks: int, seeds: range) -> None:
    *_, expected = reference(kind)
    todo = jobs(kind, ranks, seeds)
    assert len(todo) >= len(seeds) // 3  # most can be run
    outcomes = run_jobs(todo, ranks)
    wrong = {}
    for job in todo:
        got = outcomes[job.name]
        outputs = dict(zip("y", got.outputs.values(), strict=False))
        errors = [(worst_error(a, b)) for a, b in ((outputs, expected.outputs), (got.gradients, expected.gradients),
                                                   (got.state, expected.state))]  # fmt: skip
        if got.error or any(e.error > 1e-9 for e in errors):
            wrong[job.name] = (described(job.plan), got.error[-600:] or [(e.tensor, e.error) for e in errors])
    assert not wrong, f"{len(wrong)} of {len(todo)}: {next(iter(wrong.items()))}"
