"""Kernels timed on this machine: each local op of a program run by itself, as the runtime would run it, forward and backward.

Kernels that exchange something inside are timed on a rank that meets only itself: their communication is priced apart. A
kernel is run on one rank of every host, then on as many as a host has cores: the ratio is what a busy machine costs; ranks
that outnumber cores take turns, which the replay knows. A time is the median of repetitions; one whose quartiles lie far
apart is taken again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.cluster.local import usable_cores
from fourfold.graph import Graph
from fourfold.graph.spec import TensorSpec
from fourfold.oracle.kernels import Kernel, kernel_of
from fourfold.oracle.prices import KernelTime
from fourfold.oracle.stage import kinds_of_ranks
from fourfold.plans.mesh import Mesh
from fourfold.plans.pipeline import Pipeline
from fourfold.plans.program import Compute, Repeat
from fourfold.runtime.board import host_of_this_process
from fourfold.runtime.kernels import Local, Randomness, build
from fourfold.runtime.world import World

REPEATS = 5
LEAST_SECONDS = 0.01  # a kernel is repeated until it has run so long
RESTLESS = 0.3  # quartiles further apart than this part of the median: measured again
AGAIN = 2
SHORT = 2e-3  # seconds: shorter kernels are chained
CHAINED = 8


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A kernel with the step it was found in and the place it is run at."""

    kernel: Kernel
    step: Compute
    graph: Graph
    mesh: Mesh
    member: int


def samples(pipeline: Pipeline, dtypes: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, Sample]:
    """The distinct kernels of a lowered plan that no table has, by key."""
    out: dict[str, Sample] = {}
    gradients = dict.fromkeys(pipeline.cut.live, True)
    seen = set(known)
    for part in pipeline.parts:
        for program in part.programs.values():
            members = [ranks[0] for ranks in kinds_of_ranks(program).values()]
            steps = [s for step in program.steps for s in (step.bodies[0] if isinstance(step, Repeat) else (step,))]
            for step in (s for s in steps if isinstance(s, Compute)):
                for member in members:
                    kernel = kernel_of(step, program.graph, program.mesh.coords(member), gradients, dtypes)
                    if kernel.key not in seen:
                        seen.add(kernel.key)
                        out[kernel.key] = Sample(
                            kernel=kernel, step=step, graph=program.graph, mesh=program.mesh, member=member
                        )
    return out


class Alone(World):
    """A member of a mesh that meets only itself."""

    def __init__(self, mesh: Mesh, member: int, device: torch.device, group: Any) -> None:
        super().__init__(mesh, rank=member, device=device)
        self._own = group

    def group(self, axes: tuple[str, ...], purpose: str = "inline") -> Any:
        return self._own

    def summed(self, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        return tensor.clone()

    def gathered(self, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        return tensor.unsqueeze(0).expand(self.extent(axes), *tensor.shape).clone()

    def board(self, axes: tuple[str, ...]) -> None:
        return None


def timed(wanted: Sequence[Sample], dtypes: Mapping[str, torch.dtype]) -> dict[str, KernelTime]:
    """The times of kernels on this rank's machine; all ranks of the process group must call with the same list."""
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    place, crowd = _place_on_host()
    out: dict[str, KernelTime] = {}
    for sample in wanted:
        run = _Run(sample, alone, dtypes) if place < crowd else None
        single = _in_turn(run if place == 0 else None)
        crowded = _in_turn(run) if crowd > 1 else single
        if single is not None and crowded is not None:
            out[sample.kernel.key] = _joined(single, crowded)
    return out


def _place_on_host() -> tuple[int, int]:
    """Which of its host's ranks this is, and how many of them have a core each."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host_of_this_process())
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
    return mine.index(dist.get_rank()), min(len(mine), usable_cores())


def _in_turn(run: _Run | None) -> _Times | None:
    """A series of those ranks that have something to run; the others wait, which costs no core."""
    dist.barrier()
    found = run.calm() if run is not None else None
    dist.barrier()
    return found


@dataclass(frozen=True, slots=True)
class _Times:
    forward: float
    backward: float
    spread: float


def _joined(single: _Times, crowded: _Times) -> KernelTime:
    one, many = single.forward + single.backward, crowded.forward + crowded.backward
    return KernelTime(
        forward=single.forward,
        backward=single.backward,
        busy=max(many / one, 1.0) if one else 1.0,
        spread=max(single.spread, crowded.spread),
    )


class _Run:
    """One kernel bound to made-up tensors. A short one is run several times in a row before one backward goes through all:
    in a step the engine is entered once, not for every op."""

    def __init__(self, sample: Sample, group: Any, dtypes: Mapping[str, torch.dtype]) -> None:
        device = torch.device("cpu")
        local = Local(Alone(sample.mesh, sample.member, device, group), Randomness(), dict(dtypes))
        self.run: Callable[..., Any] = build(sample.step, local)
        tensors = [_made(spec, wanted) for spec, wanted in zip(sample.kernel.operands, sample.kernel.gradients, strict=True)]
        self.chain = [tensors]
        if sum(self.once()) < SHORT:
            self.chain = [[t.detach().requires_grad_(t.requires_grad) for t in tensors] for _ in range(CHAINED)]

    def once(self) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        count, outs = len(self.chain), []
        begun = time.perf_counter()
        results = [self.run(*tensors) for tensors in self.chain]
        forward = time.perf_counter() - begun
        for result in results:
            outs += [t for t in (result if isinstance(result, (tuple, list)) else [result]) if t.requires_grad]
        leaves = [t for tensors in self.chain for t in tensors if t.requires_grad]
        if not outs or not leaves:
            return forward / count, 0.0
        grads = [torch.ones_like(t) for t in outs]
        begun = time.perf_counter()
        torch.autograd.grad(outs, leaves, grads, allow_unused=True)
        return forward / count, (time.perf_counter() - begun) / count

    def calm(self) -> _Times:
        """Of several series the calmest, no more of them than it takes to find a calm one."""
        best = self.series()
        for _ in range(AGAIN):
            if best.spread < RESTLESS:
                break
            best = min(best, self.series(), key=lambda times: times.spread)
        return best

    def series(self) -> _Times:
        """Medians of many runs."""
        self.once()
        pairs: list[tuple[float, float]] = []
        begun = time.perf_counter()
        while len(pairs) < REPEATS or (time.perf_counter() - begun < LEAST_SECONDS and len(pairs) < 50 * REPEATS):
            pairs.append(self.once())
        totals = sorted(f + b for f, b in pairs)
        middle = statistics.median(totals)
        quarter = len(totals) // 4
        spread = (totals[-1 - quarter] - totals[quarter]) / middle if middle else 0.0
        return _Times(statistics.median(f for f, _ in pairs), statistics.median(b for _, b in pairs), spread)


def _made(spec: TensorSpec, gradient: bool) -> Tensor:
    """Numbers of a shape: small positive ones for floats, zeros for indices."""
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.rand(spec.shape, dtype=dtype).add_(0.1).requires_grad_(gradient)
    return torch.zeros(spec.shape, dtype=dtype)
