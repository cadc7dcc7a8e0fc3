"""A short training run on given ranks, with everything that can be compared kept: the common half of `verify` and of the
tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import InvalidInput, nearest
from fourfold.graph import Graph
from fourfold.plans import Mesh, Plan, Program, lower
from fourfold.plans.layout import Layout
from fourfold.runtime.execute import Executor
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.materialise import cut
from fourfold.runtime.world import World

PRECISIONS: dict[str, dict[str, torch.dtype]] = {"fp32": {}, "fp64": {"float32": torch.float64}}

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.01),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.01, momentum=0.9),
    "adamw": lambda tensors: torch.optim.AdamW(tensors, lr=3e-4),
}


def optimizer_named(name: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    if name not in OPTIMIZERS:
        raise InvalidInput(f"unknown optimizer '{name}'{nearest(name, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


@dataclass(kw_only=True)
class Trial:
    """What a run showed. Gradients and outputs of the first step; state after the last."""

    losses: list[float] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    first_state: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One trial to run, as plain data: graph, plan, the initial state and the whole inputs in a file."""

    graph: Graph
    plan: Plan
    data: str  # torch.save of {"state": {...}, "inputs": [...]}
    precision: str = "fp64"
    optimizer: str = "sgd"
    steps: int = 3
    result: str = ""  # where rank 0 puts the Trial


_worlds: dict[Mesh, World] = {}  # of this process: every process group costs threads, so tasks on one mesh share theirs


def joined_world(program: Program) -> World:
    """The world of a program's mesh, with a group for each exchange; all ranks must run the same programs in one order."""
    world = _worlds.get(program.mesh) or World.join(program.mesh)
    for axes in sorted(program.groups()):
        world.group(axes)
    return _worlds.setdefault(program.mesh, world)


def run_task(task: Task) -> dict[str, Any]:
    """Run a task on this rank; rank 0 writes the result. The answer holds small facts only."""
    data = torch.load(task.data, mmap=True)
    program = lower(task.graph, task.plan)
    world = joined_world(program)
    trial = run_trial(task, program, world, data["state"], data["inputs"])
    if world.rank == 0 and task.result:
        torch.save(trial, task.result)
    return {"hash": task.graph.hash, "losses": trial.losses, **trial.facts}


def run_trial(task: Task, program: Any, world: World, state: Mapping[str, Tensor], inputs: list[Tensor]) -> Trial:
    dtypes = PRECISIONS[task.precision]

    def load(key: str, layout: Layout) -> Tensor:
        full = state[key]
        dtype = dtypes.get(str(full.dtype).removeprefix("torch."), full.dtype)
        return cut(full, layout, world).to(dtype).clone()

    executor = Executor(program, world, load, dtypes=dtypes, randomness=Randomness(exact=True))
    names = (*task.graph.inputs, *task.graph.targets)
    feeds = {name: executor.cut(name, tensor) for name, tensor in zip(names, inputs, strict=True)}
    parameters = [t for t in executor.state.values() if t.requires_grad]
    optimizer = optimizer_named(task.optimizer)(parameters) if parameters else None
    trial = Trial(facts={"seconds": []})
    for step in range(task.steps):
        executor.randomness.step = step
        begun = time.perf_counter()
        loss, out = executor.forward_backward(feeds)
        spent = time.perf_counter() - begun
        trial.losses.append(float(loss))
        if step == 0:
            layouts = program.layouts
            trial.outputs = {n: executor.whole(layouts[n], out[n]) for n in program.outputs if out[n].is_floating_point()}
            trial.gradients = {
                executor.keys[n]: executor.whole(program.stored[n], t.grad).clone()
                for n, t in executor.state.items()
                if t.grad is not None
            }
        begun = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        trial.facts["seconds"].append(spent + time.perf_counter() - begun)
        if step == 0:
            trial.first_state = whole_state(executor)
    trial.state = whole_state(executor)
    return trial


def whole_state(executor: Executor) -> dict[str, Tensor]:
    """Parameters and buffers as one device would hold them."""
    stored = executor.program.stored
    return {executor.keys[n]: executor.whole(stored[n], t).clone() for n, t in executor.state.items()}
