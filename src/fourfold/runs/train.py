"""The plain training loop: a plan run step by step on a pool of ranks.

Each step has a fresh batch. Of a set of examples, it is the next part of an epoch's order, drawn anew for each epoch; made up,
it looks like the model's own example: normal numbers of its mean and deviation, integers of its range. Every rank draws the
whole batch from the seed and takes its part, so that the data do not depend on the plan; drawing is not counted in the time
of a step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.plans import Plan
from fourfold.plans.spec.plan import check_runnable
from fourfold.runs.compare import first_bad
from fourfold.runs.comparison_run import ComparisonRun, finished, save_data
from fourfold.runs.datasets import SYNTHETIC, dataset
from fourfold.runs.initial_tensors import StateSource
from fourfold.runs.measure import Measured, measure, waiting
from fourfold.runs.parallel import Parallel
from fourfold.runtime.comm.world import at_leave
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import lower_for_precision, set_matrix_mode
from fourfold.runtime.host.devices import own_device
from fourfold.runtime.host.scratch import temporary_paths
from fourfold.runtime.rank_pool import RankPool
from fourfold.timeline import Timeline
from fourfold.workload.workload import Workload

NOW = "now"
"""The name of a run that is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How many of so many held-out examples were classified right."""

    right: int
    examples: int

    @property
    def fraction(self) -> float:
        return self.right / self.examples


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a training run showed: a loss per step and the time of the slowest rank; then, by rank, the peak of memory and,
    where there are stages, the share of a step it waits; and who did what in one step."""

    losses: tuple[float, ...]  # up to the first that is NaN or infinite, unless the run was to go on
    seconds: tuple[float, ...]
    batch: int
    peaks: tuple[int, ...]
    waiting: tuple[float, ...]
    timeline: Timeline
    accuracy: Accuracy | None = None  # after the last step, where the data have examples held out

    @property
    def bad_step(self) -> int | None:
        """The first step, counted from 1, whose loss is NaN or infinite."""
        return first_bad(self.losses)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.step_seconds


def train(
    workload: Workload,
    plan: Plan,
    ranks: RankPool,
    *,
    steps: int,
    precision: str = "fp32",
    optimizer: str = "sgd",
    seed: int = 0,
    data: str = SYNTHETIC,
    allow_nan: bool = False,
    on_step: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
) -> History:
    """Run the steps; `on_step` is called as each ends: its number from 1, its loss, its seconds. A loss that is NaN or infinite
    ends the run, unless that is allowed."""
    device = ranks.devices.kind
    lower_for_precision(workload.graph, plan, precision=precision, device=device)  # refuses what cannot run before ranks begin
    check_runnable(plan)
    losses: list[float] = []
    seconds: list[float] = []
    start(workload, plan, ranks, precision=precision, optimizer=optimizer, seed=seed, data=data)
    for step in range(steps):
        answers = ranks(one_step, step)
        losses.append(answers[0][0])
        seconds.append(max(spent for _, spent in answers))
        on_step(step + 1, losses[-1], seconds[-1])
        if not math.isfinite(losses[-1]) and not allow_nan:
            break
    accuracy = ranks(held_out_accuracy)[0]
    found = ranks(afterwards)
    return History(
        losses=tuple(losses),
        seconds=tuple(seconds),
        batch=plan.batch,
        peaks=tuple(m.peak_bytes for m in found),
        waiting=waiting(found),
        timeline=Timeline.of(part.events for part in found),
        accuracy=accuracy,
    )


def start(
    workload: Workload,
    plan: Plan,
    ranks: RankPool,
    *,
    precision: str = "fp32",
    optimizer: str = "sgd",
    seed: int = 0,
    data: str = SYNTHETIC,
    name: str = NOW,
) -> None:
    """Let the ranks begin to train by a plan; under different names several can take turns."""
    with temporary_paths(1) as (file,):
        examples = dataset(data, workload)
        parts = {"training": examples.training, "held_out": examples.held_out} if examples is not None else {}
        save_data(workload.example, file, parts)
        task = ComparisonRun(
            graph=workload.graph, plan=plan, data=str(file), precision=precision, optimizer=optimizer, device=ranks.devices.kind
        )
        ranks(begin, task, seed, name, _evaluation_graph(workload) if examples is not None else None)


def _evaluation_graph(workload: Workload) -> Graph:
    example = workload.example
    return capture(example.module, example.inputs, example.targets, example.loss, train=False)


class Trainer:
    """One rank's share of a training run: a `Parallel` and the data of its steps."""

    def __init__(self, task: ComparisonRun, seed: int, evaluation: Graph | None = None) -> None:
        data = torch.load(task.data, mmap=True, weights_only=True)
        self.names = (*task.graph.inputs, *task.graph.targets)
        self.batched = [task.graph.batch_dim(name) is not None or task.graph.batch is not None for name in self.names]
        self.example = [t.clone() for t in data["inputs"]]
        self.examples = [t.clone() for t in data["training"]] if "training" in data else None
        self.held_out = [t.clone() for t in data["held_out"]] if "held_out" in data else None
        self.seed = seed
        set_matrix_mode(task.precision)
        self.run = Parallel(
            StateSource(data["state"], evaluation=evaluation),
            task.plan,
            task.graph,
            optimizer=lambda named: optimizer_named(task.optimizer)([tensor for _, tensor in named]),
            device=own_device(task.device),
            precision=task.precision,
            seed=seed,
        )

    def step(self, number: int) -> tuple[float, float]:
        """One step on a fresh batch: the global loss and this rank's seconds."""
        feeds = self.drawn(number)
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        loss = self.run.step(*feeds.values())
        return float(loss), finished(self.run.device) - begun

    def accuracy(self) -> Accuracy | None:
        """How often the largest output is the class of a held-out example, over whole batches of them."""
        if self.held_out is None:
            return None
        size, right = self.example[0].shape[0], 0
        batches = list(zip(*(tensor.split(size) for tensor in self.held_out), strict=True))
        whole = [batch for batch in batches if len(batch[-1]) == size]
        for batch in whole:
            _, (outputs, *_) = self.run.evaluate(*batch)
            right += int((outputs.argmax(-1).cpu() == batch[-1]).sum())
        return Accuracy(right=right, examples=size * len(whole)) if whole else None

    def drawn(self, number: int) -> dict[str, Tensor]:
        """The whole batch of a step."""
        if self.examples is not None:
            return dict(zip(self.names, self._next(number, self.examples), strict=True))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        given = zip(self.names, self.example, self.batched, strict=True)
        return {name: _like(x, generator) if fresh else x for name, x, fresh in given}

    def _next(self, number: int, examples: list[Tensor]) -> list[Tensor]:
        """The part of its epoch's order that a step has; what does not fill a batch is left for another order."""
        size, count = self.example[0].shape[0], examples[0].shape[0]
        epoch, step = divmod(number, count // size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        rows = order[step * size : (step + 1) * size]
        return [tensor[rows] for tensor in examples]

    def holds(self) -> dict[str, int]:
        """Bytes of this rank's parameters, gradients and optimizer state, and its peak, which has activations too."""
        tensors = [tensor for _, tensor in self.run.runner.named_parameters()]
        assert self.run.optimizer is not None
        states = self.run.optimizer.state.values()
        return {
            "parameters": _bytes(tensors),
            "gradients": _bytes([t.grad for t in tensors if t.grad is not None]),
            "optimizer": _bytes([t for state in states for t in state.values() if isinstance(t, Tensor)]),
            "peak": self.afterwards().peak_bytes,
        }

    def afterwards(self) -> Measured:
        """What a few more steps show."""
        return measure(self.run.runner, self.run.optimizer, self.drawn(0))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _like(example: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers with an example's shape, dtype and range."""
    if example.is_floating_point():
        noise = torch.randn(example.shape, generator=generator)
        wide = example.float()
        spread = wide.std() if wide.numel() > 1 else 1.0
        return (noise * spread + wide.mean()).to(example.dtype)
    if example.dtype == torch.bool or not example.numel():
        return example
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, example.shape, generator=generator, dtype=example.dtype)


_running: dict[str, Trainer] = {}  # of this process, by name: a rank gets its task once, then runs it step by step


def begin(task: ComparisonRun, seed: int, name: str = NOW, evaluation: Graph | None = None) -> None:
    """Bind the task to this rank. `evaluation`: the graph in eval mode, for held-out examples."""
    _running.pop(name, None)
    _running[name] = Trainer(task, seed, evaluation)


def forget() -> None:
    """End all tasks."""
    _running.clear()


at_leave(forget)


def one_step(number: int, name: str = NOW) -> tuple[float, float]:
    """One step of the task begun."""
    return _running[name].step(number)


def held_out_accuracy() -> Accuracy | None:
    """Of the task begun, when its steps are over."""
    return _running[NOW].accuracy()


def afterwards() -> Measured:
    """The figures of the task begun, when its steps are over."""
    return _running[NOW].afterwards()


def holding(name: str = NOW) -> dict[str, int]:
    """What this rank holds for the task begun."""
    return _running[name].holds()
