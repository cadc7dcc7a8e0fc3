"""Small sums and gathers between ranks of one host through shared memory, where a socket's latency would cost more than
the data.

Batch norm exchanges a few hundred numbers fifty times each way in a step; over loopback sockets that is a tenth of the
step. A board is a piece of shared memory: every rank writes its row, then its counter; a row is read once all counters
have reached the round. Two buffers alternate: a rank reaches round n+2 only after all have reached n+1, that is, have
read round n. Writers' stores become visible in order on x86 alone, so other machines keep to sockets. Ranks in different
network namespaces count as different hosts.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import uuid

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


def _host() -> str:
    """What ranks that can share memory have in common."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {namespace}"
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
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        usable = platform.machine() in ("x86_64", "AMD64") and os.path.isdir(_FOLDER)
        facts: list[object] = [None] * count
        dist.all_gather_object(facts, (_host() if usable else f"none {uuid.uuid4()}", str(uuid.uuid4())), group=group)
        if len({fact[0] for fact in facts}) != 1:  # type: ignore[index]
            return None
        path = os.path.join(_FOLDER, f"fourfold-{facts[0][1]}")  # type: ignore[index]
        size = count * _LINE + 2 * count * CAPACITY
        if rank == 0:
            with open(path, "wb") as file:
                file.truncate(size)
        dist.barrier(group)
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        dist.barrier(group)
        if rank == 0:
            os.unlink(path)  # the mappings keep it; nothing is left behind
        return Board(memory, rank, count, timeout)

    def gather(self, row: Tensor) -> Tensor:
        """All ranks' rows, stacked in rank order."""
        self.round += 1
        size = row.numel() * row.element_size()
        rows = self._rows[self.round % 2]
        rows[self.rank, :size].view(row.dtype).copy_(row.reshape(-1))
        self._counters[self.rank] = self.round
        self._wait()
        return rows[:, :size].contiguous().view(row.dtype).view(self.count, *row.shape)

    def _wait(self) -> None:
        counters, target, spins, deadline = self._counters, self.round, 0, 0.0
        while int(counters.min()) < target:
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(min(_NAP * (spins // _SPINS), 1e-3))
            if spins % _SPINS == 0:
                now = time.monotonic()
                deadline = deadline or now + self.timeout
                if now > deadline:
                    late = [k for k in range(self.count) if int(counters[k]) < target]
                    raise WorkerFailed(f"ranks {late} of a group did not take part within {self.timeout:.0f} s")
