"""What ranks do to calibrate: collectives of every size timed between computing, and rates.

Between computing, a collective costs more than over and over: ranks come to it at different times, threads sleep and must be
woken, and caches hold something else. So each repetition goes through other memory and computes for a moment first. What counts
is the time from coming to it until it is done, on the average rank: waiting for the later ones is part of it. Where ranks take
turns on cores, part of that waiting is for others to compute, which the oracle counts as computing already: there it is the
time of a repetition less that of computing in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fourfold.cluster import Collective
from fourfold.cluster.parts import OPTIMIZERS
from fourfold.plans.mesh import Mesh
from fourfold.runtime.board import CAPACITY, Board
from fourfold.runtime.shared_sum import SharedSums
from fourfold.runtime.trial import optimizer_named
from fourfold.runtime.world import World, all_gather_single, reduce_scatter_single

MORE = 3  # times as many rounds at most, for what strays
REPEATS = 32
LEAST_REPEATS = 2
BLOCK_SECONDS = 0.15  # a block of what takes long lasts about so long
LEAST_SECONDS = 0.1
SLOWEST = 3.0  # seconds: sizes that should take longer once are left out, there time grows with the bytes
OUTLIERS = 10  # of so many repetitions, one is left out
STRETCH = 2e-3  # seconds of computing before each repetition, and about as much for
FORGOTTEN = 8 * 2**20  # bytes written, and as many read: together what lies between two exchanges of small networks
UPDATED = 4 * 2**20  # elements of the parameters whose update is timed
MATRIX = 512  # size of the product that gives the rate
COPIED = 64 * 2**20  # bytes copied for the bandwidth: more than the caches of a processor hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: which sizes, and how many times everything. Machines have bad moments of seconds and of minutes, so
    that each number is taken at moments far apart."""

    sizes: tuple[float, ...] = (2.0**10, 2.0**16, 2.0**20, 2.0**23, 2.0**26)  # bytes: between them times are nearly straight
    rounds: int = 6

    @property
    def most(self) -> int:
        """Rounds, for what strays."""
        return MORE * self.rounds


FULL = Effort()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One curve to measure: the groups that communicate at once."""

    collective: Collective
    groups: tuple[tuple[int, ...], ...]
    level: str
    crowd: float = 1.0  # of the ranks that communicate, how many take turns on a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A curve's points (bytes, seconds), and how long the same computing took each time, in a unit of its own."""

    points: tuple[tuple[float, float], ...]
    computing: tuple[float, ...]


def measured(request: Request, sizes: Sequence[float]) -> Found:
    """A collective at growing sizes once; all ranks of the process group must call."""
    mine = next((group for group in request.groups if dist.get_rank() in group), None)
    made = {group: dist.new_group(list(group)) for group in request.groups}
    group = made[mine] if mine is not None else None
    stretch, run = _Stretch(mine is not None), _collectives(request, mine, group)
    sizes = [size for size in sizes if request.collective != "shared_gather" or size <= CAPACITY]
    blocks = {}
    for size, larger in zip(sizes, (*sizes[1:], 0.0), strict=True):
        once = run(int(size))
        spent = _once(once)
        repeats = max(LEAST_REPEATS, min(REPEATS, round(BLOCK_SECONDS / spent)))
        blocks[size] = _block(once, stretch, group, request.crowd, repeats)
        if spent * larger / size > SLOWEST:
            break
    if group is not None:
        dist.destroy_process_group(group)
    there = 0.5 if request.collective == "send" else 1.0
    long = [block for block in blocks.values() if block.repeats == REPEATS]  # short ones begin unevenly
    return Found(
        points=tuple((size, there * block.seconds) for size, block in blocks.items()),
        computing=tuple(block.computing / max(stretch.times, 1) for block in long),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Seconds of a collective, and of the computing before it."""

    seconds: float
    computing: float
    repeats: int


def _once(once: Callable[[], Any]) -> float:
    """Seconds of doing it once, the same on all ranks."""
    once()
    dist.barrier()
    begun = time.perf_counter()
    once()
    spent = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def _block(once: Callable[[], Any], stretch: _Stretch, group: Any, crowd: float, repeats: int) -> _Block:
    """Computing and the collective, several times: the mean over all ranks that take part, without the longest few. Where ranks
    take turns on cores, long times are the rule and not a disturbance: what one group loses another has won, so all count."""
    dist.barrier()
    spent, computing = [], []
    for _ in range(repeats):
        begun, busy = time.perf_counter(), time.thread_time()
        stretch.forget()
        ready = time.perf_counter()
        stretch()
        came, busy = time.perf_counter(), time.thread_time() - busy
        once()
        done = time.perf_counter()
        spent.append(done - came if crowd == 1 else done - begun - crowd * busy)
        computing.append(came - ready)
    sums = float(group is not None) * torch.tensor([*spent, *computing, 1.0], dtype=torch.float64)
    dist.all_reduce(sums)
    shared = (sums[:-1] / sums[-1]).tolist()
    mean = _mean if crowd == 1 else statistics.mean
    return _Block(mean(shared[:repeats]), statistics.mean(shared[repeats:]), repeats)


def _mean(times: list[float]) -> float:
    """Without the longest few."""
    return statistics.mean(sorted(times)[: len(times) - len(times) // OUTLIERS])


class _Stretch:
    """A moment of computing on those ranks that communicate, equally much on each; all ranks must make one."""

    def __init__(self, busy: bool) -> None:
        self.matrix, self.times = torch.rand(MATRIX // 2, MATRIX // 2), 1
        self.others = torch.zeros(2, FORGOTTEN // 4 if busy else 0)
        start = time.perf_counter()
        for _ in range(REPEATS):
            self()
        times = torch.tensor([STRETCH * REPEATS / (time.perf_counter() - start)])
        dist.broadcast(times, 0)
        self.times = max(1, round(times.item())) if busy else 0

    def forget(self) -> None:
        """Fill the caches with something else."""
        self.others[0].fill_(1.0)
        self.others[1].sum()

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix)


def _collectives(request: Request, mine: tuple[int, ...] | None, group: Any) -> Callable[[int], Callable[[], Any]]:
    """For a size in bytes, a function that does the collective once; ranks outside all groups do nothing."""
    if mine is None:
        return lambda size: lambda: None
    count, kind = len(mine), request.collective
    if kind in ("shared_gather", "shared_sum"):
        return _shared(kind, group, mine)

    def run(size: int) -> Callable[[], Any]:
        n = max(size // 4, 1)
        one, all_of = torch.zeros(n), torch.zeros(n * count)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(one, group=group)
        if kind == "all_gather":
            return lambda: all_gather_single(all_of, one, group=group)
        if kind == "reduce_scatter":
            return lambda: reduce_scatter_single(one, all_of, group=group)
        if kind == "all_to_all":
            n = max(n // (count - 1), 1) * count
            return lambda: dist.all_to_all_single(torch.empty(n), torch.zeros(n), group=group)
        return lambda: _ping(one, mine)  # there and back: `measured` halves it

    return run


def _ping(tensor: torch.Tensor, pair: tuple[int, ...]) -> None:
    """A message from the first to the second and back."""
    mine, other = (pair[0], pair[1]) if dist.get_rank() == pair[0] else (pair[1], pair[0])
    if mine == pair[0]:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    else:
        dist.recv(tensor, other)
        dist.send(tensor, other)


def _shared(kind: str, group: Any, mine: tuple[int, ...]) -> Callable[[int], Callable[[], Any]]:
    if kind == "shared_gather":
        board = Board.open(group, 60.0)
        return lambda size: (lambda: board.gather(torch.zeros(max(size // 4, 1)))) if board is not None else (lambda: None)
    mesh = Mesh.of(data=len(mine))
    world = World(mesh, rank=mine.index(dist.get_rank()), device=torch.device("cpu"), ranks=mine)
    world._groups["inline", ("data",)] = group

    def run(size: int) -> Callable[[], Any]:
        parameter = torch.zeros(max(size // 4, 1), requires_grad=True)
        sums = SharedSums({"p": parameter}, {"p": ("data",)}, world)
        gradient = torch.zeros(parameter.shape)

        def once() -> None:
            parameter.grad = gradient
            sums.finish()

        return once

    return run


def rates() -> dict[str, float]:
    """What one busy rank reaches: multiply-adds, copies, updates."""
    a, b = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    dist.barrier()
    product = _seconds(lambda: torch.mm(a, b))
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    copy = _seconds(lambda: target.copy_(source))
    small = torch.zeros(8)
    out = {"rate": 2 * MATRIX**3 / product, "bandwidth": 2 * COPIED / copy, "launch": _seconds(lambda: small.add(1.0))}
    for name in OPTIMIZERS:
        parameter = torch.zeros(UPDATED, requires_grad=True)
        parameter.grad = torch.zeros(UPDATED)
        out[f"update_{name}"] = 4 * UPDATED / _seconds(optimizer_named(name)([parameter]).step)
    return out


def _seconds(once: Callable[[], Any]) -> float:
    """The time on this rank, while others may do the same."""
    once()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < REPEATS or time.perf_counter() - begun < LEAST_SECONDS:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return _mean(times)
