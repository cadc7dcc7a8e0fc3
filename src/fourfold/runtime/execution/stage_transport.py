"""Everything that travels between stages on behalf of one rank: values forward, gradients back, sums of tied gradients, the
loss. All messages of an action are posted to the `Transport` in one call.
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
from fourfold.runtime.comm.stage_channel import Consumer, PendingReceive, PendingSends, StageChannel
from fourfold.runtime.comm.stage_messages import OrderedNccl, Piece, TaggedGloo, Transport, Work, communicators
from fourfold.runtime.comm.strict_gloo import StrictGloo
from fourfold.runtime.execution.executor import Executor

TransportName = Literal["gloo", "nccl", "strict-gloo"]
"""By tags; ordered on NCCL; ordered on gloo, for tests."""


class StageTransport:
    """The sends and receives of one rank. All processes must construct it together."""

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
        self.rank, self.device, self.pending_sends = rank, device, PendingSends(journal)
        self.numbers = {crossing: k for k, crossing in enumerate(lowered.crossings)}
        self.channels: dict[tuple[Crossing, str, int], StageChannel] = {}
        self.transport = _transport(transport or ("gloo" if device.type == "cpu" else "nccl"), lowered, rank, device)
        self.receives: dict[tuple[Boundary, int], list[tuple[Crossing, PendingReceive]]] = {}
        self.waits: dict[tuple[int, str, int], list[Boundary]] = {}
        rows = enumerate(self.plan.timetable.rows)
        self.consumers: dict[tuple[int, str, int], Consumer] = {
            (a.stage, a.kind, a.microbatch): Consumer(place, k) for place, row in rows for k, a in enumerate(row)
        }
        self._tie_tag = 2 * len(lowered.crossings) * self.plan.microbatches  # smaller numbers are the crossings'
        self._loss_tag = self._tie_tag + len(lowered.ties)
        self.loss: tuple[Sequence[Work], Piece] | None = None  # if its receive is posted already
        self.ties = [self._tie_channel(tie) for tie in lowered.ties]

    def dtype(self, value: str) -> torch.dtype:
        return next(iter(self.executors.values())).local.dtype(self.lowered.loss.graph.values[value].dtype)

    # --- tensors between stages ---

    def receive(self, action: StageAction) -> None:
        """Post the receives of an action. Ranks of both stages post them with their sends."""
        boundary = Boundary.of(action)
        receives = [receive for _, receive in self._receives_over(boundary, action.microbatch)]
        for receive in receives:
            receive.note()
        if not within_place(self.lowered, boundary):
            self._post(boundary, receives)
        self.waits.setdefault((action.stage, action.way, action.microbatch), []).append(boundary)

    def take_received(self, action: StageAction) -> dict[str, Tensor]:
        """Wait for the tensors a compute action reads; gradients of one value from several stages are added up."""
        out: dict[str, Tensor] = {}
        for boundary in self.waits.pop((action.stage, action.kind, action.microbatch), []):
            for crossing, receive in self.receives.pop((boundary, action.microbatch)):
                value = receive.wait()
                out[crossing.value] = out[crossing.value] + value if crossing.value in out else value
                self.pending_sends.release_until(self.consumers[boundary.source, action.kind, action.microbatch])
        return out

    def has_receives(self, action: StageAction) -> bool:
        return (action.stage, action.kind, action.microbatch) in self.waits

    def send(self, action: StageAction, tensors: Mapping[str, Tensor]) -> None:
        """Send results of a compute action to one other stage."""
        boundary, m = Boundary.of(action), action.microbatch
        pieces = [
            piece
            for crossing in self.lowered.tensors_between(action.stage, action.peer, action.way)
            for piece in self._channel(crossing, action.way, self.plan.sizes[m]).pieces(
                tensors[crossing.value], self._tag(crossing, action.way, m)
            )
        ]
        within = within_place(self.lowered, boundary)
        receives = [receive for _, receive in self._receives_over(boundary, m)] if within else []
        self._post(boundary, receives, pieces, self.consumers[action.peer, action.way, m])

    def _receives_over(self, boundary: Boundary, microbatch: int) -> list[tuple[Crossing, PendingReceive]]:
        """The receives of this rank over a boundary."""
        key, size = (boundary, microbatch), self.plan.sizes[microbatch]
        if key not in self.receives:
            crossings = self.lowered.tensors_between(boundary.source, boundary.target, boundary.way)
            tags = [(c, self._tag(c, boundary.way, microbatch)) for c in crossings]
            self.receives[key] = [(c, self._channel(c, boundary.way, size).receive(tag)) for c, tag in tags]
        return self.receives[key]

    def _post(
        self,
        boundary: Boundary,
        receives: Sequence[PendingReceive],
        sends: Sequence[Piece] = (),
        consumer: Consumer | None = None,
    ) -> None:
        """Start messages together."""
        pieces = [*(piece for receive in receives for piece in receive.pieces), *sends]
        works = list(self.transport.post(boundary, pieces)) if pieces else []
        for receive in receives:
            receive.works, works = works[: len(receive.pieces)], works[len(receive.pieces) :]
        self.pending_sends.works += [(work, piece.tensor, consumer) for work, piece in zip(works, sends, strict=True)]

    def _channel(self, crossing: Crossing, way: str, size: int) -> StageChannel:
        """The channel of a crossing tensor, or of its gradient on the way back."""
        key = (crossing, way, size)
        if key not in self.channels:
            here, there = (
                self.lowered.stage_tensor(stage, crossing.value, size) for stage in (crossing.source, crossing.target)
            )
            source, target = (here, there) if way == "F" else (there, here)
            self.channels[key] = self._new_channel(source, target, crossing.value)
        return self.channels[key]

    def _new_channel(self, source: StageTensor, target: StageTensor, value: str) -> StageChannel:
        return StageChannel(
            source,
            target,
            value=value,
            rank=self.rank,
            dtype=self.dtype(value),
            device=self.device,
            pending_sends=self.pending_sends,
        )

    def _tag(self, crossing: Crossing, way: str, microbatch: int) -> int:
        return (2 * self.numbers[crossing] + (way == "B")) * self.plan.microbatches + microbatch

    # --- tied parameters ---

    def _tie_channel(self, tie: TiedGradient) -> StageChannel:
        giver, taker = (self.lowered.stored_tensor(stage, tie.name) for stage in (tie.giver, tie.taker))
        return self._new_channel(giver, taker, tie.name)

    @torch.no_grad()
    def add_ties(self) -> None:
        """Add up the gradients of the copies of each tied parameter at its owner and send the sum to all copies, so that all
        are updated alike."""
        for number, (tie, channel) in enumerate(zip(self.lowered.ties, self.ties, strict=True)):
            tag = self._tie_tag + number
            receives = [channel.receive(tag)] if tie.taker in self.executors else []
            for receive in receives:
                receive.note()
            giver = self.executors.get(tie.giver)
            self._post(TIE, receives, channel.pieces(gradient_of(giver.state[tie.name]), tag) if giver is not None else [])
            for receive in receives:
                mine = self.executors[tie.taker].state[tie.name]
                mine.grad = gradient_of(mine) + receive.wait() if tie.add else receive.wait()

    # --- the loss ---

    def listen(self) -> None:
        """Post the receive of the loss before the first action, if the transport allows that. The stage that computes the loss
        finishes its backwards before the others, and so need not wait for them."""
        piece = self._loss_piece(self.lowered.last.stage.ranks[0], None)
        self.pending_sends.note("receive", (piece.peer, self.rank), piece.tensor, "loss")
        self.loss = self.transport.post(LOSS, [piece]) if self.transport.posts_ahead else (), piece

    def send_loss(self, loss: Tensor) -> None:
        """Send the loss from the stage that computes it to the others."""
        first = self.rank == self.lowered.last.stage.ranks[0]
        pieces = [self._loss_piece(other, loss) for other in (self.lowered.without_loss if first else ())]
        for piece in pieces:
            self.pending_sends.note("send", (self.rank, piece.peer), loss, "loss")
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
