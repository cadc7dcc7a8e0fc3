"""How fast a machine is now: the seconds of a fixed piece of work (its pace), on as many ranks as it has cores.

Shared machines have slow minutes, and a kernel timed in one of them would make every prediction too long. So times are
normalised to the pace of the faster quarter of the moments that the calibration saw: t (reference / now)^k, with k = 0.4 for
kernels that move bytes and 0.9 for arithmetic. The work is arithmetic, which slows down most: where it took 1.6 times as long,
convolutions and products took 1.45 times, kernels that mostly move bytes or enter autograd 1.15 times. Times compare only at
one pace, so the reference pace is stored, and later calibrations of the machine read it.
"""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.cluster.cache import pace_file, read_cached, write_cached
from fourfold.cluster.local import usable_cores
from fourfold.runtime.comm.shared.memory import host_of_this_process

VERSION = 1  # of the file that stores the pace
LOOKS = 10  # measurements of the pace, each time a calibration asks
LEAST_EXPONENT, MOST_EXPONENT = 0.4, 0.9  # exponents k: of times without arithmetic, and of arithmetic alone


class SpeedProbe:
    """The work: about ten milliseconds of one core."""

    def __init__(self) -> None:
        numbers = torch.linspace(0.1, 1.0, 4 * 64 * 32 * 32)
        self.image, self.weight = numbers.view(4, 64, 32, 32), numbers[: 64 * 64 * 9].view(64, 64, 3, 3)
        self.matrix = numbers[: 384 * 384].view(384, 384)

    def __call__(self) -> float:
        """Seconds it takes now."""
        begun = time.perf_counter()
        torch.conv2d(self.image, self.weight, padding=1)
        for _ in range(4):
            torch.mm(self.matrix, self.matrix)
        return time.perf_counter() - begun


def speed_exponent(arithmetic: float = 0.0) -> float:
    """The exponent k of a time, by the share of arithmetic in it."""
    return LEAST_EXPONENT + (MOST_EXPONENT - LEAST_EXPONENT) * arithmetic


def machine_name() -> str:
    """Everything a pace depends on."""
    return f"{_processor()} {usable_cores()} cores torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_pace() -> float:
    """The stored reference pace of this machine; 0 if there is none, or if its file is damaged."""
    name = machine_name()
    found = read_cached(pace_file(name), VERSION)
    seconds = found.get("seconds") if found is not None and found.get("about") == name else None
    return seconds if isinstance(seconds, float) else 0.0


def save_pace(pace: float) -> None:
    name = machine_name()
    write_cached(pace_file(name), VERSION, {"about": name, "seconds": pace})


def ranks_by_host() -> list[list[int]]:
    """The ranks of each host. All ranks must call."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host_of_this_process())
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def one_rank_per_core(hosts: list[list[int]]) -> tuple[list[list[int]], Any]:
    """By host, as many of its ranks as it has cores; and the process group of all these. All ranks must call."""
    found = [ranks[: usable_cores()] for ranks in hosts]
    return found, dist.new_group(sorted(rank for ranks in found for rank in ranks))


def measure_speed() -> float:
    """The pace of this rank's host, 0 on ranks that have no core of their own; all ranks must call."""
    crowd, group = one_rank_per_core(ranks_by_host())
    times = []
    if any(dist.get_rank() in ranks for ranks in crowd):
        work = SpeedProbe()
        for _ in range(1 + LOOKS):
            dist.barrier(group)
            times.append(work())
        dist.destroy_process_group(group)
    dist.barrier()
    return statistics.median(times[1:]) if times else 0.0
