"""Shared memory between the ranks of one host, and small gathers through it.

Batch norm exchanges a few hundred numbers fifty times each way in a step. Over loopback sockets that is a tenth of the step,
because a socket's latency costs more than the data. `SharedRows` gathers such rows through memory instead, in the steps (1) to
(4) that the package's docstring draws. Only x86 makes stores visible in order, so other machines use sockets. Ranks in
different network or process namespaces count as different hosts.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import time
import uuid
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import InvalidInput, WorkerFailed
from fourfold.runtime.host.scratch import path_of, temporary_file

_LINE = 64  # bytes: one counter per cache line
_FOLDER = "/dev/shm"
_RESERVE = 4 * 2**20  # bytes of shared memory left out of every plan: for `SharedRows`, and for other programs
_SPINS = 100  # polls before sleeping between polls: where ranks share cores, the late rank needs the core
_SLEEP = 50e-6  # seconds


def shared_memory(group: dist.ProcessGroup, size: int) -> mmap.mmap:
    """Zeroed memory shared by all ranks of a group on one host; all must call. If one rank cannot map it, all ranks raise.

    The file has no name. The first rank holds it open until the others have mapped it."""
    file = _allocate_file(size) if dist.get_rank(group) == 0 else None
    path = [path_of(file) if file is not None else None]
    dist.broadcast_object_list(path, group=group, group_src=0)
    memory = _map_file(path[0], size) if path[0] is not None else None
    mapped: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(mapped, memory is not None, group=group)
    if file is not None:
        file.close()
    if memory is None or not all(mapped):
        raise InvalidInput(
            f"the ranks of a host cannot share {size} bytes of memory: {_FOLDER} has {free_bytes()} left; give "
            "it more room, or set FOURFOLD_SOCKETS=1"
        )
    return memory


def shareable_host() -> str:
    """A name that is equal on ranks that can share memory; unique to this rank where it can share none."""
    usable = platform.machine() in ("x86_64", "AMD64") and os.path.isdir(_FOLDER) and not os.environ.get("FOURFOLD_SOCKETS")
    return host_of_this_process() if usable else f"none {uuid.uuid4()}"


def free_bytes() -> int:
    """Bytes of memory that a plan may share on this host."""
    try:
        disk = os.statvfs(_FOLDER)
    except OSError:
        return 0
    return max(disk.f_bavail * disk.f_frsize - _RESERVE, 0)


def tensor_at(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """A tensor at a byte offset of shared memory, on a storage of just its size."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _allocate_file(size: int) -> IO[bytes] | None:
    """A file with all its pages allocated: a full memory disk shows here, and not by a crash later."""
    file = None
    try:
        file = temporary_file(_FOLDER)
        os.posix_fallocate(file.fileno(), 0, size)
    except (OSError, InvalidInput):
        if file is not None:
            file.close()
        return None
    return file


def _map_file(path: str, size: int) -> mmap.mmap | None:
    """The first rank's file, mapped; None where this process may not open it."""
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None


def host_of_this_process() -> str:
    """A name that is equal on all processes of one host, one network namespace and one process namespace."""
    try:
        namespaces = f"{os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {namespaces} {os.stat(_FOLDER).st_dev}"
    except OSError:
        return f"unknown {uuid.uuid4()}"


class SharedRows:
    """Two rows of shared memory and a counter for each rank of one group."""

    def __init__(self, memory: mmap.mmap, rank: int, count: int, timeout: float, capacity: int) -> None:
        self.rank, self.count, self.timeout, self.round = rank, count, timeout, 0
        data = np.frombuffer(memory, dtype=np.uint8)
        self._counters = data[: count * _LINE].view(np.int64)[:: _LINE // 8]
        self._rows = torch.from_numpy(data[count * _LINE :]).view(2, count, capacity)

    @staticmethod
    def open(group: dist.ProcessGroup, timeout: float, capacity: int) -> SharedRows:
        """Rows of `capacity` bytes, for a group on one host; all ranks must call."""
        count, capacity = dist.get_world_size(group), max(-(-capacity // _LINE), 1) * _LINE
        memory = shared_memory(group, count * _LINE + 2 * count * capacity)
        return SharedRows(memory, dist.get_rank(group), count, timeout, capacity)

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self.round += 1
        self._wait_for_all()

    def gather(self, row: Tensor) -> Tensor:
        """All ranks' rows, stacked in rank order."""
        self.round += 1
        size = row.numel() * row.element_size()
        rows = self._rows[self.round % 2]
        rows[self.rank, :size].view(row.dtype).copy_(row.reshape(-1))  # step (1)
        self._wait_for_all()
        return rows[:, :size].clone().view(row.dtype).view(self.count, *row.shape)  # step (4)

    def _wait_for_all(self) -> None:
        self._counters[self.rank] = self.round  # step (2)
        wait_for(self._counters, self.round, self.timeout)  # step (3)


def wait_for(counters: Any, target: int, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until every rank's counter has reached `target`; `meanwhile` is called between polls."""
    polls, deadline = 0, 0.0
    while int(counters.min()) < target:
        meanwhile()
        polls += 1
        if polls < _SPINS:
            os.sched_yield()
            continue
        time.sleep(min(_SLEEP * (polls // _SPINS), 1e-3))
        if polls % _SPINS == 0:
            now = time.monotonic()
            deadline = deadline or now + timeout
            if now > deadline:
                late = [k for k, reached in enumerate(counters) if int(reached) < target]
                raise WorkerFailed(f"ranks {late} of a group did not take part within {timeout:.0f} s")
