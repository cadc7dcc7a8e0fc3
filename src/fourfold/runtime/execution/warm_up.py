"""The stages of a rank run once on zeros before its first messages between stages.

CUDA loads a kernel when it is first launched, and may wait for all that the device is doing before it does so: for a message,
too, whose peer may be waiting for this rank. So every kernel is launched once while no message is under way. A warm-up's
results are dropped; weights, buffers and random numbers stay as they were. Ranks of a stage warm up together, since they have
collectives in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fourfold.runtime.execution.runner import Runner


def warm_up(runner: Runner, tensors: Mapping[str, Tensor], *, backward: bool) -> None:
    """Run every stage of this rank, at every size of its micro-batches. `tensors`: inputs and targets of a step."""
    records, runner.journal.records = runner.journal.records, None
    for index, executor in runner.executors.items():
        buffers = {p.name for p in executor.program.graph.parameters if p.buffer} & executor.state.keys()
        before = {name: executor.state[name].clone() for name in buffers}
        feeds = dict(zip(runner.plan.sizes, runner.feeder.feeds_of(index, tensors), strict=True))
        for size, feed in feeds.items():
            executor.begin()
            _run(runner, index, size, feed, backward=backward)
            executor.buffer_updates.clear()
            if backward:
                executor.finish()
        for name, value in before.items():  # some ops write buffers in place
            executor.state[name].copy_(value)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    runner.journal.records = records


def _run(runner: Runner, index: int, size: int, feed: Mapping[str, Tensor], *, backward: bool) -> None:
    """Forward and backward of one micro-batch."""
    lowered, executor = runner.lowered, runner.executors[index]
    read = dict.fromkeys(c.value for c in lowered.crossings if c.target == index)
    received = {name: _zeros(runner, index, name, size, differentiable=backward and name in lowered.cut.live) for name in read}
    with torch.set_grad_enabled(backward):
        out = executor.forward({**feed, **received}, size)
    if not backward:
        return
    sent = dict.fromkeys(c.value for c in lowered.crossings if c.source == index)
    loss = lowered.parts[index].graph.loss
    ends = [out[name] for name in (*sent, *([loss] if loss else [])) if name in lowered.cut.live or name == loss]
    starts: list[Any] = [tensor for tensor in ends if tensor.requires_grad]
    executor.backward(starts, [torch.zeros_like(tensor) for tensor in starts], size)


def _zeros(runner: Runner, index: int, name: str, size: int, *, differentiable: bool) -> Tensor:
    """A tensor that a stage receives, all zero."""
    layout = runner.lowered.stage_tensor(index, name, size).layout
    shape = layout.local_shape(runner.executors[index].world.coords)
    zeros = torch.zeros(shape, dtype=runner.transport.dtype(name), device=runner.device)
    return zeros.requires_grad_() if differentiable else zeros
