"""Pipeline schedules as data: for every rank the order of its forwards and backwards, with a readable text form and one
validator.

A cell is written ``2F0``: stage 2, forward, micro-batch 0. Stage s runs on rank ``s mod ranks``; more stages than
ranks is the interleaved case. Names and memory are BaPipe's (arXiv 2012.12544): `1f1b-sno` keeps N-i micro-batches in
flight at stage i (of N, from 0), `1f1b-so` doubles the warm-up, so that a transfer hides behind the compute of another
micro-batch, and pays with 2(N-i)-1 in flight. The asynchronous schedules are planned and replayed, for devices that
stream transfers under compute; the runtime refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fourfold.errors import InvalidInput, nearest

Kind = Literal["F", "B", "FB"]


@dataclass(frozen=True, slots=True)
class ScheduleCell:
    """One forward or backward of one micro-batch on one stage, written ``1F0``. ``FB`` runs both at once
    (fbp-as).

    Lowering adds messages and sums around it: each then is a `StageAction` (`plans.lists.rank_schedule`), an entry of a rank's
    schedule. What one of those consists of on a stage is a list of `plans.lists.actions.Action`.
    """

    stage: int
    kind: Kind
    microbatch: int
    backward_microbatch: int = -1  # of the backward half of FB

    def __str__(self) -> str:
        halves = [f"{half.kind}{half.microbatch}" for half in self.halves if half.microbatch >= 0]
        return f"{self.stage}{''.join(halves) or '-'}"  # while a pipeline fills and empties, halves are idle

    @property
    def halves(self) -> tuple[ScheduleCell, ...]:
        """The plain cells this one consists of."""
        if self.kind != "FB":
            return (self,)
        return (ScheduleCell(self.stage, "F", self.microbatch), ScheduleCell(self.stage, "B", self.backward_microbatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The cells of every rank, in order."""

    name: str
    stages: int
    microbatches: int
    rows: tuple[tuple[ScheduleCell, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches a stage holds between forward and backward."""
        held = most = 0
        for cell in self.rows[stage % self.ranks]:
            if cell.stage != stage:
                continue
            for half in cell.halves:
                if half.microbatch >= 0:
                    held += 1 if half.kind == "F" else -1
                    most = max(most, held)
        return most

    def __str__(self) -> str:
        return text_grid(self.rows)


def text_grid(rows: tuple[tuple[ScheduleCell, ...], ...], marked: int | None = None) -> str:
    """Rows of cells, one rank a line; a faulty row is marked."""
    width = max((len(str(a)) for row in rows for a in row), default=3)
    lines = []
    for rank, row in enumerate(rows):
        mark = ">" if rank == marked else " "
        lines.append(f"{mark} rank {rank}: " + " ".join(f"{a!s:<{width}}" for a in row).rstrip())
    return "\n".join(lines)


def check(schedule: Schedule) -> None:
    """Refuse a schedule in which a cell is missing, repeated or out of order, or that would deadlock."""
    for rank, row in enumerate(schedule.rows):
        fault = _row_fault(schedule, rank, row)
        if fault:
            raise InvalidInput(f"schedule {schedule.name}, rank {rank}: {fault}\n{text_grid(schedule.rows, rank)}")
    done: set[tuple[int, Kind, int]] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and all(done.issuperset(_dependencies(schedule, h)) for h in row[at[rank]].halves):
                done.update((h.stage, h.kind, h.microbatch) for h in row[at[rank]].halves)
                at[rank] += 1
                moved = True
    stuck = next((r for r, row in enumerate(schedule.rows) if at[r] < len(row)), None)
    if stuck is not None:
        waiting = schedule.rows[stuck][at[stuck]]
        raise InvalidInput(
            f"schedule {schedule.name}: {waiting} on rank {stuck} waits for ever\n{text_grid(schedule.rows, stuck)}"
        )


def _row_fault(schedule: Schedule, rank: int, row: tuple[ScheduleCell, ...]) -> str:
    stages = range(rank, schedule.stages, schedule.ranks)
    kinds: tuple[Kind, ...] = ("F", "B")
    want = {(s, kind, m) for s in stages for kind in kinds for m in range(schedule.microbatches)}
    halves = [(h.stage, h.kind, h.microbatch) for cell in row for h in cell.halves if h.microbatch >= 0]
    at = {half: k for k, half in enumerate(halves)}
    if len(halves) != len(at):
        return f"{ScheduleCell(*next(h for h in halves if halves.count(h) > 1))} stands twice"
    if missing := [ScheduleCell(*half) for half in want - at.keys()]:
        return f"{min(missing, key=str)} is missing"
    if extra := [ScheduleCell(*half) for half in at.keys() - want]:
        return f"{min(extra, key=str)} does not belong here"
    early = next(((s, m) for s, kind, m in halves if kind == "B" and at[s, "F", m] > at[s, "B", m]), None)
    return f"{ScheduleCell(early[0], 'B', early[1])} comes before its forward" if early else ""


def dependencies(schedule: Schedule, cell: ScheduleCell) -> tuple[ScheduleCell, ...]:
    """The cells that must be done before a cell can start."""
    return tuple(ScheduleCell(*other) for other in _dependencies(schedule, cell))


def _dependencies(schedule: Schedule, cell: ScheduleCell) -> tuple[tuple[int, Kind, int], ...]:
    s, m = cell.stage, cell.microbatch
    if m < 0:
        return ()
    if cell.kind == "F":
        return ((s - 1, "F", m),) if s else ()
    return ((s, "F", m),) if s == schedule.stages - 1 else ((s, "F", m), (s + 1, "B", m))


def _rows_with_warmup(ranks: int, microbatches: int, warmup: Callable[[int], int]) -> tuple[tuple[ScheduleCell, ...], ...]:
    """Per rank, `warmup(stage)` forwards, then one forward and one backward in turn."""
    rows = []
    for stage in range(ranks):
        ahead = min(warmup(stage), microbatches)
        row = [ScheduleCell(stage, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                row.append(ScheduleCell(stage, "F", ahead + m))
            row.append(ScheduleCell(stage, "B", m))
        rows.append(tuple(row))
    return tuple(rows)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    rows = _rows_with_warmup(ranks, microbatches, lambda s: microbatches)
    return Schedule(name="gpipe", stages=ranks, microbatches=microbatches, rows=rows)


def one_f_one_b(ranks: int, microbatches: int, name: str = "1f1b-sno") -> Schedule:
    """Each backward as soon as its gradient can be there."""
    rows = _rows_with_warmup(ranks, microbatches, lambda s: ranks - 1 - s)
    return Schedule(name=name, stages=ranks, microbatches=microbatches, rows=rows)


def one_f_one_b_overlapped(ranks: int, microbatches: int) -> Schedule:
    """Twice the warm-up: between sending and needing a micro-batch lies the compute of another."""
    rows = _rows_with_warmup(ranks, microbatches, lambda s: 2 * (ranks - 1 - s))
    return Schedule(name="1f1b-so", stages=ranks, microbatches=microbatches, rows=rows)


def forward_backward_parallel(ranks: int, microbatches: int) -> Schedule:
    """Forward and backward of different micro-batches share the device at every moment."""
    rows = []
    for stage in range(ranks):
        lag = 2 * (ranks - stage) - 1
        row = []
        for slot in range(microbatches + lag):
            forward = slot if slot < microbatches else -1
            backward = slot - lag if slot >= lag else -1
            row.append(ScheduleCell(stage, "FB", forward, backward))
        rows.append(tuple(row))
    return Schedule(name="fbp-as", stages=ranks, microbatches=microbatches, rows=tuple(rows))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Several stages per rank, micro-batches in groups of `ranks` (Megatron's order): a bubble `chunks` times smaller."""
    if microbatches % ranks:
        fewer = microbatches // ranks * ranks
        raise InvalidInput(
            f"interleaved needs a multiple of {ranks} micro-batches, {microbatches} given; "
            f"use {f'{fewer} or ' if fewer else ''}{fewer + ranks}"
        )
    total = microbatches * chunks
    rows = []
    for rank in range(ranks):
        warmup = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        order = [_chunk(k, ranks, chunks) for k in range(total)]
        forwards = [ScheduleCell(c * ranks + rank, "F", m) for c, m in order]
        backwards = [ScheduleCell((chunks - 1 - c) * ranks + rank, "B", m) for c, m in order]
        row = forwards[:warmup]
        for k in range(total):
            row += forwards[warmup + k : warmup + k + 1]
            row.append(backwards[k])
        rows.append(tuple(row))
    return Schedule(name="interleaved", stages=ranks * chunks, microbatches=microbatches, rows=tuple(rows))


def _chunk(k: int, ranks: int, chunks: int) -> tuple[int, int]:
    """The k-th piece of work of a rank: (chunk, micro-batch)."""
    group, inside = divmod(k, ranks * chunks)
    return inside // ranks, group * ranks + inside % ranks


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b-sno": one_f_one_b,
    "1f1b-so": one_f_one_b_overlapped,
    "1f1b-as": lambda ranks, microbatches: one_f_one_b(ranks, microbatches, "1f1b-as"),
    "fbp-as": forward_backward_parallel,
    "interleaved": interleaved,
}
ASYNCHRONOUS = ("1f1b-as", "fbp-as")
FUSED = ("fbp-as",)
"""Schedules whose actions are a forward and a backward at once: `schedule_timing` gives their time, they cannot be lowered."""


def schedule_named(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule by its name; `chunks` is how many stages each rank has, where that is known."""
    if name not in SCHEDULES:
        raise InvalidInput(f"unknown schedule '{name}'{nearest(name, SCHEDULES)}; known: {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(ranks, microbatches, 2 if chunks is None else chunks)
    if chunks is not None and chunks > 1:
        raise InvalidInput(
            f"schedule {name} runs one stage on each of {ranks} sets of ranks, {chunks * ranks} stages given; "
            f"use {ranks} stages or the schedule interleaved"
        )
    return SCHEDULES[name](ranks, microbatches)
