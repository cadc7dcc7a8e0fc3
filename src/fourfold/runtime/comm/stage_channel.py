"""Sends and receives between the ranks of two stages: the messages of `plans.lists.stage_transfer` on real tensors.

A send does not block. A receive is posted, and waited for when its tensor is needed; a message moves once both ends are
there, so a receive posted early is one that hides behind compute. What a rank sends to itself is handed over without a message.
How messages travel is up to a `Transport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.plans.layout.exchange import Transfer
from fourfold.plans.lists.stage_transfer import StageTensor, incoming, outgoing
from fourfold.runtime.comm.exchange import put, take
from fourfold.runtime.comm.journal import Journal
from fourfold.runtime.comm.stage_messages import Piece, Work


@dataclass(frozen=True, slots=True)
class Consumer:
    """The action that receives a message: its row in the schedule, and its position there."""

    place: int
    turn: int


@dataclass
class Post:
    """This rank's sends in flight with their buffers, and the tensors it sends to itself."""

    journal: Journal
    works: list[tuple[Work, Tensor, Consumer | None]] = field(default_factory=list)
    parcels: dict[int, list[Tensor]] = field(default_factory=dict)

    def note(self, kind: str, ranks: tuple[int, int], tensor: Tensor, value: str) -> None:
        self.journal.note(kind, path="collective", ranks=ranks, size=tensor.nbytes, name=value)

    def release_received(self, known: Consumer) -> None:
        """Release the sends that were received: all those to actions up to one that is known to be done."""
        kept = []
        for work, buffer, consumer in self.works:
            if consumer is not None and consumer.place == known.place and consumer.turn <= known.turn:
                work.wait()
            else:
                kept.append((work, buffer, consumer))
        self.works = kept

    def finish(self) -> None:
        """Wait until everything sent is gone."""
        for work, _, _ in self.works:
            work.wait()
        self.works.clear()
        assert not self.parcels, "a parcel was never fetched"


class StageChannel:
    """One tensor's way from the ranks of a source to those of a target."""

    def __init__(
        self,
        source: StageTensor,
        target: StageTensor,
        *,
        value: str,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        post: Post,
    ) -> None:
        self.value, self.rank, self.device, self.post = value, rank, device, post
        self.dtype, self.wire_dtype = dtype, torch.uint8 if dtype == torch.bool else dtype  # gloo carries no booleans
        self.sends = outgoing(source, target, rank) if rank in source.ranks else []
        self.receives = incoming(source, target, rank) if rank in target.ranks else []
        if rank in target.ranks:
            self.shape = target.layout.local_shape(target.mesh.coords(target.ranks.index(rank)))

    def pieces(self, tensor: Tensor, tag: int) -> list[Piece]:
        """What to send of a tensor; what this rank sends to itself is put aside."""
        out = []
        for give in self.sends:
            piece = take(tensor, give.spans).to(self.wire_dtype).contiguous()
            if give.peer == self.rank:
                self.post.parcels.setdefault(tag, []).append(piece)
            else:
                self.post.note("send", (self.rank, give.peer), piece, self.value)
                out.append(Piece(give.peer, True, piece, tag, f"{self.value} (message {tag})"))
        return out

    def arrival(self, tag: int) -> Arrival:
        away = [t.peer for t in self.receives if t.peer != self.rank]
        shapes = [t.shape for t in self.receives if t.peer != self.rank]
        buffers = [torch.empty(shape, dtype=self.wire_dtype, device=self.device) for shape in shapes]
        named = f"{self.value} (message {tag})"
        return Arrival(self, tag, [Piece(peer, False, b, tag, named) for peer, b in zip(away, buffers, strict=True)])

    def assemble(self, received: dict[int, Tensor], tag: int) -> Tensor:
        """The tensor from the parts of other ranks, and this one's."""
        pieces = [self._piece(t, received, tag) for t in self.receives]
        if len(pieces) == 1 and self.receives[0].shape == self.shape:
            return pieces[0].to(self.dtype)
        out = torch.zeros(self.shape, dtype=self.wire_dtype, device=self.device)
        for t, piece in zip(self.receives, pieces, strict=True):
            put(out, t.spans, piece, add=False)
        return out.to(self.dtype)

    def _piece(self, transfer: Transfer, received: dict[int, Tensor], tag: int) -> Tensor:
        if transfer.peer != self.rank:
            return received[transfer.peer]
        (piece,) = self.post.parcels.pop(tag)
        return piece


@dataclass
class Arrival:
    """A tensor on its way to this rank; the works are those of its pieces, once they are posted."""

    channel: StageChannel
    tag: int
    pieces: list[Piece]
    works: Sequence[Work] = ()

    def note(self) -> None:
        for piece in self.pieces:
            self.channel.post.note("receive", (piece.peer, self.channel.rank), piece.tensor, self.channel.value)

    def wait(self) -> Tensor:
        assert len(self.works) == len(self.pieces), "waited for before it was posted"
        for work in self.works:
            work.wait()
        return self.channel.assemble({piece.peer: piece.tensor for piece in self.pieces}, self.tag)
