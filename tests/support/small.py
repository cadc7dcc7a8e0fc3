"""Small built-in models, captured once per session, and trials of plans against one rank."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.models import MODELS, Example
from fourfold.plans import Plan, Program, lower, named
from fourfold.runs.compare import worst_error
from fourfold.runs.comparison_run import ComparisonRun, RunResult, execute_run, load_result
from fourfold.runs.train import Trainer
from fourfold.runtime.host.launch import LocalRanks
from ranks import pool

torch.set_num_threads(1)  # as the ranks have; on busy cores small kernels only wait for more

SMALL: dict[str, dict[str, Any]] = {
    "vgg16-cifar": {"batch": 8, "width": 64, "channels": 8},
    "resnet50": {"batch": 4, "image": 64, "width": 16, "classes": 10},
    "unet3d": {"batch": 4, "size": 16, "width": 4},
    "cosmoflow": {"batch": 4, "size": 32, "width": 8},
    "gnmt": {"batch": 4, "width": 32, "vocabulary": 101, "length": 9},
    "gpt2": {"batch": 4, "layers": 2, "width": 48, "heads": 6, "vocabulary": 101, "length": 16},
}


@cache
def example(name: str) -> Example:
    torch.manual_seed(0)
    return MODELS[name](**SMALL[name])


@cache
def graph_of(name: str) -> Graph:
    """Captured on meta: no weights are needed to plan."""
    with torch.device("meta"):
        return capture(*MODELS[name](**SMALL[name]))


def batch_of(name: str) -> int:
    return int(SMALL[name]["batch"])


@cache
def planned(name: str, strategy: str, ranks: int) -> tuple[Plan, Program]:
    plan = named(strategy, graph_of(name), ranks=ranks, batch=batch_of(name))
    return plan, lower(graph_of(name), plan)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with its data on disk and what one rank made of it."""

    task: ComparisonRun
    start: dict[str, Tensor]
    reference: RunResult

    def errors(
        self, plan: Plan, ranks: LocalRanks | None = None, run: Callable[[ComparisonRun], Any] = execute_run
    ) -> dict[str, float]:
        """Run a plan on local ranks (by default the session's); the worst error of each kind against one rank, in float64."""
        result = str(Path(self.task.data).with_name("got.pt"))
        (ranks or pool(plan.size))(run, replace(self.task, plan=plan, result=result))
        got = load_result(result)
        reference = self.reference
        losses = max(abs(a - b) / abs(b) for a, b in zip(got.losses, reference.losses, strict=True))
        return {
            "loss": losses,
            "outputs": worst_error(got.outputs, reference.outputs).error,
            "gradients": worst_error(got.gradients, reference.gradients).error,
            "parameters": worst_error(got.first_state, reference.first_state, self.start).error,
        }


def subject(graph: Graph, start: dict[str, Tensor], inputs: list[Tensor], batch: int) -> Subject:
    folder = tempfile.mkdtemp(prefix="fourfold-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    data, result = f"{folder}/data.pt", f"{folder}/reference.pt"
    torch.save({"state": start, "inputs": inputs}, data)
    task = ComparisonRun(graph=graph, plan=named("data", graph, ranks=1, batch=batch), data=data, result=result, steps=2)
    execute_run(task)
    return Subject(task=task, start=start, reference=load_result(result))


@cache
def built_in(name: str) -> Subject:
    model = example(name)
    state = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    start = {key: tensor.detach().clone() for key, tensor in state.items()}
    return subject(graph_of(name), start, [*model.inputs, *model.targets], batch_of(name))


def assert_equal(errors: dict[str, float]) -> None:
    assert all(error <= 1e-9 for error in errors.values()), errors


def observed(task: ComparisonRun, times: int = 1) -> list[int]:
    """This rank's peak in a training step, measured a few times."""
    trainer = Trainer(task, seed=0)
    return [trainer.afterwards().peak_bytes for _ in range(times)]
