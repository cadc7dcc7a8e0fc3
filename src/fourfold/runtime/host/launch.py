"""Local ranks: worker processes joined by gloo that run functions together and report the first failure.

Workers are spawned once and reused. When one raises, dies or stops, the others are ended at once (they would wait in a
collective for ever) and the error names the rank at fault, with its traceback where it has one. Workers end when their
parent does, and what they share on disk has no name: whoever is killed, nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import IO, Any

from fourfold.errors import Error, InvalidInput, WorkerFailed
from fourfold.runtime.host.devices import PROCESSORS, RankDevices, init_process_group, take_device
from fourfold.runtime.host.processes import exit_with_parent, is_stopped
from fourfold.runtime.host.scratch import path_of, temporary_file

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",  # keep freed memory: page faults cost a step more than the memory is worth
    "MALLOC_TRIM_THRESHOLD_": "10000000000",
    "GLOO_SOCKET_IFNAME": "lo",
}

DEATH_SECONDS = 0.3
LOOK_SECONDS = 0.5  # between two looks for a rank that is stopped
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of mallopt(3)


def keep_memory() -> None:
    """For ranks that others have started: keep freed memory as local ranks do. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def collective_seconds() -> float:
    """How long a rank waits for another: FOURFOLD_TIMEOUT, or five minutes."""
    text = os.environ.get("FOURFOLD_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InvalidInput(f"FOURFOLD_TIMEOUT is {text!r}; give the seconds a rank waits for another, as in 300")
    return seconds


class LocalRanks:
    """A pool of `count` local ranks. ``ranks(function, *args)`` runs it on all and returns their results in rank order."""

    def __init__(self, count: int, *, timeout: float = 600.0, devices: RankDevices = PROCESSORS) -> None:
        self.count, self.timeout, self.devices = count, timeout, devices
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._store: IO[bytes] | None = None
        self._sender: threading.Thread | None = None

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        collective_seconds()  # refused here, before every rank does
        context = mp.get_context("spawn")
        self._store = temporary_file()
        link = (os.getpid(), threading.current_thread() is threading.main_thread())
        with _interrupts_blocked(), _environment({k: os.environ.get(k, v) for k, v in _ENVIRONMENT.items()}):
            for rank in range(self.count):
                ours, theirs = context.Pipe()
                arguments = (rank, self.count, path_of(self._store), self.devices, theirs, *link)
                worker = context.Process(target=_serve, args=arguments, daemon=True)
                worker.start()
                theirs.close()
                self._workers.append(worker)
                self._pipes.append(ours)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        results: dict[int, Any] = {}
        try:
            if not self._workers:
                self._start()
            self._send([bytes(ForkingPickler.dumps((function, args))) for _ in self._pipes])
            while len(results) < self.count:
                self._collect(results)
        except BaseException:
            self.close(at_once=True)
            raise
        return [results[rank] for rank in range(self.count)]

    def _send(self, messages: list[bytes]) -> None:
        """Send each rank its message from a thread: a stopped rank reads nothing, and sending to it would block."""
        self._sender = threading.Thread(target=_send_all, args=(list(self._pipes), messages), daemon=True)
        self._sender.start()

    def _collect(self, results: dict[int, Any]) -> None:
        waiting = {self._pipes[r]: r for r in range(self.count) if r not in results}
        for pipe in self._wait_for_answers(waiting):
            rank = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                raise self._death_error(rank) from None
            if kind == "done":
                results[rank] = value
            elif kind == "refused" and not isinstance(value, WorkerFailed):
                raise value
            else:
                time.sleep(DEATH_SECONDS)  # a rank that lost its peer often speaks before the peer is known to be dead
                raise self._lost_rank_error() or (value if kind == "refused" else WorkerFailed(f"rank {rank} failed:\n{value}"))

    def _wait_for_answers(self, waiting: dict[Any, int]) -> list[Any]:
        """The pipes of ranks that have answered or ended. A rank counts as stopped after a number of polls, not of seconds:
        after Ctrl-Z, which stops all processes, none is reported."""
        begun, stopped, limit = time.monotonic(), Counter[int](), collective_seconds()
        while not (ready := mpc.wait(list(waiting), timeout=LOOK_SECONDS)):
            for rank in waiting.values():
                stopped[rank] = stopped[rank] + 1 if is_stopped(self._workers[rank].pid) else 0
            late = time.monotonic() - begun > self.timeout
            if late or max(stopped.values()) * LOOK_SECONDS > limit:
                ranks = ", ".join(map(str, sorted(waiting.values())))
                what = f"rank{'s' * (len(waiting) > 1)} {ranks} gave no answer within {self.timeout:.0f} s"
                raise self._lost_rank_error() or WorkerFailed(what)
        return ready

    def _lost_rank_error(self) -> WorkerFailed | None:
        """The error of the rank that has died, or else is stopped: the rank that raised may only have waited for it."""
        for rank, worker in enumerate(self._workers):
            if not worker.is_alive():
                return self._death_error(rank)
        for rank, worker in enumerate(self._workers):
            if is_stopped(worker.pid):
                waited = f"the others waited {min(collective_seconds(), self.timeout):g} s for it (FOURFOLD_TIMEOUT)"
                return WorkerFailed(f"rank {rank} (process {worker.pid}) is stopped; {waited}")
        return None

    def _death_error(self, rank: int) -> WorkerFailed:
        self._workers[rank].join(5)
        return WorkerFailed(f"rank {rank} died ({_exit_text(self._workers[rank].exitcode)}); the others were stopped")

    def close(self, *, at_once: bool = False) -> None:
        """End the workers. Idle ones exit when their pipe closes; `at_once` kills them."""
        for worker in self._workers if at_once else ():
            worker.kill()
        if self._sender is not None:
            self._sender.join(5)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for worker in self._workers:
            worker.join(0.2)
            if worker.is_alive():
                worker.kill()
            worker.join(5)
        self._workers, self._pipes, self._sender = [], [], None
        if self._store is not None:
            with contextlib.suppress(FileNotFoundError):  # where it has a name, the last rank may have removed it
                self._store.close()


def _send_all(pipes: list[Any], messages: list[bytes]) -> None:
    for pipe, message in zip(pipes, messages, strict=True):
        with contextlib.suppress(OSError):  # that rank has died: its pipe says so to whoever reads
            pipe.send_bytes(message)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (": out of memory?" if -code == signal.SIGKILL else "")
    return f"exit code {code}"


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C reaches the whole group of processes. Workers begin with it blocked, and leave it to the parent, which ends them;
    one that comes meanwhile reaches the parent afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _serve(rank: int, count: int, store: str, devices: RankDevices, pipe: Any, parent: int, by_signal: bool) -> None:
    """A worker's life: join the group, then run what comes until the parent is gone."""
    exit_with_parent(parent, by_signal=by_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.stdin = open(os.devnull)  # noqa: SIM115
    joined = _call_outcome(_join, (rank, count, store, devices))
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:
            function, args = _raise, (traceback.format_exc(),)
        _reply(pipe, _call_outcome(function, args) if joined[0] == "done" else joined)


def _join(rank: int, count: int, store: str, devices: RankDevices) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=collective_seconds())
    shared = dist.FileStore(store, count)  # type: ignore[attr-defined]
    device = take_device(devices, rank, rank)
    init_process_group(device, store=shared, rank=rank, world_size=count, timeout=timeout)


def _call_outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return ("done", function(*args))
    except Error as error:
        return ("refused", error)
    except BaseException:
        return ("failed", traceback.format_exc())


def _reply(pipe: Any, answer: tuple[str, Any]) -> None:
    try:
        message = ForkingPickler.dumps(answer)
    except Exception:
        message = ForkingPickler.dumps(("failed", traceback.format_exc()))
    try:
        pipe.send_bytes(message)
    except OSError:
        os._exit(0)


def _raise(text: str) -> None:
    raise RuntimeError(text)
