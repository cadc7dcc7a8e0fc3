"""How fast a machine is just now: the time of the same piece of work, on as many ranks as it has cores.

Shared machines have slow minutes. A kernel timed in one of them would make every prediction too long, so kernels are told at
the pace of the better moments that the calibration saw, which looks again and again over a minute: times are multiplied by that
over the pace of their own moment, to a power. The work is arithmetic, which suffers most: where the machine took 1.6 times as
long for it, convolutions and products did by 1.45, kernels that move bytes or little else than enter autograd by 1.15.
Times compare only if they are told at one pace, so it is kept: later calibrations of the machine ask for it.
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

VERSION = 1  # of the file that keeps the pace
LOOKS = 10  # at the pace, each time a calibration asks
LEAST_FELT, MOST_FELT = 0.4, 0.9  # powers of the pace: of times without arithmetic, and of arithmetic alone


class MachineSpeed:
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


def at_reference_speed(arithmetic: float = 0.0) -> float:
    """The power of the pace by which a time changes, given the share of arithmetic in it."""
    return LEAST_FELT + (MOST_FELT - LEAST_FELT) * arithmetic


def machine_name() -> str:
    """Everything a pace depends on."""
    return f"{_processor()} {usable_cores()} cores torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def kept_pace() -> float:
    """The pace at which times of this machine were told until now; 0 if none were, or if its file is damaged."""
    name = machine_name()
    found = read_cached(pace_file(name), VERSION)
    seconds = found.get("seconds") if found is not None and found.get("about") == name else None
    return seconds if isinstance(seconds, float) else 0.0


def keep_pace(pace: float) -> None:
    name = machine_name()
    write_cached(pace_file(name), VERSION, {"about": name, "seconds": pace})


def by_host() -> list[list[int]]:
    """The ranks of each host. All ranks must call."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host_of_this_process())
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def with_a_core_each(hosts: list[list[int]]) -> tuple[list[list[int]], Any]:
    """By host, as many of its ranks as it has cores; and the group of all of them. All ranks must call."""
    found = [ranks[: usable_cores()] for ranks in hosts]
    return found, dist.new_group(sorted(rank for ranks in found for rank in ranks))


def measure_speed() -> float:
    """The pace of this rank's host, 0 on ranks that have no core of their own; all ranks must call."""
    crowd, group = with_a_core_each(by_host())
    times = []
    if any(dist.get_rank() in ranks for ranks in crowd):
        work = MachineSpeed()
        for _ in range(1 + LOOKS):
            dist.barrier(group)
            times.append(work())
        dist.destroy_process_group(group)
    dist.barrier()
    return statistics.median(times[1:]) if times else 0.0
