"""Times of collectives between GPUs: what they take on the device, one after the other.

The device of every rank is put to sleep while the host queues the calls behind it, so that the host's launches do not count;
the first call brings the ranks together. Between GPUs no threads must be woken and no caches filled, so that nothing is
computed in between, unlike between processors (`collectives`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fourfold.calibrate.collective_calls import CurveRequest, collective_call
from fourfold.calibrate.gpu_kernels import CLOCK, MOST_SLEEP
from fourfold.runtime.comm.world import at_leave
from fourfold.runtime.host.devices import own_device

REPEATS, LEAST_REPEATS = 32, 2
BLOCK_SECONDS = 0.15  # a block of what takes long lasts about so long
SLOWEST = 3.0  # seconds: sizes that should take longer once are left out, there time grows with the bytes
LAUNCH = 1e-4  # seconds of sleep for each call that is queued

_GROUPS: dict[tuple[int, ...], Any] = {}
at_leave(_GROUPS.clear)


def time_gpu_collective(request: CurveRequest, sizes: Sequence[float], kind: str) -> list[tuple[float, float]]:
    """Bytes and seconds of a collective at growing sizes; all ranks of the process group must call."""
    device = own_device(kind)
    mine = next((group for group in request.groups if dist.get_rank() in group), None)
    for group in request.groups:  # communicators are kept: each takes a second to make
        if group not in _GROUPS:
            _GROUPS[group] = dist.new_group(list(group))
    run = collective_call(request, mine, _GROUPS[mine] if mine is not None else None, device)
    there = 0.5 if request.collective == "send" else 1.0
    points: list[tuple[float, float]] = []
    for size, larger in zip(sizes, (*sizes[1:], 0.0), strict=True):
        once = run(int(size))
        assert once is not None  # a message, not shared memory
        rough = _mean(_seconds(once, 1, device), mine is not None)
        repeats = max(LEAST_REPEATS, min(REPEATS, round(BLOCK_SECONDS / max(rough, 1e-9))))
        points.append((size, there * _mean(_seconds(once, repeats, device), mine is not None)))
        if len(points) > 1 and rough * larger / size > SLOWEST:  # the time of the first may be latency alone
            break
    return points


def _seconds(once: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds of one of several calls on this rank's device."""
    dist.all_reduce(torch.zeros(1))  # by gloo: hosts come together
    if device.type == "cpu":
        once()
        begun = time.perf_counter()
        for _ in range(repeats):
            once()
        return (time.perf_counter() - begun) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(LAUNCH * (repeats + 1), MOST_SLEEP) * CLOCK))
    once()
    start.record()
    for _ in range(repeats):
        once()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _mean(seconds: float, counts: bool) -> float:
    """The mean over the ranks that take part; by gloo, which leaves the devices alone."""
    sums = float(counts) * torch.tensor([seconds, 1.0], dtype=torch.float64)
    dist.all_reduce(sums)
    total, ranks = sums.tolist()
    return total / ranks
