"""Local ranks for tests: one pool of workers per count for the whole session, and jobs that run many small graphs in one go.

A job is a graph, a plan, the stored tensors and the inputs. Every rank writes its parts of the results down as soon as it
has them; the parent puts them together, so that no collective of the tests' own is needed, ranks that should agree are
averaged (a wrong one shows), and after a crash the job at fault is known by name while the others still count.
"""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import WorkerFailed
from fourfold.graph import Graph
from fourfold.graph.autocast import as_computed
from fourfold.plans import Plan, lower
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists import paths
from fourfold.plans.lists.messages import StageMessages
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lowering.program import Program
from fourfold.plans.spec.other_graph import transferred
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.policy import DEFAULT
from fourfold.runs.initial_tensors import cut
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm import world as world_module
from fourfold.runtime.comm.exchange import put
from fourfold.runtime.comm.journal import Journal
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution import runner as pipeline_module
from fourfold.runtime.execution.executor import Executor
from fourfold.runtime.host.devices import own_device, rank_devices
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.kernels import Randomness

_POOLS: dict[int, LocalRanks] = {}
_KIND = ["cpu"]  # of the devices of new pools
_WORLDS: dict[Mesh, World] = {}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One forward and backward to run split."""

    name: str
    graph: Graph
    plan: Plan
    state: dict[str, Tensor]
    inputs: list[Tensor]
    precision: str = "fp64"
    channels_last: bool = False  # the memory format of inputs


Parts = dict[str, tuple[Layout, Tensor]]


@dataclass(kw_only=True)
class Share:
    """What one rank holds after a step: outputs, gradients and buffers, each with the layout it is a part of."""

    name: str
    outputs: Parts
    gradients: Parts
    state: Parts


@dataclass(kw_only=True)
class Outcome:
    """Whole tensors after one step; `error` is the failing rank's traceback if there is nothing else."""

    name: str
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""


def joined(mesh: Mesh, shares: Sequence[Share]) -> Outcome:
    """The whole tensors from the shares of all ranks, in rank order."""

    def whole(kind: str) -> dict[str, Tensor]:
        first: Parts = getattr(shares[0], kind)
        return {key: _whole(mesh, layout, [getattr(s, kind)[key][1] for s in shares]) for key, (layout, _) in first.items()}

    return Outcome(name=shares[0].name, outputs=whole("outputs"), gradients=whole("gradients"), state=whole("state"))


def _whole(mesh: Mesh, layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """Parts added where they lie, over how often each place is held; partial values are summed, not averaged."""
    total = torch.zeros(layout.shape, dtype=torch.float64)
    times = torch.zeros(layout.shape, dtype=torch.float64)
    for rank, part in enumerate(parts):
        spans = tuple(s.spans for s in layout.box(mesh.coords(rank)))
        put(total, spans, part.double(), add=True)
        put(times, spans, torch.ones(part.shape, dtype=torch.float64), add=True)
    return total / times * math.prod(mesh.extent(axis) for axis in layout.partial)


def pool(count: int) -> LocalRanks:
    """The session's workers; spawned when first used."""
    if count not in _POOLS:
        os.environ.setdefault("FOURFOLD_TIMEOUT", "60")
        _POOLS[count] = LocalRanks(count, timeout=240, devices=rank_devices(_KIND[0], count, share_gpu=_KIND[0] == "cuda"))
    return _POOLS[count]


def use_devices(kind: str) -> None:
    """Let new pools run on a kind of device; ranks share what GPUs there are."""
    _KIND[0] = kind


def device_kind() -> str:
    return _KIND[0]


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
            error = ""
            try:
                pool(count)(_serve_jobs, rest, str(path), _KIND[0])
            except WorkerFailed as failure:
                error = str(failure)
            by_rank = [_read(Path(f"{path}.{rank}")) for rank in range(count)]
            for job in rest:
                if all(job.name in shares for shares in by_rank):
                    done[job.name] = joined(job.plan.mesh, [shares[job.name] for shares in by_rank])
        rest = [job for job in rest if job.name not in done]
        if error and rest:
            done[rest[0].name] = Outcome(name=rest[0].name, error=error)
            rest = rest[1:]
    return done


def _read(path: Path) -> dict[str, Share]:
    out: dict[str, Share] = {}
    if not path.exists():
        return out
    with path.open("rb") as file:
        while True:
            try:
                share = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return out
            out[share.name] = share


def _serve_jobs(jobs: list[Job], path: str, kind: str) -> None:
    with open(f"{path}.{dist.get_rank()}", "ab") as file:
        for job in jobs:
            try:
                share = run_job(job, kind)
            except Exception as error:
                raise RuntimeError(f"{job.name}: {error}") from error
            pickle.dump(share, file)
            file.flush()


def world_of(mesh: Mesh, kind: str = "cpu") -> World:
    """This worker on a mesh; process groups are made once."""
    device = own_device(kind)
    if mesh not in _WORLDS:
        _WORLDS[mesh] = World.join(mesh, device=device, group_axes=[(name,) for name in mesh.names])
    return _WORLDS[mesh].for_run(world_module.running_placement(device, mesh.size), DEFAULT, Journal())


def stepped(executor: Executor, feeds: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """One forward and backward of a single program: the global loss, and what forward gave."""
    executor.begin()
    out = executor.forward(feeds, next(iter(executor.programs)))
    loss = out[executor.program.graph.loss]
    executor.backward([loss] if loss.requires_grad else [], [None], next(iter(executor.lists)))
    executor.finish()
    return executor.global_loss(loss.detach()), out


def lists_of(program: Program, world: World) -> dict[int, StageList]:
    """The lists of a single program where a world's ranks run."""
    return {0: StageList(StageMessages(program, world.paths, program.graph.live))}


def run_job(job: Job, kind: str = "cpu") -> Share:
    """One step of a job on this rank."""
    graph = as_computed(job.graph, job.precision, kind)
    program, world = lower(graph, transferred(job.plan, job.graph, graph)), world_of(job.plan.mesh, kind)
    last = job.channels_last

    def load(key: str, layout: Layout) -> Tensor:
        return cut(job.state[key], layout, world).clone().to(world.device)

    executor = Executor(lists_of(program, world), world, load, randomness=Randomness(exact=True))
    names = (*job.graph.inputs, *job.graph.targets)
    feeds = {n: executor.cut(n, t) for n, t in zip(names, job.inputs, strict=True)}
    feeds = {n: _channels_last(t) if last and n in job.graph.inputs else t for n, t in feeds.items()}
    _, out = stepped(executor, feeds)
    outputs = {n: (program.layouts[n], out[n].detach().cpu()) for n in program.outputs}
    gradients, state = {}, {}
    for name, tensor in executor.state.items():
        key, layout = executor.keys[name], program.stored[name]
        if tensor.requires_grad:
            gradients[key] = (layout, (tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)).cpu().clone())
        else:
            state[key] = (layout, tensor.cpu().clone())
    return Share(name=job.name, outputs=outputs, gradients=gradients, state=state)


def _channels_last(tensor: Tensor) -> Tensor:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.contiguous(memory_format=last) if last else tensor


def between_hosts(function: Callable[..., Any], *arguments: Any) -> Any:
    """On a rank: a function as if every rank had its own host and all messages were large; and whether any travelled so."""
    flights: list[gloo_p2p.PointToPointWork] = []
    begin = gloo_p2p.PointToPointWork.__init__

    def counted(self: gloo_p2p.PointToPointWork, *rest: Any) -> None:
        flights.append(self)
        begin(self, *rest)

    def placement(device: torch.device, ranks: int) -> Placement:
        return Placement.separate_hosts(ranks)

    with ExitStack() as stack:
        stack.enter_context(patch.object(paths, "DIRECT_ELEMENTS", 1))
        stack.enter_context(patch.object(gloo_p2p.PointToPointWork, "__init__", counted))
        for module in (world_module, pipeline_module):
            stack.enter_context(patch.object(module, "running_placement", placement))
        return function(*arguments), len(flights) > 0
