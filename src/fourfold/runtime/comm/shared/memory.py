"""Small sums and gathers between ranks of one host through shared memory, where a socket's latency would cost more than
the data.

Batch norm exchanges a few hundred numbers fifty times each way in a step; over loopback sockets that is a tenth of the
step. A board is a piece of shared memory: every rank writes its row, then its counter; a row is read once all counters
have reached the round. Two buffers alternate: a rank reaches round n+2 only after all have reached n+1, that is, have
read round n. Writers' stores become visible in order on x86 alone, so other machines keep to sockets. Ranks in different
network or process namespaces count as different hosts.
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
_KEPT_FREE = 4 * 2**20  # bytes of shared memory that nobody plans with: boards, and what others take meanwhile
_SPINS = 100  # polls before sleeping between them: where ranks share cores, the late one needs them
_NAP = 50e-6  # seconds


def shared_memory(group: dist.ProcessGroup, size: int) -> mmap.mmap:
    """Zeroed memory that all ranks of a group, on one host, see; all must call. Refused on all where one does not get it.

    The file has no name. The first rank keeps it open until the others have mapped it."""
    file = _reserved(size) if dist.get_rank(group) == 0 else None
    place = [path_of(file) if file is not None else None]
    dist.broadcast_object_list(place, group=group, group_src=0)
    memory = _mapped(place[0], size) if place[0] is not None else None
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, memory is not None, group=group)
    if file is not None:
        file.close()
    if memory is None or not all(seen):
        raise InvalidInput(
            f"the ranks of a host cannot share {size} bytes of memory: {_FOLDER} has {free_bytes()} left; give "
            "it more room, or set FOURFOLD_SOCKETS=1"
        )
    return memory


def shareable_host() -> str:
    """What ranks that can share memory have in common; a name of its own for each where none can."""
    usable = platform.machine() in ("x86_64", "AMD64") and os.path.isdir(_FOLDER) and not os.environ.get("FOURFOLD_SOCKETS")
    return host_of_this_process() if usable else f"none {uuid.uuid4()}"


def free_bytes() -> int:
    """Bytes of memory that ranks of this host can plan to share."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return 0
    return max(found.f_bavail * found.f_frsize - _KEPT_FREE, 0)


def viewed(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """A tensor in shared memory, on a storage of its own size."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _reserved(size: int) -> IO[bytes] | None:
    """A file with all its pages, so that a full memory disk is noticed now and not by a crash later."""
    file = None
    try:
        file = temporary_file(_FOLDER)
        os.posix_fallocate(file.fileno(), 0, size)
    except (OSError, InvalidInput):
        if file is not None:
            file.close()
        return None
    return file


def _mapped(path: str, size: int) -> mmap.mmap | None:
    """The first rank's file; None where it does not let this process see it."""
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None


def host_of_this_process() -> str:
    """What ranks that can share memory have in common."""
    try:
        namespaces = f"{os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {namespaces} {os.stat(_FOLDER).st_dev}"
    except OSError:
        return f"unknown {uuid.uuid4()}"


class SharedRows:
    """Shared rows of the ranks of one group."""

    def __init__(self, memory: mmap.mmap, rank: int, count: int, timeout: float, capacity: int) -> None:
        self.rank, self.count, self.timeout, self.round = rank, count, timeout, 0
        whole = np.frombuffer(memory, dtype=np.uint8)
        counters = whole[: count * _LINE].view(np.int64)
        self._counters = counters[:: _LINE // 8]
        self._rows = torch.from_numpy(whole[count * _LINE :]).view(2, count, capacity)

    @staticmethod
    def open(group: dist.ProcessGroup, timeout: float, capacity: int) -> SharedRows:
        """A board for rows of so many bytes, for a group on one host; all ranks must call."""
        count, capacity = dist.get_world_size(group), max(-(-capacity // _LINE), 1) * _LINE
        memory = shared_memory(group, count * _LINE + 2 * count * capacity)
        return SharedRows(memory, dist.get_rank(group), count, timeout, capacity)

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.round += 1
        self._counters[self.rank] = self.round
        self._wait()

    def gather(self, row: Tensor) -> Tensor:
        """All ranks' rows, stacked in rank order."""
        self.round += 1
        size = row.numel() * row.element_size()
        rows = self._rows[self.round % 2]
        rows[self.rank, :size].view(row.dtype).copy_(row.reshape(-1))
        self._counters[self.rank] = self.round
        self._wait()
        return rows[:, :size].clone().view(row.dtype).view(self.count, *row.shape)

    def _wait(self) -> None:
        wait_for(self._counters, self.round, self.timeout)


def wait_for(counters: Any, target: int, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until every rank's counter has reached a number, doing something useful between looks."""
    spins, deadline = 0, 0.0
    while int(counters.min()) < target:
        meanwhile()
        spins += 1
        if spins < _SPINS:
            os.sched_yield()
            continue
        time.sleep(min(_NAP * (spins // _SPINS), 1e-3))
        if spins % _SPINS == 0:
            now = time.monotonic()
            deadline = deadline or now + timeout
            if now > deadline:
                late = [k for k, reached in enumerate(counters) if int(reached) < target]
                raise WorkerFailed(f"ranks {late} of a group did not take part within {timeout:.0f} s")
