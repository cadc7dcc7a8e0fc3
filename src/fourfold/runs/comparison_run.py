"""A short training run on some ranks that returns everything `verify` and the tests compare."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.graph import Graph
from fourfold.models import Example
from fourfold.plans import Plan
from fourfold.plans.layout.layout import Layout
from fourfold.runs.initial_tensors import StateSource
from fourfold.runs.measure import measure
from fourfold.runtime.comm.exchange import is_inexact
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution.executor import LoadPart
from fourfold.runtime.execution.gather_full import whole_gradients, whole_outputs, whole_state
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import PRECISIONS, lower_for_precision, set_matrix_mode
from fourfold.runtime.execution.runner import Runner
from fourfold.runtime.host.devices import own_device
from fourfold.runtime.host.scratch import explain_write_errors
from fourfold.runtime.kernels import Randomness
from fourfold.workload.workload import stored_tensors


@dataclass(kw_only=True)
class RunResult:
    """The results of a run. Gradients and outputs of the first step; state after the last."""

    losses: list[float] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    first_state: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ComparisonRun:
    """One trial to run, as plain data: graph, plan, the initial state and the whole inputs in a file."""

    graph: Graph
    plan: Plan
    data: str  # torch.save of {"state": {...}, "inputs": [...]}
    precision: str = "fp64"
    optimizer: str = "sgd"
    device: str = "cpu"  # the kind of this rank's device
    steps: int = 3
    result: str = ""  # where rank 0 writes the RunResult
    measured: bool = False  # whether a few more steps shall show memory and waiting


def save_data(example: Example, path: Path, examples: Mapping[str, list[Tensor]] | None = None) -> dict[str, Tensor]:
    """Write the initial state, the whole inputs and, where there are, sets of examples by their names for the ranks to read;
    the state is also the answer."""
    state = {key: tensor.detach().to("cpu", copy=True) for key, tensor in stored_tensors(example).items()}
    with explain_write_errors("the model's state and data"):
        torch.save({"state": state, "inputs": [t.detach().cpu() for t in example.tensors], **(examples or {})}, path)
    return state


def runner(task: ComparisonRun, state: Mapping[str, Tensor], randomness: Randomness) -> Runner:
    """This rank's share of a task, with the whole state at hand."""
    dtypes, device = PRECISIONS[task.precision], own_device(task.device)
    source = StateSource(state)

    def load(world: World) -> LoadPart:
        whole = source.loader(world)

        def part(key: str, layout: Layout) -> Tensor:
            tensor = whole(key, layout)
            return tensor.to(dtypes.get(str(tensor.dtype).removeprefix("torch."), tensor.dtype))

        return part

    lowered = lower_for_precision(task.graph, task.plan, precision=task.precision, device=task.device)
    return Runner(lowered, load, device=device, precision=task.precision, randomness=randomness)


def execute_run(task: ComparisonRun) -> dict[str, Any]:
    """Run a task on this rank; rank 0 writes the result. The answer holds small facts only."""
    set_matrix_mode(task.precision)  # here, not in `run_steps`, which also runs in a user's own process
    data = torch.load(task.data, mmap=True, weights_only=True)
    trial = run_steps(task, data["state"], data["inputs"])
    if task.result and (not dist.is_initialized() or dist.get_rank() == 0):
        with explain_write_errors("what the ranks computed"):
            save_result(trial, task.result)
    return {"hash": task.graph.hash, "losses": trial.losses, **trial.facts}


def save_result(trial: RunResult, path: str) -> None:
    """Write what can be compared, as plain lists and dicts of tensors; the facts travel by themselves."""
    torch.save({part.name: getattr(trial, part.name) for part in fields(trial) if part.name != "facts"}, path)


def load_result(path: str) -> RunResult:
    return RunResult(**torch.load(path, weights_only=True))


def run_steps(
    task: ComparisonRun, state: Mapping[str, Tensor], inputs: list[Tensor], *, later: Sequence[list[Tensor]] = ()
) -> RunResult:
    """The steps of a task, all with the same inputs unless those of later ones are given."""
    running = runner(task, state, Randomness(exact=True))
    names = (*task.graph.inputs, *task.graph.targets)
    data = [dict(zip(names, tensors, strict=True)) for tensors in (inputs, *later)]
    feeds = data[0]
    parameters = [tensor for _, tensor in running.named_parameters()]
    optimizer = optimizer_named(task.optimizer)(parameters) if parameters else None
    if optimizer is not None:
        running.gather_after_step(optimizer)
    trial = RunResult(facts={"seconds": []})
    for step in range(task.steps):
        running.randomness.step = step
        begun = time.perf_counter()
        outcome = running.forward_backward(data[step] if later else feeds, outputs=step == 0)
        spent = finished(running.device) - begun
        trial.losses.append(float(outcome.loss))
        if step == 0:
            trial.outputs = {n: t for n, t in whole_outputs(running, outcome).items() if is_inexact(t)}
            trial.gradients = whole_gradients(running)
        begun = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        trial.facts["seconds"].append(spent + finished(running.device) - begun)
        if step == 0:
            trial.first_state = whole_state(running)
    trial.state = whole_state(running)
    if task.measured:
        trial.facts["measured"] = measure(running, optimizer, feeds)
    return trial


def finished(device: torch.device) -> float:
    """The time when all that a device was given to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
