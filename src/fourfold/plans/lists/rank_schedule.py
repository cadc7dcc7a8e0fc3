"""A rank's schedule: what it does in a step, as `StageAction`s in order. The cells of a plan's schedule become forwards and
backwards, with the messages between stages and the sums of gradients around them.

Entries are written as the cells are: ``1F0`` and ``1B0`` compute; ``1<0F0`` is stage 1 receiving from stage 0 what its forward
of micro-batch 0 reads, ``0>1F0`` the sending of it; ``0<1B0`` and ``1>0B0`` carry the gradients back. ``0S`` begins a step on
stage 0, ``0G`` sums its gradients over its ranks, ``T`` adds up those of tied parameters, ``R`` posts the receive of the loss,
``L`` sums the loss's shares, ``C`` the squared norms of gradients, ``U`` is the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fourfold.plans.lowering.stages import Crossing, Cut
from fourfold.plans.spec.plan import Plan
from fourfold.plans.spec.schedule import ScheduleCell

BLOCKING = ("1f1b-sno",)
"""Schedules whose receiver waits while a tensor arrives; under the others receives are posted a turn ahead."""
LETTERS = {"listen": "R", "tie": "T", "loss": "L", "clip": "C", "update": "U"}
"""How entries that belong to all stages of a rank are written."""
UNTIMED = ("listen", "begin", "loss")
"""Entries that no timeline shows: they pass on a number or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAction:
    """One entry of a rank's schedule: a forward or backward (a `ScheduleCell` of the plan), a message between stages, or a
    sum. What a forward or backward consists of is a list of `plans.lists.actions.Action`."""

    kind: Literal["listen", "begin", "F", "B", "receive", "send", "reduce", "tie", "loss", "clip", "update"]
    stage: int = 0
    microbatch: int = 0
    peer: int = 0  # of receive and send: the other stage
    way: Literal["F", "B"] = "F"  # of receive and send: values of a forward or gradients of a backward
    last: bool = False  # of a backward: whether it completes its stage's gradients

    def __str__(self) -> str:
        if self.kind in LETTERS:
            return LETTERS[self.kind]
        if self.kind in ("begin", "reduce"):
            return f"{self.stage}{'S' if self.kind == 'begin' else 'G'}"
        if self.kind in ("F", "B"):
            return f"{self.stage}{self.kind}{self.microbatch}"
        return f"{self.stage}{'<' if self.kind == 'receive' else '>'}{self.peer}{self.way}{self.microbatch}"


def rank_schedules(plan: Plan, cut: Cut, *, loss_stage: int) -> tuple[tuple[StageAction, ...], ...]:
    """The schedule of every set of ranks, in the order of the plan's schedule. `loss_stage`: the stage that has the loss."""
    places = dict.fromkeys(stage.ranks for stage in plan.parts)
    stages = [[k for k, stage in enumerate(plan.parts) if stage.ranks == ranks] for ranks in places]
    messages = _Messages(cut.crossings)
    return tuple(
        _schedule(row, own, messages, ahead=plan.schedule not in BLOCKING, has_loss=loss_stage in own, tied=bool(cut.tied))
        for row, own in zip(plan.timetable.rows, stages, strict=True)
    )


def _schedule(
    row: tuple[ScheduleCell, ...], stages: list[int], messages: _Messages, *, ahead: bool, has_loss: bool, tied: bool
) -> tuple[StageAction, ...]:
    out: list[StageAction] = []
    for cell, posted in zip(row, _posted(row, ahead), strict=True):
        out += [message for other in posted for message in messages.around("receive", other)]
        out.append(StageAction(kind="F" if cell.kind == "F" else "B", stage=cell.stage, microbatch=cell.microbatch))
        out += messages.around("send", cell)
    for at in {entry.stage: k for k, entry in enumerate(out) if entry.kind == "B"}.values():
        out[at] = replace(out[at], last=True)
    listens = [] if has_loss else [StageAction(kind="listen")]
    begins = [StageAction(kind="begin", stage=index) for index in stages]
    out += [StageAction(kind="reduce", stage=index) for index in stages]
    out += [StageAction(kind="tie")] if tied else []
    return (*listens, *begins, *out, StageAction(kind="loss"), StageAction(kind="update", stage=stages[0]))


def _posted(row: tuple[ScheduleCell, ...], ahead: bool) -> list[list[ScheduleCell]]:
    """For each cell, whose receives are posted before it: its own or, a turn ahead, those of the next of its kind too."""
    out: list[list[ScheduleCell]] = [[] for _ in row]
    for kind in ("F", "B"):
        turns = [i for i, cell in enumerate(row) if cell.kind == kind]
        for turn, i in enumerate(turns):
            out[turns[max(turn - 1, 0)] if ahead else i].append(row[i])
    return out


class _Messages:
    """The messages between stages."""

    def __init__(self, crossings: Sequence[Crossing]) -> None:
        self.peers: dict[tuple[str, int, str], dict[int, None]] = {}  # (send or receive, stage, way), in order of what crosses
        for c in crossings:
            ends = [("F", c.source, c.target), *([("B", c.target, c.source)] if c.gradient else [])]
            for way, source, target in ends:
                self.peers.setdefault(("send", source, way), {})[target] = None
                self.peers.setdefault(("receive", target, way), {})[source] = None

    def around(self, kind: Literal["send", "receive"], cell: ScheduleCell) -> list[StageAction]:
        """What is received for a cell, or sent after it."""
        way: Literal["F", "B"] = "F" if cell.kind == "F" else "B"
        peers = self.peers.get((kind, cell.stage, way), {})
        return [StageAction(kind=kind, stage=cell.stage, microbatch=cell.microbatch, peer=peer, way=way) for peer in peers]
