"""What a run does is what its lists say: every message (kind, way, group, bytes), every fetch and release of a divided weight
and every update that the ranks write down in a step, in order, against `plans.lists.records`; on ranks that share memory and on
ranks that do not.

`python tests/support/agreement.py` compares all plans and counts; a part of them stands in the suite.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fourfold.graph.capture import capture
from fourfold.plans import Options, Plan, lower_plan, named
from fourfold.plans.lists import paths as paths_module
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.records import Record, records
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.policy import DEFAULT, Policy
from fourfold.runs.comparison_run import ComparisonRun, runner
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.kernels import Randomness
from ranks import close_pools, pool
from small import SMALL, Subject, batch_of, built_in, graph_of, subject


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of a small model. `apart`: whether its ranks may not share memory; `elements`: from how many on messages between
    hosts are point-to-point (None: as in earnest)."""

    model: str
    strategy: str
    ranks: int
    options: str = ""
    apart: bool = False
    elements: int | None = None
    policy: Policy = DEFAULT

    @property
    def name(self) -> str:
        words = (self.model, self.strategy, self.options, f"{self.ranks} ranks", "apart" if self.apart else "")
        return " ".join(word for word in (*words, *(f"{k}={v}" for k, v in self.policy.changes().items())) if word)

    def plan(self) -> Plan:
        words = self.options.replace("--", "").split()
        given: dict[str, Any] = {k: v if k == "schedule" else int(v) for k, v in zip(words[::2], words[1::2], strict=True)}
        graph, batch = graph_named(self.model), batch_named(self.model)
        found = named(self.strategy, graph, ranks=self.ranks, batch=batch, options=Options(**given))
        return replace(found, policy=self.policy)


class Odd(nn.Module):
    """Norms, a softmax, extremes and a loss, each of which must be joined where its dims are divided; a frozen weight used
    twice, one that no gradient reaches, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.sample, self.layer = nn.InstanceNorm2d(8, affine=True), nn.LayerNorm((12, 12))
        self.rms, self.pool = nn.RMSNorm((12, 12)), nn.AdaptiveMaxPool2d(1)
        self.twice, self.aside, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.twice.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.batch(self.conv(x)))
        x = self.rms(self.layer(self.sample(self.group(x))))
        x = x * x.softmax(-2) + x.amax(-1, keepdim=True) + x.std(-2, keepdim=True) + x.logsumexp(-1, keepdim=True)
        x = self.pool(x).flatten(1) * self.scale
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(x) + self.aside(x).detach()[:, :6]


@cache
def odd() -> Subject:
    torch.manual_seed(0)
    model, x, y = Odd(), torch.randn(6, 3, 12, 12), torch.randint(0, 6, (6,))
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)
    graph = capture(model, (x,), (y,), loss)
    return subject(graph, {k: p.detach().clone() for k, p in model.state_dict().items()}, [x, y], 6)


def subject_named(name: str) -> Subject:
    return odd() if name == "odd" else built_in(name)


def graph_named(name: str) -> Any:
    return odd().task.graph if name == "odd" else graph_of(name)


def batch_named(name: str) -> int:
    return 6 if name == "odd" else batch_of(name)


SMALL_MESSAGES = Policy(bucket_bytes=20_000, last_bucket_bytes=2_000, bunch_bytes=20_000, chunk_bytes=4_000)
CASES = (
    *(Case(model=name, strategy="data", ranks=2) for name in (*sorted(SMALL), "odd")),
    *(Case(model=name, strategy="data", ranks=3, options="--zero 3", apart=True) for name in (*sorted(SMALL), "odd")),
    *(Case(model=name, strategy="filter", ranks=2) for name in ("vgg16-cifar", "gpt2", "gnmt", "odd")),
    *(Case(model=name, strategy="channel", ranks=3, apart=True) for name in ("vgg16-cifar", "gpt2", "odd")),
    *(Case(model=name, strategy="spatial", ranks=3) for name in ("unet3d", "cosmoflow", "resnet50", "odd")),
    Case(model="unet3d", strategy="spatial", ranks=3, apart=True, elements=1),
    Case(model="odd", strategy="spatial", ranks=2, options="--zero 3", apart=True),
    Case(model="odd", strategy="filter", ranks=2, options="--zero 3", apart=True),
    Case(model="odd", strategy="data", ranks=2, options="--zero 3 --microbatches 2"),
    Case(model="odd", strategy="data", ranks=3, options="--zero 3 --microbatches 2 --recompute 2", apart=True),
    Case(model="odd", strategy="data", ranks=3, options="--zero 1", apart=True, policy=SMALL_MESSAGES),
    Case(model="resnet50", strategy="data+filter", ranks=4),
    Case(model="resnet50", strategy="data+spatial", ranks=4),
    Case(model="resnet50", strategy="data", ranks=2, options="--recompute 2"),
    Case(model="resnet50", strategy="data", ranks=3, options="--zero 3 --recompute 3", apart=True, policy=SMALL_MESSAGES),
    Case(model="resnet50", strategy="data", ranks=3, apart=True, policy=SMALL_MESSAGES),
    Case(model="vgg16-cifar", strategy="data+filter", ranks=4, options="--zero 3"),
    Case(model="vgg16-cifar", strategy="splitbrain", ranks=4),
    Case(model="vgg16-cifar", strategy="splitbrain", ranks=4, options="--zero 3"),
    Case(model="vgg16-cifar", strategy="splitbrain:k=3", ranks=3, apart=True, elements=1),
    Case(model="vgg16-cifar", strategy="grid", ranks=4),
    Case(model="vgg16-cifar", strategy="data", ranks=2, options="--zero 1"),
    Case(model="vgg16-cifar", strategy="data", ranks=3, options="--zero 1", apart=True),
    Case(model="vgg16-cifar", strategy="data", ranks=2, options="--zero 3"),
    Case(model="vgg16-cifar", strategy="data", ranks=3, options="--zero 3 --microbatches 3", apart=True),
    Case(model="vgg16-cifar", strategy="data", ranks=3, apart=True, policy=SMALL_MESSAGES),
    Case(model="vgg16-cifar", strategy="data", ranks=3, options="--zero 3", apart=True, elements=1, policy=SMALL_MESSAGES),
    Case(model="vgg16-cifar", strategy="fsdp", ranks=4),
    Case(model="vgg16-cifar", strategy="pipeline", ranks=3),
    Case(model="vgg16-cifar", strategy="pipeline", ranks=2, options="--schedule interleaved"),
    Case(model="vgg16-cifar", strategy="data+pipeline", ranks=4, options="--zero 1"),
    Case(model="gpt2", strategy="data", ranks=2, options="--zero 3 --recompute 2"),
    Case(model="gpt2", strategy="data", ranks=3, options="--zero 3 --recompute 2 --microbatches 2", apart=True),
    Case(model="gpt2", strategy="pipeline", ranks=2),
    Case(model="gpt2", strategy="pipeline", ranks=3, options="--schedule gpipe --microbatches 4", apart=True),
    Case(model="gpt2", strategy="data+pipeline", ranks=4, options="--microbatches 2"),
    Case(model="gpt2", strategy="data+pipeline", ranks=4, options="--zero 3 --microbatches 2"),
    Case(model="gpt2", strategy="filter+pipeline", ranks=4, options="--microbatches 2"),
    Case(model="gnmt", strategy="data", ranks=2, options="--zero 3"),
    Case(model="gnmt", strategy="data+pipeline", ranks=4, options="--microbatches 2 --recompute 2"),
    Case(model="unet3d", strategy="spatial", ranks=3, options="--zero 3", apart=True),
    Case(model="unet3d", strategy="spatial+pipeline", ranks=4, options="--microbatches 2"),
    Case(model="cosmoflow", strategy="data+spatial", ranks=4, options="--zero 1"),
    Case(model="cosmoflow", strategy="data", ranks=3, options="--zero 3 --microbatches 2", apart=True, policy=SMALL_MESSAGES),
)
IN_SUITE = tuple(case for k, case in enumerate(CASES) if case.model == "odd" or k % 3 == 1)


def recorded(task: ComparisonRun, elements: int | None) -> tuple[Placement, list[Record]]:
    """On a rank: where it runs, and what it does in its second step."""
    with sending_directly(elements):
        data = torch.load(task.data, mmap=True, weights_only=True)
        running = runner(task, data["state"], Randomness(exact=True))
        feeds = dict(zip((*task.graph.inputs, *task.graph.targets), data["inputs"], strict=True))
        parameters = [tensor for _, tensor in running.named_parameters()] or [torch.zeros(1, requires_grad=True)]
        optimizer = optimizer_named(task.optimizer)(parameters)
        running.gather_after_step(optimizer)
        for step in range(2):
            running.randomness.step = step
            with running.journal.recording() as found:
                running.forward_backward(feeds)
                running.clip_grad_norm(1e9)
                optimizer.step()
    return running.placement, found


@contextmanager
def sending_directly(elements: int | None) -> Iterator[None]:
    with patch.object(paths_module, "DIRECT_ELEMENTS", elements or paths_module.DIRECT_ELEMENTS):
        yield


_APART: dict[int, LocalRanks] = {}


def apart(count: int) -> LocalRanks:
    """LocalRanks that may not share memory; spawned when first used."""
    if count not in _APART:
        with patch.dict(os.environ, FOURFOLD_SOCKETS="1", FOURFOLD_TIMEOUT=os.environ.get("FOURFOLD_TIMEOUT", "60")):
            _APART[count] = LocalRanks(count, timeout=240)
            _APART[count](float, 0)  # started under these settings
    return _APART[count]


def close_apart() -> None:
    for ranks in _APART.values():
        ranks.close()
    _APART.clear()


def run_of(case: Case) -> tuple[LoweredPlan, list[tuple[Placement, list[Record]]]]:
    """A plan lowered, and what each rank did."""
    task = replace(subject_named(case.model).task, plan=case.plan(), result="")
    ranks = apart(case.ranks) if case.apart else pool(case.ranks)
    return lower_plan(task.graph, task.plan), ranks(recorded, task, case.elements)


def disagreement(case: Case) -> str:
    """The first record in which a rank and its list differ, or nothing."""
    made, found = run_of(case)
    for rank, (placement, seen) in enumerate(found):
        assert placement.level(range(case.ranks)) == ("network" if case.apart else "host")
        with sending_directly(case.elements):
            listed = records(made, placement, rank, precision="fp64", clips=True)
        for number, (mine, theirs) in enumerate(zip([*seen, None], [*listed, None], strict=False)):
            if mine != theirs:
                around = "\n".join(map(str, listed[max(number - 3, 0) : number]))
                return f"rank {rank}, record {number}: did {mine}, the list says {theirs}; before it\n{around}"
    return ""


def main() -> None:
    wrong, kinds = 0, Counter[str]()
    for case in CASES:
        _, found = run_of(case)
        kinds.update(record.kind for _, seen in found for record in seen)
        problem = disagreement(case)
        wrong += bool(problem)
        count = sum(len(seen) for _, seen in found)
        print(f"{case.name}: {problem or f'{count} records of {case.ranks} ranks agree'}", flush=True)
    print(f"{len(CASES)} plans, {wrong} disagree; records: {', '.join(f'{n} {k}' for k, n in kinds.most_common())}")
    close_apart()
    close_pools()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
