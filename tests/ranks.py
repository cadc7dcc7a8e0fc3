"""Local ranks for tests: one pool of workers per count for the whole session, and jobs that run many small graphs in one go.

A job is a graph, a plan, the stored tensors and the inputs. Rank 0 writes each outcome down as soon as it has it, so
that after a crash the job at fault is known by name and the others still count.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import WorkerFailed
from fourfold.graph import Graph
from fourfold.plan import Plan, lower
from fourfold.plan.layout import Layout
from fourfold.plan.mesh import Mesh
from fourfold.runtime.execute import Executor
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.launch import Ranks
from fourfold.runtime.trial import executor_cut, whole_state
from fourfold.runtime.world import World

_POOLS: dict[int, Ranks] = {}
_WORLDS: dict[Mesh, World] = {}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One forward and backward to run split."""

    name: str
    graph: Graph
    plan: Plan
    state: dict[str, Tensor]
    inputs: list[Tensor]


@dataclass(kw_only=True)
class Outcome:
    """Whole tensors after one step; `error` is the failing rank's traceback if there is nothing else."""

    name: str
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""


def pool(count: int) -> Ranks:
    """The session's workers; spawned when first used."""
    if count not in _POOLS:
        os.environ.setdefault("FOURFOLD_TIMEOUT", "60")
        _POOLS[count] = Ranks(count, timeout=240)
    return _POOLS[count]


def close_pools() -> None:
    for ranks in _POOLS.values():
        ranks.close()
    _POOLS.clear()


def run_jobs(jobs: Sequence[Job], count: int) -> dict[str, Outcome]:
    """Run jobs on `count` ranks, the next ones on fresh workers where one fails."""
    done: dict[str, Outcome] = {}
    rest = list(jobs)
    while rest:
        with tempfile.TemporaryDirectory(prefix="fourfold-jobs-") as folder:
            path = Path(folder, "outcomes")
            path.touch()
            error = ""
            try:
                pool(count)(_serve_jobs, rest, str(path))
            except WorkerFailed as failure:
                error = str(failure)
            for outcome in _read(path):
                done[outcome.name] = outcome
        rest = [job for job in rest if job.name not in done]
        if error and rest:
            done[rest[0].name] = Outcome(name=rest[0].name, error=error)
            rest = rest[1:]
    return done


def _read(path: Path) -> list[Outcome]:
    out = []
    with path.open("rb") as file:
        while True:
            try:
                out.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return out


def _serve_jobs(jobs: list[Job], path: str) -> None:
    with open(path, "ab") as file:
        for job in jobs:
            try:
                outcome = run_job(job)
            except Exception as error:
                raise RuntimeError(f"{job.name}: {error}") from error
            if outcome is not None:
                pickle.dump(outcome, file)
                file.flush()


def world_of(mesh: Mesh) -> World:
    """This worker on a mesh; process groups are made once."""
    if mesh not in _WORLDS:
        _WORLDS[mesh] = World.join(mesh, wanted=[(name,) for name in mesh.names])
    return _WORLDS[mesh]


def run_job(job: Job) -> Outcome | None:
    """One step of a job on this rank; rank 0 gives the outcome."""
    program, world = lower(job.graph, job.plan), world_of(job.plan.mesh)

    def load(key: str, layout: Layout) -> Tensor:
        return executor_cut(job.state[key], layout, world).clone()

    executor = Executor(program, world, load, randomness=Randomness(exact=True))
    names = (*job.graph.inputs, *job.graph.targets)
    _, out = executor.forward_backward({n: executor.cut(n, t) for n, t in zip(names, job.inputs, strict=True)})
    outputs = {n: executor.whole(program.layouts[n], out[n]) for n in program.outputs}
    gradients: dict[str, Any] = {}
    for name, tensor in executor.state.items():
        if tensor.requires_grad:
            grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            gradients[executor.keys[name]] = executor.whole(program.stored[name], grad)
    state = whole_state(executor)
    if world.rank != 0:
        return None
    kept = {k: v.clone() for k, v in state.items() if not v.requires_grad}
    return Outcome(name=job.name, outputs=outputs, gradients=gradients, state=kept)
