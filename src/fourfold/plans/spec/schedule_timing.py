"""How long a schedule takes with given stage times: its cells are replayed alone, before any program exists.

`stream`: transfers cost nothing (asynchronous devices). `blocking`: the receiver waits while a micro-batch arrives, the
sender does not (if both waited, BaPipe's 138.5 would be 168). `overlapped`: a transfer takes its time on the link, behind
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fourfold.plans.spec.schedule import Schedule, ScheduleCell, dependencies

Transfers = Literal["stream", "blocking", "overlapped"]


def makespan(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], transfer: float, transfers: Transfers
) -> float:
    """The time of one mini-batch: `forward[s]` and `backward[s]` per micro-batch, `transfer` per stage boundary."""
    ends: dict[ScheduleCell, float] = {}
    free = [0.0] * schedule.ranks
    at = [0] * schedule.ranks
    while any(at[r] < len(row) for r, row in enumerate(schedule.rows)):
        before = list(at)
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and _ready(schedule, row[at[rank]], ends):
                cell = row[at[rank]]
                free[rank] = _end(schedule, cell, ends, free[rank], forward, backward, transfer, transfers)
                ends.update({half: free[rank] for half in cell.halves})
                at[rank] += 1
        if at == before:
            raise ValueError(f"schedule {schedule.name} waits for ever")
    return max(free)


def _ready(schedule: Schedule, cell: ScheduleCell, ends: dict[ScheduleCell, float]) -> bool:
    return all(n in ends for half in cell.halves for n in dependencies(schedule, half))


def _end(
    schedule: Schedule,
    cell: ScheduleCell,
    ends: dict[ScheduleCell, float],
    free: float,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
    transfers: Transfers,
) -> float:
    start, received = free, 0
    for half in cell.halves:
        for need in dependencies(schedule, half):
            crossing = need.stage % schedule.ranks != half.stage % schedule.ranks
            start = max(start, ends[need] + (transfer if crossing and transfers == "overlapped" else 0.0))
            received += crossing
    if transfers == "blocking":
        start += transfer * received
    s = cell.stage
    if cell.kind == "FB":  # one fused slot, whether or not both halves have work
        return start + forward[s] + backward[s]
    return start + (forward[s] if cell.kind == "F" else backward[s])
