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

from fourfold.plans import Plan, lower_plan
from fourfold.plans.spec.plan import check_runnable
from fourfold.runs.compare import first_bad
from fourfold.runs.comparison_run import ComparisonRun, runner, save_data
from fourfold.runs.datasets import SYNTHETIC, dataset
from fourfold.runs.measure import Measured, measure, waiting
from fourfold.runtime.comm.world import at_leave
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.host.scratch import temporary_paths
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.rank_pool import RankPool
from fourfold.timeline import Timeline
from fourfold.workload.workload import Workload

NOW = "now"
"""The name of a run that is alone."""


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
    told: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
) -> History:
    """Run the steps; `told` hears of each as it ends: its number from 1, its loss, its seconds. A loss that is NaN or infinite
    ends the run, unless that is allowed."""
    lower_plan(workload.graph, plan)  # what cannot run is refused before the ranks begin
    check_runnable(plan)
    losses: list[float] = []
    seconds: list[float] = []
    start(workload, plan, ranks, precision=precision, optimizer=optimizer, seed=seed, data=data)
    for step in range(steps):
        answers = ranks(one_step, step)
        losses.append(answers[0][0])
        seconds.append(max(spent for _, spent in answers))
        told(step + 1, losses[-1], seconds[-1])
        if not math.isfinite(losses[-1]) and not allow_nan:
            break
    found = ranks(afterwards)
    return History(
        losses=tuple(losses),
        seconds=tuple(seconds),
        batch=plan.batch,
        peaks=tuple(m.peak_bytes for m in found),
        waiting=waiting(found),
        timeline=Timeline.of(part.events for part in found),
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
        save_data(workload.example, file, None if examples is None else examples.training)
        task = ComparisonRun(graph=workload.graph, plan=plan, data=str(file), precision=precision, optimizer=optimizer)
        ranks(begin, task, seed, name)


class Trainer:
    """One rank's share of a training run."""

    def __init__(self, task: ComparisonRun, seed: int) -> None:
        data = torch.load(task.data, mmap=True, weights_only=True)
        self.names = (*task.graph.inputs, *task.graph.targets)
        self.batched = [task.graph.batch_dim(name) is not None or task.graph.batch is not None for name in self.names]
        self.example = [t.clone() for t in data["inputs"]]
        self.examples = [t.clone() for t in data["examples"]] if data.get("examples") is not None else None
        self.seed = seed
        self.running = runner(task, data["state"], Randomness(seed=seed))
        parameters = [tensor for _, tensor in self.running.named()]
        self.optimizer = optimizer_named(task.optimizer)(parameters) if parameters else None
        if self.optimizer is not None:
            self.running.follow(self.optimizer)

    def step(self, number: int) -> tuple[float, float]:
        """One step on a fresh batch: the global loss and this rank's seconds."""
        feeds = self.drawn(number)
        self.running.randomness.step = number
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        loss = self.running.forward_backward(feeds).loss
        if self.optimizer is not None:
            self.optimizer.step()
        return float(loss), time.perf_counter() - begun

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
        tensors = [tensor for _, tensor in self.running.named()]
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return {
            "parameters": _bytes(tensors),
            "gradients": _bytes([t.grad for t in tensors if t.grad is not None]),
            "optimizer": _bytes([t for state in states for t in state.values() if isinstance(t, Tensor)]),
            "peak": self.afterwards().peak_bytes,
        }

    def afterwards(self) -> Measured:
        """What a few more steps show."""
        return measure(self.running, self.optimizer, self.drawn(0))


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


def begin(task: ComparisonRun, seed: int, name: str = NOW) -> None:
    """Bind the task to this rank."""
    _running.pop(name, None)
    _running[name] = Trainer(task, seed)


def forget() -> None:
    """End all tasks."""
    _running.clear()


at_leave(forget)


def one_step(number: int, name: str = NOW) -> tuple[float, float]:
    """One step of the task begun."""
    return _running[name].step(number)


def afterwards() -> Measured:
    """The figures of the task begun, when its steps are over."""
    return _running[NOW].afterwards()


def holding(name: str = NOW) -> dict[str, int]:
    """What this rank holds for the task begun."""
    return _running[name].holds()
