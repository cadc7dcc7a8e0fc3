"""The other ranks that torchrun started on this host: which of them has died or is stopped, and which one says so.

torchrun starts all ranks of a host as its children and ends the others when one has failed. Only one rank reports the
failure: the first to create a marker file in torchrun's folder of error files.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from fourfold.errors import WorkerFailed
from fourfold.runtime.host.processes import child_pids, environment_variable, exit_with_parent, is_alive, is_stopped

DEATH_SECONDS = 1.0  # the connection to a dying process closes before it is seen to be dead
_MARK = "failure-reported"


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def exit_with_torchrun() -> None:
    """Exit when torchrun ends; raise if it has ended already."""
    exit_with_parent(os.getppid(), by_signal=True)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(address, timeout=10).close()
        except OSError as error:
            raise WorkerFailed(f"there is no torchrun at {address[0]}:{address[1]}: {error.strerror or error}") from error


def lost_rank(wait: float = DEATH_SECONDS) -> WorkerFailed | None:
    """The error of a rank of this host that has died or is stopped; polls for `wait` seconds."""
    if not started_by_torchrun() or not _torchrun_is_parent():
        return None
    until = time.monotonic() + wait
    while True:
        found = _find_lost_rank()
        if found is not None or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _torchrun_is_parent() -> bool:
    """Whether torchrun itself is the parent of the ranks, so that those that are not to be seen are dead: a script around each
    rank hides them, and so does a system without /proc."""
    try:
        line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torchrun" in line or b"torch.distributed" in line or b"torch/distributed" in line


def _find_lost_rank() -> WorkerFailed | None:
    parent, first, count = os.getppid(), _number("RANK") - _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    process = {environment_variable(pid, "RANK"): pid for pid in child_pids(parent) if is_alive(pid)}
    ranks = range(first, first + count)
    dead = [rank for rank in ranks if str(rank) not in process]
    if dead:
        return WorkerFailed(f"rank {dead[0]} died; torchrun says how, and stops the others")
    for rank in ranks:
        if is_stopped(process[str(rank)]):
            return WorkerFailed(f"rank {rank} (process {process[str(rank)]}) is stopped; the others waited for it in vain")
    return None


def claim_failure_report() -> bool:
    """Whether this rank shall report the failure: true for the first rank of the host that calls."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not started_by_torchrun() or not file:
        return True
    try:
        os.close(os.open(Path(file).parents[1] / _MARK, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # no folder, no room: better said twice than not at all
        return True
    return True


def _number(name: str) -> int:
    return int(os.environ[name])
