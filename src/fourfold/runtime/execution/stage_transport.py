"""Everything that travels between stages on behalf of one rank: values forward, gradients back, sums of tied gradients, the
loss. What an action sends or receives is handed to the `Transport` in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fourfold.plans.lists.lowered_plan import LoweredPlan, TiedGradient
from fourfold.plans.lists.order.stage_calls import LOSS, TIE, Boundary, within_place
from fourfold.plans.lists.rank_schedule import StageAction
from fourfold.plans.lists.stage_transfer import StageTensor
from fourfold.plans.lowering.stages import Crossing
from fourfold.runtime.comm.journal import Journal
from fourfold.runtime.comm.stage_channel import Arrival, Consumer, Post, StageChannel
from fourfold.runtime.comm.stage_messages import OrderedNccl, Piece, TaggedGloo, Transport, Work, communicators
from fourfold.runtime.comm.strict_gloo import StrictGloo
from fourfold.runtime.execution.executor import Executor

TransportName = Literal["gloo", "nccl", "strict-gloo"]
"""By tags; ordered on NCCL; ordered on gloo, for tests."""


class StageTransport:
    """The sends and receives of one rank. All processes must make it together."""

    def __init__(
        self,
        lowered: LoweredPlan,
        executors: Mapping[int, Executor],
        *,
        rank: int,
        device: torch.device,
        journal: Journal,
        transport: TransportName | None = None,
    ) -> None:
        self.lowered, self.plan, self.executors = lowered, lowered.plan, executors
        self.rank, self.device, self.post = rank, device, Post(journal)
        self.number = {crossing: k for k, crossing in enumerate(lowered.crossings)}
        self.channels: dict[tuple[Crossing, str, int], StageChannel] = {}
        self.transport = _transport(transport or ("gloo" if device.type == "cpu" else "nccl"), lowered, rank, device)
        self.coming: dict[tuple[Boundary, int], list[tuple[Crossing, Arrival]]] = {}
        self.waits: dict[tuple[int, str, int], list[Boundary]] = {}
        rows = enumerate(self.plan.timetable.rows)
        self.turn: dict[tuple[int, str, int], Consumer] = {
            (a.stage, a.kind, a.microbatch): Consumer(place, k) for place, row in rows for k, a in enumerate(row)
        }
        self._tie_tag = 2 * len(lowered.crossings) * self.plan.microbatches  # smaller numbers are the crossings'
        self._loss_tag = self._tie_tag + len(lowered.ties)
        self.loss: tuple[Sequence[Work], Piece] | None = None  # if its receive is posted already
        self.ties = [self._tie(tie) for tie in lowered.ties]

    def dtype(self, value: str) -> torch.dtype:
        return next(iter(self.executors.values())).local.dtype(self.lowered.loss.graph.values[value].dtype)

    # --- what crosses ---

    def receive(self, task: StageAction) -> None:
        """Post the receives of an action. Ranks of both stages post them with their sends."""
        boundary = Boundary.of(task)
        arrivals = [arrival for _, arrival in self._coming(boundary, task.microbatch)]
        for arrival in arrivals:
            arrival.note()
        if not within_place(self.lowered, boundary):
            self._post(boundary, arrivals)
        self.waits.setdefault((task.stage, task.way, task.microbatch), []).append(boundary)

    def arrived(self, task: StageAction) -> dict[str, Tensor]:
        """What was received for a compute action, gradients of one value from several stages added up; waits for it."""
        out: dict[str, Tensor] = {}
        for boundary in self.waits.pop((task.stage, task.kind, task.microbatch), []):
            for crossing, arrival in self.coming.pop((boundary, task.microbatch)):
                value = arrival.wait()
                out[crossing.value] = out[crossing.value] + value if crossing.value in out else value
                self.post.release_received(self.turn[boundary.source, task.kind, task.microbatch])
        return out

    def has_receives(self, task: StageAction) -> bool:
        return (task.stage, task.kind, task.microbatch) in self.waits

    def send(self, task: StageAction, made: Mapping[str, Tensor]) -> None:
        """Send what an action made to one other stage."""
        boundary, m = Boundary.of(task), task.microbatch
        pieces = [
            piece
            for crossing in self.lowered.tensors_between(task.stage, task.peer, task.way)
            for piece in self._channel(crossing, task.way, self.plan.sizes[m]).pieces(
                made[crossing.value], self._tag(crossing, task.way, m)
            )
        ]
        within = within_place(self.lowered, boundary)
        arrivals = [arrival for _, arrival in self._coming(boundary, m)] if within else []
        self._post(boundary, arrivals, pieces, self.turn[task.peer, task.way, m])

    def _coming(self, boundary: Boundary, microbatch: int) -> list[tuple[Crossing, Arrival]]:
        """What this rank receives over a boundary."""
        key, size = (boundary, microbatch), self.plan.sizes[microbatch]
        if key not in self.coming:
            found = self.lowered.tensors_between(boundary.source, boundary.target, boundary.way)
            tags = [(c, self._tag(c, boundary.way, microbatch)) for c in found]
            self.coming[key] = [(c, self._channel(c, boundary.way, size).arrival(tag)) for c, tag in tags]
        return self.coming[key]

    def _post(
        self, boundary: Boundary, arrivals: Sequence[Arrival], sends: Sequence[Piece] = (), consumer: Consumer | None = None
    ) -> None:
        """Start messages together."""
        pieces = [*(piece for arrival in arrivals for piece in arrival.pieces), *sends]
        works = list(self.transport.post(boundary, pieces)) if pieces else []
        for arrival in arrivals:
            arrival.works, works = works[: len(arrival.pieces)], works[len(arrival.pieces) :]
        self.post.works += [(work, piece.tensor, consumer) for work, piece in zip(works, sends, strict=True)]

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
            arrivals = [channel.arrival(tag)] if tie.taker in self.executors else []
            for arrival in arrivals:
                arrival.note()
            giver = self.executors.get(tie.giver)
            self._post(TIE, arrivals, channel.pieces(gradient_of(giver.state[tie.name]), tag) if giver is not None else [])
            for arrival in arrivals:
                mine = self.executors[tie.taker].state[tie.name]
                mine.grad = gradient_of(mine) + arrival.wait() if tie.add else arrival.wait()

    # --- the loss ---

    def listen(self) -> None:
        """Post the receive of the loss before the first action, if the transport allows that. The stage that computes the loss
        finishes its backwards before the others, and so need not wait for them."""
        piece = self._loss_piece(self.lowered.last.stage.ranks[0], None)
        self.post.note("receive", (piece.peer, self.rank), piece.tensor, "loss")
        self.loss = self.transport.post(LOSS, [piece]) if self.transport.posts_ahead else (), piece

    def send_loss(self, loss: Tensor) -> None:
        """Send the loss from the stage that computes it to the others."""
        first = self.rank == self.lowered.last.stage.ranks[0]
        pieces = [self._loss_piece(other, loss) for other in (self.lowered.without_loss if first else ())]
        for piece in pieces:
            self.post.note("send", (self.rank, piece.peer), loss, "loss")
        for work in self.transport.post(LOSS, pieces) if pieces else ():
            work.wait()

    def receive_loss(self) -> Tensor:
        assert self.loss is not None
        (works, piece), self.loss = self.loss, None
        for work in works or self.transport.post(LOSS, [piece]):
            work.wait()
        return piece.tensor

    def _loss_piece(self, peer: int, loss: Tensor | None) -> Piece:
        dtype = self.dtype(self.lowered.last.graph.loss)
        tensor = torch.empty((), dtype=dtype, device=self.device) if loss is None else loss.contiguous()
        return Piece(peer, loss is not None, tensor, self._loss_tag, "loss")


def _transport(name: TransportName, lowered: LoweredPlan, rank: int, device: torch.device) -> Transport:
    if name == "nccl":
        return OrderedNccl(lowered, rank=rank, device=device)
    return StrictGloo(communicators(lowered, "gloo")) if name == "strict-gloo" else TaggedGloo()


def gradient_of(tensor: Tensor) -> Tensor:
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
