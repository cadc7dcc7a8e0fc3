"""Processes that are killed or stopped while a command runs: two of the sixty faults of `make faults`, and one marked slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from faults import Fault, inject
from fourfold.errors import WorkerFailed
from fourfold.runtime.comm.shared.memory import shared_memory
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.host.processes import is_alive
from ranks import pool

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are looked at through /proc")

THREE = [
    (Fault(command="train", target="parent", kind="kill"), 2.0),
    pytest.param(Fault(command="verify", target="rank", kind="terminate", rank=1), 0.5, marks=pytest.mark.slow),
    (Fault(command="train", target="torchrun's rank", kind="kill", rank=1), 2.0),
]


@pytest.mark.parametrize(("fault", "moment"), THREE, ids=lambda value: str(value) if isinstance(value, Fault) else "")
def test_a_fault_is_named_and_leaves_nothing(fault: Fault, moment: float) -> None:
    found = inject(fault, moment) or inject(fault, moment / 10)
    assert found is not None, "the command had ended both times"
    assert found.wrong == ()


def stop_self(rank: int) -> None:
    """On a rank: the one that is named stops itself; the others wait a second for it."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier(group)


def test_a_stopped_rank_is_named_not_the_one_that_waits_for_it() -> None:
    with LocalRanks(2) as ranks, pytest.raises(WorkerFailed, match=r"rank 1 \(process \d+\) is stopped"):
        ranks(stop_self, 1)


def test_a_large_message_to_a_stopped_rank_does_not_hold_up_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalRanks(2) as ranks, pytest.raises(WorkerFailed, match=r"rank 0 \(process \d+\) is stopped; the others waited 1 s"):
        os.kill(ranks(os.getpid)[0], signal.SIGSTOP)
        monkeypatch.setenv("FOURFOLD_TIMEOUT", "1")
        ranks(len, bytes(10_000_000))


def names_in_shared_memory() -> list[str]:
    memory = shared_memory(dist.group.WORLD, 4096)
    assert memory is not None
    return [name for name in os.listdir("/dev/shm") if name.startswith("fourfold")]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is in /dev/shm")
def test_shared_memory_has_no_name_while_it_is_used() -> None:
    assert pool(2)(names_in_shared_memory) == [[], []]


def test_ranks_started_by_a_thread_outlive_it() -> None:
    with LocalRanks(1) as ranks:
        thread = threading.Thread(target=ranks, args=(os.getpid,))
        thread.start()
        thread.join()
        time.sleep(0.2)
        assert ranks(os.getpid) == [ranks._workers[0].pid]


COMPUTING = """
import os, sys, threading
from fourfold.runtime.host.launch import LocalRanks
def forever():
    print(os.getpid(), flush=True)
    import torch
    while True:
        torch.ones(2000, 2000) @ torch.ones(2000, 2000)
if __name__ == "__main__":
    thread = threading.Thread(target=LocalRanks(1), args=(forever,))
    LocalRanks(1)(forever) if sys.argv[1] == "main" else thread.start()
    thread.join()
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_rank_that_computes_ends_with_its_parent(thread: str, tmp_path: Path) -> None:
    script = tmp_path / "computing.py"
    script.write_text(COMPUTING)
    parent = subprocess.Popen([sys.executable, str(script), thread], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.stdout.close()
