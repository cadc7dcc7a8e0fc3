"""Measured peak bytes of one training step on this rank.

On CPU the peak is that of the allocator's events of one profiled step, on CUDA `max_memory_allocated`. Neither is the
resident size of the process, which also holds the interpreter, libraries and memory that was freed but kept.

Blocks are followed by address: the caller names those alive before the step (`held`), and a free counts only if its block was
counted. The profiler does not report a free whose allocation it did not see, so a step runs under it before the measured one:
the gradients that the measured step frees are then known to it.

The profiler follows the threads of autograd and of gloo, but does not see what a gloo thread frees after the collective is
done. A collective's buffers are held by its `Work`, which the waiting thread and the gloo thread hold; whichever releases it
last frees them, and the scheduler may delay the gloo thread. Buffers freed there would count until another block takes their
address, so the peak would be too high by chance (a small gpt2 under filter splitting: up to 4 % in 30 runs, then 0 in 25). In a
measured step each wait therefore lasts until no gloo thread runs (`wait_for_gloo`), and the bytes repeat. Other steps do not
pay for that.

Left out: memory that is not the allocator's (gloo's own buffers, shared memory, unless `held` lists tensors in it), what
threads started by the user's Python code allocate, and the moment by which gloo's threads outlast a wait in other steps.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

_THREADS = "/proc/self/task"
_NAME = "pt_gloo"  # of the threads that run gloo's collectives
_NAP = 50e-6  # seconds
MARK = "fourfold: measured step"
Block = tuple[int, int, int]  # time in ns, address, bytes: positive where allocated, negative where freed


def measured_peak(
    run: Callable[[], T],
    *,
    held: Callable[[], Iterable[Tensor]],
    warm_up: int = 1,
    device: torch.device | None = None,
) -> tuple[T, int]:
    """What the last of `warm_up` + 1 calls of `run` returned, and the peak of bytes alive during it.

    `held` names the tensors alive when that call begins (parameters, optimizer state, inputs, buffers; gradients are
    found under their parameters) and is asked then, when the earlier calls have made them. CUDA's allocator knows them.
    """
    if device is not None and device.type == "cuda":
        return _cuda_peak(run, warm_up, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces every start and stop on stderr
    gc.collect()
    with wait_for_gloo(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        for _ in range(warm_up):
            run()
        alive = _storages(held())
        with record_function(MARK):
            result = run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    return result, _peak(alive, profiler.profiler.kineto_results.experimental_event_tree())


def _cuda_peak(run: Callable[[], T], warm_up: int, device: torch.device) -> tuple[T, int]:
    for _ in range(warm_up):
        run()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each storage."""
    out: dict[int, int] = {}
    for tensor in tensors:
        for part in (tensor, tensor.grad if tensor.is_leaf else None):
            if part is not None and part.device.type != "meta":
                storage = part.untyped_storage()
                out[storage.data_ptr()] = storage.nbytes()
    return out


def _peak(alive: dict[int, int], tree: list[Any]) -> int:
    """The largest sum of blocks alive from the mark on. A block at an address still counted replaces it: its free was not
    seen.
    """
    begun = next(event.start_time_ns for event in _events(tree) if event.name == MARK)
    blocks = sorted((block for block in _blocks(tree) if block[0] >= begun), key=lambda block: block[0])
    total = peak = sum(alive.values())
    for _, address, size in blocks:
        total -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            total += size
        peak = max(peak, total)
    return peak


def _blocks(tree: list[Any]) -> Iterator[Block]:
    for event in _events(tree):
        kind, fields = event.typed
        if kind == torch._C._profiler._EventType.Allocation and fields.device.type == "cpu":
            yield event.start_time_ns, fields.ptr, fields.alloc_size


def _events(tree: list[Any]) -> Iterator[Any]:
    """All events of all threads, in no particular order."""
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        yield event


@contextlib.contextmanager
def wait_for_gloo() -> Iterator[None]:
    """Inside, every `Work.wait` of this process returns only when no gloo thread runs; without /proc nothing changes."""
    if not (dist.is_available() and dist.is_initialized() and os.path.isdir(_THREADS)):
        yield
        return
    work: Any = dist.Work
    plain = work.wait

    def wait(self: Any, *args: Any) -> Any:
        done = plain(self, *args)
        while any(map(_is_busy_gloo_thread, os.listdir(_THREADS))):
            time.sleep(_NAP)
        return done

    work.wait = wait
    try:
        yield
    finally:
        work.wait = plain


def _is_busy_gloo_thread(thread: str) -> bool:
    """Whether a thread of this process belongs to gloo and runs."""
    try:
        with open(f"{_THREADS}/{thread}/stat") as file:
            _, _, named = file.read().partition("(")
    except OSError:  # the thread has ended
        return False
    name, _, state = named.rpartition(") ")
    return name.startswith(_NAME) and state.startswith("R")
