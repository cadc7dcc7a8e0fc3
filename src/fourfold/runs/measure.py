"""Peak memory and, with stages, the waiting time of each rank, measured in a few more steps after a run.

Profiling slows a step down, so it is done after the timed steps. These steps train on, and nothing reads their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.runs.measured_memory import measured_peak
from fourfold.runtime.execution.runner import Runner
from fourfold.timeline import Event, Timeline


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's figures."""

    peak_bytes: int
    events: tuple[Event, ...]  # of one step
    staged: bool


def measure(running: Runner, optimizer: torch.optim.Optimizer | None, tensors: Mapping[str, Tensor]) -> Measured:
    """Up to three steps on whole inputs and targets, of which each rank keeps its own part alone; all ranks must call."""
    parts = {name: part.clone() for name, part in running.feeder.local_parts(tensors).items()}

    def step(record: bool = False) -> tuple[Event, ...]:
        outcome = running.forward_backward(parts, record=record)
        if optimizer is not None:
            optimizer.step()
        return tuple(outcome.events)

    def held() -> list[Tensor]:
        states = optimizer.state.values() if optimizer is not None else ()
        optimizer_tensors = (t for state in states for t in state.values() if isinstance(t, Tensor))
        return [*parts.values(), *running.persistent_tensors(), *optimizer_tensors]

    if dist.is_initialized():
        dist.barrier()
    events = step(record=True)
    _, peak = measured_peak(step, held=held, device=running.device)
    return Measured(peak_bytes=peak, events=events, staged=bool(running.plan.stages))


def waiting(parts: list[Measured]) -> tuple[float, ...]:
    """The share of a step each rank waits, from what all of them recorded; empty without stages."""
    timeline = Timeline.of(part.events for part in parts)
    return tuple(timeline.waiting(rank) for rank in range(len(parts))) if any(part.staged for part in parts) else ()
