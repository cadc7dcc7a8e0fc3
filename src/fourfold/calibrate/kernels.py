"""Kernels timed on this machine: each local op of a program run by itself, as the runtime would run it, forward and backward.

Kernels that communicate inside are timed as a group of one rank: their communication is priced separately. A kernel runs on one
rank of every host, then on all ranks; the ratio is the slowdown of a busy machine. When ranks outnumber cores, per-thread CPU
time is used, because the replay already models how ranks take turns; that time is longer too, since they share caches.

Caches are as in a step: weights and saved tensors are not in them, the output of the op before is. A time is the mean of
repetitions without the longest (a step is a sum: medians would leave out what is rare for one kernel and common for hundreds).
Machines have slow seconds, so all kernels are timed in several rounds, those whose times spread more often, and the
interquartile mean counts.
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

from fourfold.calibrate.collectives import FULL
from fourfold.calibrate.kernel_table import rounded
from fourfold.calibrate.machine_speed import SpeedProbe, one_rank_per_core, ranks_by_host, speed_exponent
from fourfold.calibrate.robust_stats import KNOWN, interquartile_mean, interquartile_range, strays
from fourfold.graph import Graph
from fourfold.graph.spec import TensorSpec
from fourfold.oracle.prices.kernels import Kernel, kernel_of
from fourfold.oracle.prices.prices import KernelTime
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.plans.lowering.program import Compute, inside
from fourfold.runtime.comm.world import World
from fourfold.runtime.kernels import Randomness, RankContext, build
from fourfold.runtime.rank_pool import RankPool

REPEATS = 5
LEAST_REPEATS = 2
SERIES_SECONDS = 0.2  # long kernels are repeated less often
DROPPED = 1  # of the repetitions, the longest
FLUSHED = 16 * 2**20  # bytes read and as many written before each run: more than what a core has of a cache
CHAIN_SECONDS = 1e-3  # shorter kernels are run in a chain about so long
CORE_FLOPS, CORE_BYTES, ENTERED = 3e10, 5e9, 2.5e-4  # about, of some core, the last in seconds: what a kernel is made of
DRAWN = 2**16  # numbers drawn at random, then repeated
AROUND = 4  # looks at the pace before and after a kernel's own: one alone strays more than the pace does
CALM = 4  # power of the pace by which moments weigh
LONG, KNOWN_LONG = 1e-3, 0.015  # seconds from which a kernel is timed again until known to that relative error
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often kernels are gone through: all of them at least, and those not yet known at most."""

    least: int
    most: int


ROUNDS = Rounds(FULL.rounds, FULL.most)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A kernel with the step it was found in and the place it is run at."""

    kernel: Kernel
    step: Compute
    graph: Graph
    mesh: Mesh
    member: int


def samples_of(plans: Iterable[LoweredPlan], dtypes: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, Sample]:
    """The distinct kernels of lowered plans that no table has, by key."""
    out: dict[str, Sample] = {}
    for lowered in plans:
        out |= samples(lowered, dtypes, {*known, *out})
    return out


def samples(lowered: LoweredPlan, dtypes: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, Sample]:
    """The distinct kernels of a lowered plan that no table has, by key."""
    out: dict[str, Sample] = {}
    gradients = dict.fromkeys(lowered.cut.live, True)
    seen = set(known)
    for part in lowered.parts:
        for program in part.programs.values():
            members = [some[0] for some in rank_classes(program.mesh, [program])]
            for step in (s for outer in program.steps for s in inside(outer) if isinstance(s, Compute)):
                for member in members:
                    kernel = kernel_of(step, program.graph, program.mesh.coords(member), gradients, dtypes)
                    if kernel.key not in seen:
                        seen.add(kernel.key)
                        out[kernel.key] = Sample(
                            kernel=kernel, step=step, graph=program.graph, mesh=program.mesh, member=member
                        )
    return out


class SingleRankWorld(World):
    """A member of a mesh whose collectives run on itself alone."""

    def __init__(self, mesh: Mesh, member: int, device: torch.device, group: Any) -> None:
        super().__init__(mesh, rank=member, device=device)
        self._own = group

    def group(self, axes: tuple[str, ...], purpose: str = "inline") -> Any:
        return self._own

    def all_reduce(self, tensor: Tensor, axes: tuple[str, ...], name: str = "") -> Tensor:
        return tensor.clone()

    def all_reduce_max(self, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        return tensor.clone()

    def all_gather(self, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        return tensor.unsqueeze(0).expand(self.extent(axes), *tensor.shape).clone()


class KernelTimings:
    """Kernels and their times so far, round by round."""

    def __init__(self, wanted: Iterable[Sample], dtypes: Mapping[str, torch.dtype]) -> None:
        self.wanted, self.dtypes = list(wanted), dtypes
        self._powers = {sample.kernel.key: speed_exponent(arithmetic(sample.kernel)) for sample in self.wanted}
        self._samples: list[TimedOnce] = []

    def time_round(self, ranks: RankPool, some: Sequence[Sample], *, alone: bool) -> None:
        """Time some of the kernels once more on all ranks at once and, with `alone`, on one rank too."""
        self._samples += ranks(time_once, some, self.dtypes, alone)[0]

    def uncertain(self, pace: float) -> list[Sample]:
        """The kernels whose times, normalised to a pace, still spread too far."""
        normalised = self._normalised(pace)
        return [sample for sample in self.wanted if normalised[sample.kernel.key].strays]

    def times(self, pace: float) -> dict[str, KernelTime]:
        """By key, normalised to a pace of the machine (`calibrate.machine_speed`; 0: not normalised)."""
        return {key: normalised.kernel_time() for key, normalised in self._normalised(pace).items()}

    def _normalised(self, pace: float) -> dict[str, _NormalisedTimes]:
        out: dict[str, _NormalisedTimes] = {}
        for k, one in enumerate(self._samples):
            now = statistics.median(other.pace_now for other in self._samples[max(k - AROUND, 0) : k + AROUND + 1])
            calm = pace / now if pace else 1.0
            normalised = out.setdefault(one.key, _NormalisedTimes([], []))
            normalised.crowded.append(one.crowded.at(calm, self._powers[one.key]))
            if one.single is not None:
                normalised.single.append(one.single.at(calm, self._powers[one.key]))
        return out


def time_kernels(
    ranks: RankPool, wanted: Iterable[Sample], dtypes: Mapping[str, torch.dtype], rounds: Rounds, pace: float
) -> dict[str, KernelTime]:
    """The times of kernels on the machine the ranks run on, normalised to a pace of it."""
    timing = KernelTimings(wanted, dtypes)
    for number in range(rounds.most):
        again = timing.wanted if number < rounds.least else timing.uncertain(pace)
        if not again:
            break
        timing.time_round(ranks, again, alone=number < rounds.least)
    return timing.times(pace)


def time_once(wanted: Sequence[Sample], dtypes: Mapping[str, torch.dtype], alone: bool) -> list[TimedOnce]:
    """Kernels timed once, on the first ranks of hosts; all ranks of the process group must call with the same list."""
    own = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    hosts = ranks_by_host()
    crowd, group = one_rank_per_core(hosts)
    me, first, work = dist.get_rank(), [ranks[0] for ranks in hosts], SpeedProbe()
    calm = any(me in ranks for ranks in crowd)
    clock = time.thread_time if hosts != crowd else time.perf_counter
    busy = max(map(len, hosts)) > 1
    found: list[TimedOnce] = []
    for sample in wanted:
        run = _KernelRun(sample, own, dtypes)
        repeats = _first_rank_says(run.repeats)
        if calm:
            dist.barrier(group)
        pace_now = work() if calm else 0.0
        single = run.series(repeats) if me in first and (alone or not busy) else None
        dist.barrier()
        crowded = run.series(repeats, dist.barrier, clock) if busy else single
        dist.barrier()
        if me in first and crowded is not None:
            found.append(TimedOnce(sample.kernel.key, pace_now, single, crowded))
    dist.destroy_process_group(own)
    if calm:
        dist.destroy_process_group(group)
    return found


def _first_rank_says(number: int) -> int:
    agreed = torch.tensor(number)
    dist.broadcast(agreed, 0)
    return int(agreed)


@dataclass(frozen=True, slots=True)
class _Times:
    forward: float
    backward: float
    weight: float = 1.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def at(self, calm: float, power: float) -> _Times:
        """Normalised: `calm` is the reference pace over the pace now. Calm moments weigh more."""
        return _Times(self.forward * calm**power, self.backward * calm**power, calm**CALM)


@dataclass(frozen=True, slots=True)
class TimedOnce:
    """One round of a kernel: its key, the machine's pace, times on one rank alone (in the first rounds) and on all ranks."""

    key: str
    pace_now: float
    single: _Times | None
    crowded: _Times


@dataclass(frozen=True, slots=True)
class _NormalisedTimes:
    """The times of a kernel by round, normalised to one pace."""

    single: list[_Times]
    crowded: list[_Times]

    @property
    def strays(self) -> bool:
        """Whether the time in a crowd is not known yet. Few long kernels are most of a step, so they must be known better."""
        both = [times.both for times in self.crowded]
        return strays(both, KNOWN if interquartile_mean(both) < LONG else KNOWN_LONG)

    def kernel_time(self) -> KernelTime:
        one, many = _mean_seconds(self.single, "both"), _mean_seconds(self.crowded, "both")
        return KernelTime(
            forward=rounded(_mean_seconds(self.single, "forward")),
            backward=rounded(_mean_seconds(self.single, "backward")),
            busy=rounded(max(many / one, 1.0)) if one else 1.0,
            spread=rounded(interquartile_range(times.both for times in self.crowded) / many) if many else 0.0,
        )


def _mean_seconds(found: Sequence[_Times], which: str) -> float:
    return interquartile_mean((getattr(times, which) for times in found), (times.weight for times in found))


def _chain_length(kernel: Kernel) -> int:
    """How often a kernel is run in a row: always the same for the same one, since its share of what entering the engine costs
    depends on it."""
    return round(CHAIN_SECONDS / sum(_rough_seconds(kernel)))


def arithmetic(kernel: Kernel) -> float:
    """The share of arithmetic in its time, about."""
    computing, other = _rough_seconds(kernel)
    return computing / (computing + other)


def _rough_seconds(kernel: Kernel) -> tuple[float, float]:
    """Seconds of arithmetic and of all else, about, on some core."""
    flops, moved = kernel.flops + kernel.backward_flops, kernel.moved + kernel.backward_moved
    return flops / CORE_FLOPS, moved / CORE_BYTES + ENTERED


class _KernelRun:
    """One kernel bound to made-up tensors. A short one is run several times in a row before one backward goes through all: in a
    step the engine is entered once, not for every op."""

    def __init__(self, sample: Sample, group: Any, dtypes: Mapping[str, torch.dtype]) -> None:
        device = torch.device("cpu")
        local = RankContext(SingleRankWorld(sample.mesh, sample.member, device, group), Randomness(), dict(dtypes))
        self.run: Callable[..., Any] = build(sample.step, local)
        tensors = [
            _random_operand(spec, wanted) for spec, wanted in zip(sample.kernel.operands, sample.kernel.gradients, strict=True)
        ]
        stored = {p.name for p in sample.graph.parameters}
        self.fresh = next((k for k, name in enumerate(sample.step.op.operands) if name not in stored), None)
        self.chain, self.others = [tensors], torch.zeros(2, FLUSHED // 4)
        seconds = sum(self.once())
        self.repeats = max(LEAST_REPEATS, min(REPEATS, round(SERIES_SECONDS / seconds)))
        links = range(1, _chain_length(sample.kernel))
        self.chain += [[t.detach().clone().requires_grad_(t.requires_grad) for t in tensors] for _ in links]

    def once(self, together: Callable[[], Any] = lambda: None, clock: Clock = time.perf_counter) -> tuple[float, float]:
        """Seconds of one forward and one backward; `together` waits for the others that run it."""
        count, outs = len(self.chain), []
        self._forget()
        if self.fresh is not None:
            for tensors in self.chain:
                tensors[self.fresh].detach().sum()
        together()
        begun = clock()
        results = [self.run(*tensors) for tensors in self.chain]
        forward = clock() - begun
        for result in results:
            outs += [t for t in (result if isinstance(result, (tuple, list)) else [result]) if t.requires_grad]
        leaves = [t for tensors in self.chain for t in tensors if t.requires_grad]
        if not outs or not leaves:
            return forward / count, 0.0
        self._forget()
        grads = [torch.ones_like(t) for t in outs]
        together()
        begun = clock()
        torch.autograd.grad(outs, leaves, grads, allow_unused=True)
        return forward / count, (clock() - begun) / count

    def _forget(self) -> None:
        """Fill the caches with something else."""
        self.others[0].fill_(1.0)
        self.others[1].sum()

    def series(self, repeats: int, together: Callable[[], Any] = lambda: None, clock: Clock = time.perf_counter) -> _Times:
        """Means of several runs."""
        kept = sorted((self.once(together, clock) for _ in range(repeats)), key=sum)[: repeats - DROPPED]
        return _Times(statistics.mean(f for f, _ in kept), statistics.mean(b for _, b in kept))


def _random_operand(spec: TensorSpec, gradient: bool) -> Tensor:
    """A tensor of random values: floats are positive and many are equal, as after a ReLU (it matters to maxima); indices are
    zero."""
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        some = torch.randn(min(spec.numel, DRAWN), dtype=dtype).clamp_(min=0).add_(0.1)
        return some.repeat(-(-spec.numel // DRAWN) or 1)[: spec.numel].view(spec.shape).requires_grad_(gradient)
    return torch.zeros(spec.shape, dtype=dtype)
