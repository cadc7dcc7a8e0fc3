"""Small networks whose cuts are awkward, and the judgement of any plan of theirs against the eager module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.graph.capture import capture
from fourfold.models import Example
from fourfold.plans import Mesh, Plan
from fourfold.plans.spec.plan import Stage
from fourfold.runs.reference import Reference
from fourfold.runs.verify import Verdict, verify
from fourfold.runtime.host.devices import PROCESSORS
from fourfold.workload.workload import Workload
from ranks import pool
from small import example, graph_of

BATCH, WIDTH = 7, 6


class Layers(nn.Module):
    """Three linear layers for the others to use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class Fork(Layers):
    """One result is read by two later stages, the input by the first and the last, an integer mask and a comparison cross."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        kept, best = h > -0.5, h.argmax(1, keepdim=True)
        y = torch.tanh(self.b(h))
        return torch.where(kept, self.c(y), x) * best + h


class FrozenFirst(Layers):
    """Nothing is trained in front: no gradient crosses there."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class FrozenMiddle(FrozenFirst):
    """A gradient passes through what is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(True)
        self.b.requires_grad_(False)


class FrozenLast(FrozenMiddle):
    """The loss is made of what is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(True)
        self.c.requires_grad_(False)


class Detached(Layers):
    """A part whose result is used but not differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h) * torch.tanh(self.b(h)).detach()


class Early(Layers):
    """Outputs of several stages, all of them in the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.a(x))
        y = torch.tanh(self.b(h))
        return h, self.c(y), y


class Shared(Layers):
    """One layer used three times: a weight tied over all stages, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.c.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.c, self.b, self.a, self.c, self.a):
            x = torch.tanh(layer(x))
        return x


class Normed(Layers):
    """Batch norms, statistics per micro-batch and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.second(self.b(torch.relu(self.first(self.a(x)))))))


class Dropped(Layers):
    """Masks in every stage."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = F.dropout(torch.tanh(layer(x)), 0.4, training=self.training)
        return x


class Tokens(nn.Module):
    """A tied embedding, results of several parts, a table of positions and a loss that ignores many targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(5, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2) + bias, -1) @ v
        return F.linear(x + self.out(mixed), self.embedding.weight)


def ignoring(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def _weighted() -> Example:
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1), ignore_index=2)
    return Example(FrozenFirst(), (_rows(),), (torch.randint(WIDTH, (BATCH,)),), loss)


def _rows() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def _tokens() -> Example:
    ids, labels = torch.randint(11, (BATCH, 5)), torch.randint(11, (BATCH, 5))
    labels[torch.arange(BATCH)[:, None] * 5 + torch.arange(5) < 17] = -1  # three samples have no target at all
    return Example(Tokens(), (ids, torch.randn(5, 5)), (labels,), ignoring)


NETS: dict[str, Callable[[], Example]] = {
    **{net.__name__: lambda net=net: Example(net(), (_rows(),), (), None)  # type: ignore[misc]
       for net in (Fork, FrozenFirst, FrozenMiddle, FrozenLast, Detached, Early, Shared, Normed, Dropped)},
    "Tokens": _tokens,
    "Weighted": _weighted,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A workload and its one-process runs, for as many plans as there are."""

    workload: Workload
    reference: Reference

    @property
    def paths(self) -> list[str]:
        return [op.path for op in self.workload.graph.ops]

    def plan(self, firsts: Sequence[str], *, places: int, microbatches: int, schedule: str) -> Plan:
        """Stages that begin at these ops, in turn on so many ranks."""
        stages = [Stage(first=first, ranks=(k % places,), mesh=Mesh.of(data=1)) for k, first in enumerate(firsts)]
        return Plan(
            graph=self.workload.graph.hash,
            batch=self.workload.batch,
            mesh=Mesh.of(data=1),
            inputs={"data": "batch"},
            stages=tuple(stages),
            microbatches=microbatches,
            schedule=schedule,
        )

    def verdict(self, plan: Plan) -> Verdict:
        found = verify(self.workload, plan, Alone() if plan.size == 1 else pool(plan.size), reference=self.reference)
        assert found is not None
        return found

    def assert_equal(self, plan: Plan) -> Verdict:
        verdict = self.verdict(plan)
        assert verdict.equal, verdict.worst
        return verdict


class Alone:
    """This process as the only rank."""

    count = 1
    devices = PROCESSORS

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(*args)]


def _judge(example: Example, graph: Any) -> Judge:
    seen = Workload(text="a net", example=example, graph=graph)
    return Judge(workload=seen, reference=Reference(workload=seen, steps=2))


@cache
def net(name: str) -> Judge:
    torch.manual_seed(0)
    net = NETS[name]()
    return _judge(net, capture(net.module, net.inputs, net.targets, net.loss))


@cache
def built_in(name: str) -> Judge:
    return _judge(example(name), graph_of(name))
