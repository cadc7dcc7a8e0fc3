"""Small sums and gathers between ranks of one host through shared memory, where a socket's latency would cost more than
the data.

Batch norm exchanges a few hundred numbers fifty times each way in a step; over loopback sockets that is a tenth of the
step. A board is a piece of shared memory: every rank writes its row, then its counter; a row is read once all counters
have reached the round. Two buffers alternate: a rank reaches round n+2 only after all have reached n+1, that is, have
read round n. Writers' stores become visible in order on x86 alone, so other machines keep to sockets. Ranks in different
network namespaces count as different hosts.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import WorkerFailed

CAPACITY = 64 * 1024  # bytes per rank and buffer
_LINE = 64  # bytes: one counter per cache line
_FOLDER = "/dev/shm"
_SPINS = 100  # polls before sleeping between them: where ranks share cores, the late one needs them
_NAP = 50e-6  # seconds


def shared_memory(group: dist.ProcessGroup, size: int) -> mmap.mmap | None:
    """Zeroed memory that all ranks of a group see, or None if they do not share a host with room for it; all must call."""
    rank = dist.get_rank(group)
    if len(set(hosts(group))) != 1:
        return None
    name = [str(uuid.uuid4())]
    dist.broadcast_object_list(name, group=group, group_src=0)
    path = os.path.join(_FOLDER, f"fourfold-{name[0]}")
    room = [_reserved(path, size) if rank == 0 else False]
    dist.broadcast_object_list(room, group=group, group_src=0)
    if not room[0]:
        return None
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    dist.barrier(group)
    if rank == 0:
        os.unlink(path)  # the mappings keep it; nothing is left behind
    return memory


def hosts(group: dist.ProcessGroup) -> tuple[str, ...]:
    """The host of every rank of a group, one of its own for each where none can share memory; all must call."""
    usable = platform.machine() in ("x86_64", "AMD64") and os.path.isdir(_FOLDER) and not os.environ.get("FOURFOLD_SOCKETS")
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, host_of_this_process() if usable else f"none {uuid.uuid4()}", group=group)
    return tuple(out)


def viewed(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """A tensor in shared memory, on a storage of its own size."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _reserved(path: str, size: int) -> bool:
    """Make the file with all its pages, so that a full memory disk is noticed now and not by a crash later."""
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        if os.path.exists(path):
            os.unlink(path)
        return False
    return True


def host_of_this_process() -> str:
    """What ranks that can share memory have in common."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {namespace} {os.stat(_FOLDER).st_dev}"
    except OSError:
        return f"unknown {uuid.uuid4()}"


class Board:
    """Shared rows of the ranks of one group."""

    def __init__(self, memory: mmap.mmap, rank: int, count: int, timeout: float) -> None:
        self.rank, self.count, self.timeout, self.round = rank, count, timeout, 0
        whole = np.frombuffer(memory, dtype=np.uint8)
        counters = whole[: count * _LINE].view(np.int64)
        self._counters = counters[:: _LINE // 8]
        self._rows = torch.from_numpy(whole[count * _LINE :]).view(2, count, CAPACITY)

    @staticmethod
    def open(group: dist.ProcessGroup, timeout: float) -> Board | None:
        """A board for a group, or None if its ranks do not share a host; all ranks must call."""
        count = dist.get_world_size(group)
        memory = shared_memory(group, count * _LINE + 2 * count * CAPACITY)
        return Board(memory, dist.get_rank(group), count, timeout) if memory is not None else None

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
