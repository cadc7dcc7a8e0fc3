"""The state of other processes (alive, stopped), and how a process exits with its parent.

States are read from /proc. Without it (macOS) no process counts as stopped, and only a thread notices that the parent ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_SECONDS = 1.0  # between two looks for the parent
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def exit_with_parent(parent: int, *, by_signal: bool) -> None:
    """Exit when the parent process ends, whatever this one computes.

    `by_signal`: let the kernel kill it. The kernel does so when the *thread* that started this process ends, so only the
    children of a main thread may ask for it. The thread's first look finds a parent that was gone before.
    """
    if by_signal:
        with contextlib.suppress(OSError, AttributeError):  # prctl is Linux's own
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(parent,), name="fourfold-parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def is_stopped(pid: int | None) -> bool:
    """Whether SIGSTOP, a terminal or a debugger holds a process."""
    return _status(str(pid))[0] in ("T", "t")


def is_alive(pid: int) -> bool:
    """Whether a process runs or could; one that has ended and waits for its parent to notice does not."""
    return _status(str(pid))[0] not in ("", "Z", "X")


def child_pids(parent: int) -> Iterator[int]:
    """The processes that another has started and that it has not yet seen ending."""
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit() and _status(entry)[1] == parent:
            yield int(entry)


def environment_variable(pid: int, name: str) -> str | None:
    """A variable of the environment a process was started with; None if it has none or is gone."""
    with contextlib.suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = item.partition(b"=")
            if key == name.encode():
                return os.fsdecode(value)
    return None


def _status(pid: str) -> tuple[str, int]:
    """State and parent of a process; empty and 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return "", 0
    return fields[0], int(fields[1])
