"""Everything that travels between stages on behalf of one rank: values forward, gradients back, sums of tied gradients, the
loss. Each message has its own tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.plans.lists.lowered_plan import LoweredPlan, TiedGradient
from fourfold.plans.lists.rank_schedule import StageAction
from fourfold.plans.lists.stage_transfer import StageTensor
from fourfold.plans.lowering.stages import Crossing
from fourfold.runtime.comm.journal import Journal
from fourfold.runtime.comm.stage_channel import Consumer, Post, StageChannel, Wait
from fourfold.runtime.execution.executor import Executor


class StageTransport:
    """The sends and receives of one rank."""

    def __init__(
        self, lowered: LoweredPlan, executors: Mapping[int, Executor], *, rank: int, device: torch.device, journal: Journal
    ) -> None:
        self.lowered, self.plan, self.executors = lowered, lowered.plan, executors
        self.rank, self.device, self.post = rank, device, Post(journal)
        self.number = {crossing: k for k, crossing in enumerate(lowered.crossings)}
        self.channels: dict[tuple[Crossing, str, int], StageChannel] = {}
        self.waits: dict[tuple[int, str, int], list[tuple[Crossing, Wait]]] = {}
        rows = enumerate(self.plan.timetable.rows)
        self.turn: dict[tuple[int, str, int], Consumer] = {
            (a.stage, a.kind, a.microbatch): Consumer(place, k) for place, row in rows for k, a in enumerate(row)
        }
        self._tie_tag = 2 * len(lowered.crossings) * self.plan.microbatches  # smaller numbers are the crossings'
        self._loss_tag = self._tie_tag + len(lowered.ties)
        self.loss: tuple[Any, Tensor] = (None, torch.empty(()))
        self.ties = [self._tie(tie) for tie in lowered.ties]

    def dtype(self, value: str) -> torch.dtype:
        return next(iter(self.executors.values())).local.dtype(self.lowered.loss.graph.values[value].dtype)

    # --- what crosses ---

    def receive(self, task: StageAction) -> None:
        """Post the receives of an action."""
        size = self.plan.sizes[task.microbatch]
        for crossing in self.lowered.tensors_between(task.peer, task.stage, task.way):
            wait = self._channel(crossing, task.way, size).receive(self._tag(crossing, task.way, task.microbatch))
            self.waits.setdefault((task.stage, task.way, task.microbatch), []).append((crossing, wait))

    def arrived(self, task: StageAction) -> dict[str, Tensor]:
        """What was received for a compute action, gradients of one value from several stages added up; waits for it."""
        out: dict[str, Tensor] = {}
        for crossing, wait in self.waits.pop((task.stage, task.kind, task.microbatch), []):
            value = wait()
            out[crossing.value] = out[crossing.value] + value if crossing.value in out else value
            peer = crossing.source if task.kind == "F" else crossing.target
            self.post.release_received(self.turn[peer, task.kind, task.microbatch])
        return out

    def has_receives(self, task: StageAction) -> bool:
        return (task.stage, task.kind, task.microbatch) in self.waits

    def send(self, task: StageAction, made: Mapping[str, Tensor]) -> None:
        """Send what an action made to one other stage."""
        size, consumer = self.plan.sizes[task.microbatch], self.turn[task.peer, task.way, task.microbatch]
        for crossing in self.lowered.tensors_between(task.stage, task.peer, task.way):
            tag = self._tag(crossing, task.way, task.microbatch)
            self._channel(crossing, task.way, size).send(made[crossing.value], tag, consumer)

    def _channel(self, crossing: Crossing, way: str, size: int) -> StageChannel:
        """The channel of a crossing tensor, or of its gradient on the way back."""
        key = (crossing, way, size)
        if key not in self.channels:
            here, there = (
                self.lowered.stage_tensor(stage, crossing.value, size) for stage in (crossing.source, crossing.target)
            )
            source, target = (here, there) if way == "F" else (there, here)
            self.channels[key] = self._made(source, target, crossing.value)
        return self.channels[key]

    def _made(self, source: StageTensor, target: StageTensor, value: str) -> StageChannel:
        return StageChannel(
            source, target, value=value, rank=self.rank, dtype=self.dtype(value), device=self.device, post=self.post
        )

    def _tag(self, crossing: Crossing, way: str, microbatch: int) -> int:
        return (2 * self.number[crossing] + (way == "B")) * self.plan.microbatches + microbatch

    # --- tied parameters ---

    def _tie(self, tie: TiedGradient) -> StageChannel:
        giver, taker = (self.lowered.stored_tensor(stage, tie.name) for stage in (tie.giver, tie.taker))
        return self._made(giver, taker, tie.name)

    @torch.no_grad()
    def add_ties(self) -> None:
        """Add up the gradients of the copies of each tied parameter at its owner and hand the sum to all, so that they are
        updated alike."""
        for number, (tie, channel) in enumerate(zip(self.lowered.ties, self.ties, strict=True)):
            tag = self._tie_tag + number
            wait = channel.receive(tag) if tie.taker in self.executors else None
            if tie.giver in self.executors:
                channel.send(gradient_of(self.executors[tie.giver].state[tie.name]), tag)
            if wait is not None:
                mine = self.executors[tie.taker].state[tie.name]
                mine.grad = gradient_of(mine) + wait() if tie.add else wait()

    # --- the loss ---

    def listen(self) -> None:
        """Post the receive of the loss before the first action. The stage that computes the loss finishes its backwards before
        the others, and so need not wait for them."""
        part = self.lowered.last
        loss, first = torch.empty((), dtype=self.dtype(part.graph.loss), device=self.device), part.stage.ranks[0]
        self.post.note("receive", (first, self.rank), loss, "loss")
        self.loss = (dist.irecv(loss, first, tag=self._loss_tag), loss)

    def send_loss(self, loss: Tensor) -> None:
        """Send the loss from the stage that computes it to the others."""
        works: list[Any] = []
        for other in self.lowered.without_loss if self.rank == self.lowered.last.stage.ranks[0] else ():
            self.post.note("send", (self.rank, other), loss, "loss")
            works.append(dist.isend(loss, other, tag=self._loss_tag))
        for work in works:
            work.wait()

    def receive_loss(self) -> Tensor:
        work, loss = self.loss
        work.wait()
        return loss


def gradient_of(tensor: Tensor) -> Tensor:
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
