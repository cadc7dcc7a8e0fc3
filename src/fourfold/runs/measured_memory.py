"""Measured peak bytes of one training step on this rank.

On CPU the peak is that of the allocator's events of one profiled step, on CUDA `max_memory_allocated`. Neither is the
resident size of the process, which also holds the interpreter, libraries and memory that was freed but kept.

Blocks are followed by address: those alive before the step are named by the caller (`held`), and a free counts only if
the block was counted. This matters, because the profiler says nothing of a free whose allocation it did not see; a step
before the measured one, under the same profiler, makes the gradients that the measured step drops known to it.

Profiling is per thread and handed on by autograd and gloo to theirs, but what gloo's threads free after a message is
through goes unseen: a measured step waits for them (`wait_for_gloo`), and so gives the same bytes each time.

Left out: memory that is not the allocator's (gloo's own buffers, shared memory, unless `held` lists tensors in it), what
Python threads started by hand allocate, and the moment by which gloo's threads may outlast a wait in other steps.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fourfold.runs.gloo_buffers import wait_for_gloo

T = TypeVar("T")

MARK = "fourfold: measured step"
Block = tuple[int, int, int]  # time in ns, address, bytes: positive where allocated, negative where freed


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under tensors and their gradients."""
    return sum(_storages(tensors).values())


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
