"""Local ranks: worker processes joined by gloo that run functions together and report the first failure.

Workers are spawned once and reused. When one raises or dies, the others are stopped at once (they would wait in a
collective for ever) and the error carries the failing rank's traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from fourfold.errors import Error, WorkerFailed

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",  # keep freed memory: page faults cost a step more than the memory is worth
    "MALLOC_TRIM_THRESHOLD_": "10000000000",
    "GLOO_SOCKET_IFNAME": "lo",
}

DEATH_SECONDS = 0.3
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of mallopt(3)


def keep_memory() -> None:
    """For ranks that others have started: keep freed memory as local ranks do. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


class Ranks:
    """A pool of `count` local ranks. ``ranks(function, *args)`` runs it on all and returns their results in rank order."""

    def __init__(self, count: int, *, timeout: float = 600.0) -> None:
        self.count, self.timeout = count, timeout
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = ""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="fourfold-")
        with _interrupts_ignored(), _environment({k: os.environ.get(k, v) for k, v in _ENVIRONMENT.items()}):
            for rank in range(self.count):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_serve, args=(rank, self.count, self._folder, theirs), daemon=True)
                worker.start()
                theirs.close()
                self._workers.append(worker)
                self._pipes.append(ours)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._workers:
            self._start()
        results: dict[int, Any] = {}
        try:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # died since: its pipe says so below
                    pipe.send((function, args))
            while len(results) < self.count:
                self._collect(results)
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(self.count)]

    def _collect(self, results: dict[int, Any]) -> None:
        waiting = {self._pipes[r]: r for r in range(self.count) if r not in results}
        ready = mpc.wait(list(waiting), timeout=self.timeout)
        if not ready:
            raise WorkerFailed(f"ranks {sorted(waiting.values())} gave no answer within {self.timeout:.0f} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                kind, value = self._pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                raise self._death(rank) from None
            if kind == "refused":
                assert isinstance(value, Error)
                raise value
            if kind == "failed":
                time.sleep(DEATH_SECONDS)  # a rank that lost its peer often speaks before the peer is known to be dead
                dead = [r for r, worker in enumerate(self._workers) if not worker.is_alive()]
                raise self._death(dead[0]) if dead else WorkerFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value

    def _death(self, rank: int) -> WorkerFailed:
        self._workers[rank].join(5)
        return WorkerFailed(f"rank {rank} died ({_ending(self._workers[rank].exitcode)}); the others were stopped")

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for worker in self._workers:
            worker.join(0.2)
            if worker.is_alive():
                worker.kill()
            worker.join(5)
        self._workers, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (": out of memory?" if -code == signal.SIGKILL else "")
    return f"exit code {code}"


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches the whole group of processes; started like this, workers leave it to the parent, which ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def _serve(rank: int, count: int, folder: str, pipe: Any) -> None:
    """A worker's life: join the group, then run what comes until the parent is gone."""
    import torch
    import torch.distributed as dist

    from fourfold.runtime.world import TIMEOUT

    torch.set_num_threads(1)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    store = dist.FileStore(  # type: ignore[attr-defined]
        os.path.join(folder, "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:
            function, args = _raise, (traceback.format_exc(),)
        try:
            answer = ("done", function(*args))
        except Error as error:
            answer = ("refused", error)
        except BaseException:
            answer = ("failed", traceback.format_exc())
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            os._exit(0)


def _raise(text: str) -> None:
    raise RuntimeError(text)
