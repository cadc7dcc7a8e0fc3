"""Times of collectives of every size, measured between stretches of computing; and the rates of one rank.

A collective in a step costs more than one in a tight loop: ranks reach it at different times, threads sleep and must be woken,
and caches hold other data. So each repetition first touches other memory and computes for a moment. The time runs from
reaching the collective until it is done, on the average rank, waiting for later ranks included. Where ranks outnumber cores,
part of that waiting is for other ranks to compute, which the oracle already counts as computing: the time is then that of a
repetition less the computing of the ranks that share a core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fourfold.calibrate.collective_calls import CurveRequest, collective_call
from fourfold.cluster import NON_WAITING
from fourfold.optimizers import OPTIMIZERS
from fourfold.plans.spec.policy import DEFAULT
from fourfold.runtime.execution.optimizers import optimizer_named

MORE = 3  # times as many rounds at most, for what strays
REPEATS = 32
LEAST_REPEATS = 2
BLOCK_SECONDS = 0.15  # a block of what takes long lasts about so long
LEAST_SECONDS = 0.1
SLOWEST = 3.0  # seconds: sizes that should take longer once are left out, there time grows with the bytes
OUTLIERS = 10  # of so many repetitions, one is left out
STRETCH = 2e-3  # seconds of computing before each repetition, and about as much for
FORGOTTEN = 8 * 2**20  # bytes written, and as many read: together what lies between two exchanges of small networks
STRETCHES = {1: 32, 4: 16, 16: 8}  # times as much of it, for what long computing does to exchanges; and repetitions
MOST_FORGOTTEN = 4  # times as many bytes at most: caches are full then
WAITED = 2**16  # bytes of the exchange for that
UPDATED = 4 * 2**20  # elements of the parameters whose update is timed
MATRIX = 512  # size of the product that gives the rate
COPIED = 64 * 2**20  # bytes copied for the bandwidth: more than the caches of a processor hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: which sizes, and how many times everything. Machines have bad moments of seconds and of minutes, so
    that each number is taken at moments far apart."""

    sizes: tuple[float, ...] = (2.0**10, 2.0**16, 2.0**20, 2.0**23, 2.0**26)  # bytes: between them times are nearly straight
    rounds: int = 8

    @property
    def most(self) -> int:
        """Rounds, for what strays."""
        return MORE * self.rounds


FULL = Effort()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCurve:
    """A curve's points (bytes, seconds), and how long the same computing took each time, in a unit of its own."""

    points: tuple[tuple[float, float], ...]
    computing: tuple[float, ...]


def time_collective(request: CurveRequest, sizes: Sequence[float]) -> TimedCurve:
    """A collective at growing sizes once, up to those for which there is room; all ranks of the process group must call."""
    mine = next((group for group in request.groups if dist.get_rank() in group), None)
    made = {group: dist.new_group(list(group)) for group in request.groups}
    group = made[mine] if mine is not None else None
    stretch, run = _ComputeStretch(mine is not None), collective_call(request, mine, group)
    sizes = [size for size in sizes if request.collective != "shared_gather" or size <= DEFAULT.small_bytes]
    blocks = {}
    for size, larger in zip(sizes, (*sizes[1:], 0.0), strict=True):
        once = run(int(size))
        if not _true_on_all_ranks(once is not None):
            break
        assert once is not None
        spent = _seconds_once(once)
        repeats = max(LEAST_REPEATS, min(REPEATS, round(BLOCK_SECONDS / spent)))
        blocks[size] = _time_block(once, stretch, group, request, repeats)
        if len(blocks) > 1 and spent * larger / size > SLOWEST:  # the time of the first may be latency alone
            break
    if group is not None:
        dist.destroy_process_group(group)
    there = 0.5 if request.collective in ("send", *NON_WAITING) else 1.0
    long = [block for block in blocks.values() if block.repeats == REPEATS]  # short ones begin unevenly
    return TimedCurve(
        points=tuple((size, there * block.seconds) for size, block in blocks.items()),
        computing=tuple(block.computing / max(stretch.times, 1) for block in long),
    )


def time_waits(request: CurveRequest) -> list[tuple[float, float]]:
    """Seconds of computing, and of a small collective after it, by `STRETCHES`; all ranks of the process group must call."""
    mine = next((group for group in request.groups if dist.get_rank() in group), None)
    made = {group: dist.new_group(list(group)) for group in request.groups}
    group = made[mine] if mine is not None else None
    once, usual = collective_call(request, mine, group)(WAITED), _ComputeStretch(mine is not None)
    assert once is not None  # a message
    blocks = [_time_block(once, usual.longer(k), group, request, repeats) for k, repeats in STRETCHES.items()]
    if group is not None:
        dist.destroy_process_group(group)
    return [(block.busy, block.seconds) for block in blocks]


@dataclass(frozen=True, slots=True)
class _Block:
    """Seconds of a collective, and before it of the computing that is the same each time, and of all."""

    seconds: float
    computing: float
    busy: float
    repeats: int


def _true_on_all_ranks(here: bool) -> bool:
    """Whether a condition holds on all ranks."""
    said = torch.tensor([int(here)])
    dist.all_reduce(said, op=dist.ReduceOp.MIN)
    return bool(said)


def _seconds_once(once: Callable[[], Any]) -> float:
    """Seconds of one call, of the slowest rank."""
    once()
    dist.barrier()
    begun = time.perf_counter()
    once()
    spent = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def _time_block(once: Callable[[], Any], stretch: _ComputeStretch, group: Any, request: CurveRequest, repeats: int) -> _Block:
    """Computing and the collective, several times: the mean over all ranks that take part, without the longest few. Where ranks
    take turns on cores, long times are the rule and not a disturbance: what one group loses another has won, so all count.
    Of what waits for nobody, the rank's own work counts."""
    dist.barrier()
    spent, computing, busy = [], [], []
    alone = request.collective in NON_WAITING
    crowd = 1.0 if alone else request.crowd
    for _ in range(repeats):
        begun, working = time.perf_counter(), time.thread_time()
        stretch.forget()
        ready = time.perf_counter()
        stretch()
        came, worked = time.perf_counter(), time.thread_time()
        once()
        done, own = time.perf_counter(), time.thread_time() - worked
        worked -= working
        spent.append(own if alone else done - came if crowd == 1 else done - begun - crowd * worked)
        computing.append(came - ready)
        busy.append(worked)
    sums = float(group is not None) * torch.tensor([spent, computing, busy, [1.0] * repeats], dtype=torch.float64)
    dist.all_reduce(sums)
    shared = (sums[:-1] / sums[-1]).tolist()
    mean = _mean_without_longest if crowd == 1 else statistics.mean
    return _Block(mean(shared[0]), statistics.mean(shared[1]), statistics.mean(shared[2]), repeats)


def _mean_without_longest(times: list[float]) -> float:
    """Without the longest few."""
    return statistics.mean(sorted(times)[: len(times) - len(times) // OUTLIERS])


class _ComputeStretch:
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

    def longer(self, times: int) -> _ComputeStretch:
        """So many times as much of both."""
        out = copy(self)
        out.times = times * self.times
        out.others = torch.zeros(2, min(times, MOST_FORGOTTEN) * self.others.shape[1])
        return out

    def forget(self) -> None:
        """Fill the caches with something else."""
        self.others[0].fill_(1.0)
        self.others[1].sum()

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix)


def measure_rates() -> dict[str, float]:
    """What one busy rank reaches: multiply-adds, copies, updates."""
    a, b = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    dist.barrier()
    product = _seconds(lambda: torch.mm(a, b))
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    copied = _seconds(lambda: target.copy_(source))
    small = torch.zeros(8)
    out = {"rate": 2 * MATRIX**3 / product, "bandwidth": 2 * COPIED / copied, "launch": _seconds(lambda: small.add(1.0))}
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
    return _mean_without_longest(times)
