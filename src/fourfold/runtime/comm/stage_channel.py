"""Sends and receives between the ranks of two stages: the messages of `plans.lists.stage_transfer` on real tensors.

A send does not block. A receive is posted, and waited for when its tensor is needed; a message moves once both ends are
there, so a receive posted early is one that hides behind compute. What a rank sends to itself takes no message.
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
    """The action that receives a message: the place (set of ranks) whose schedule has it, and its position there."""

    place: int
    position: int


@dataclass
class PendingSends:
    """This rank's sends in flight with their buffers, and the tensors it sends to itself, by tag."""

    journal: Journal
    works: list[tuple[Work, Tensor, Consumer | None]] = field(default_factory=list)
    sent_to_self: dict[int, list[Tensor]] = field(default_factory=dict)

    def note(self, kind: str, ranks: tuple[int, int], tensor: Tensor, value: str) -> None:
        self.journal.note(kind, path="collective", ranks=ranks, size=tensor.nbytes, name=value)

    def release_until(self, last: Consumer) -> None:
        """Release the sends to actions up to one that has received: its peer has then received all of them."""
        kept = []
        for work, buffer, consumer in self.works:
            if consumer is not None and consumer.place == last.place and consumer.position <= last.position:
                work.wait()
            else:
                kept.append((work, buffer, consumer))
        self.works = kept

    def finish(self) -> None:
        """Wait for all sends."""
        for work, _, _ in self.works:
            work.wait()
        self.works.clear()
        assert not self.sent_to_self, "a tensor sent to this rank itself was never received"


class StageChannel:
    """The messages that bring one tensor from the ranks of a source to those of a target."""

    def __init__(
        self,
        source: StageTensor,
        target: StageTensor,
        *,
        value: str,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        pending_sends: PendingSends,
    ) -> None:
        self.value, self.rank, self.device, self.pending_sends = value, rank, device, pending_sends
        self.dtype, self.wire_dtype = dtype, torch.uint8 if dtype == torch.bool else dtype  # gloo carries no booleans
        self.outgoing = outgoing(source, target, rank) if rank in source.ranks else []
        self.incoming = incoming(source, target, rank) if rank in target.ranks else []
        if rank in target.ranks:
            self.shape = target.layout.local_shape(target.mesh.coords(target.ranks.index(rank)))

    def pieces(self, tensor: Tensor, tag: int) -> list[Piece]:
        """The messages that send a tensor; the part this rank sends to itself goes to `sent_to_self`."""
        out = []
        for transfer in self.outgoing:
            piece = take(tensor, transfer.spans).to(self.wire_dtype).contiguous()
            if transfer.peer == self.rank:
                self.pending_sends.sent_to_self.setdefault(tag, []).append(piece)
            else:
                self.pending_sends.note("send", (self.rank, transfer.peer), piece, self.value)
                out.append(Piece(transfer.peer, True, piece, tag, f"{self.value} (message {tag})"))
        return out

    def receive(self, tag: int) -> PendingReceive:
        """Buffers for the parts of other ranks; the receive is not posted yet."""
        peers = [t.peer for t in self.incoming if t.peer != self.rank]
        shapes = [t.shape for t in self.incoming if t.peer != self.rank]
        buffers = [torch.empty(shape, dtype=self.wire_dtype, device=self.device) for shape in shapes]
        name = f"{self.value} (message {tag})"
        return PendingReceive(self, tag, [Piece(peer, False, b, tag, name) for peer, b in zip(peers, buffers, strict=True)])

    def assemble(self, parts: dict[int, Tensor], tag: int) -> Tensor:
        """The tensor from the parts of other ranks, and this one's."""
        pieces = [self._piece(t, parts, tag) for t in self.incoming]
        if len(pieces) == 1 and self.incoming[0].shape == self.shape:
            return pieces[0].to(self.dtype)
        out = torch.zeros(self.shape, dtype=self.wire_dtype, device=self.device)
        for t, piece in zip(self.incoming, pieces, strict=True):
            put(out, t.spans, piece, add=False)
        return out.to(self.dtype)

    def _piece(self, transfer: Transfer, parts: dict[int, Tensor], tag: int) -> Tensor:
        if transfer.peer != self.rank:
            return parts[transfer.peer]
        (piece,) = self.pending_sends.sent_to_self.pop(tag)
        return piece


@dataclass
class PendingReceive:
    """A tensor on its way to this rank; the works are those of its pieces, once they are posted."""

    channel: StageChannel
    tag: int
    pieces: list[Piece]
    works: Sequence[Work] = ()

    def note(self) -> None:
        for piece in self.pieces:
            self.channel.pending_sends.note("receive", (piece.peer, self.channel.rank), piece.tensor, self.channel.value)

    def wait(self) -> Tensor:
        assert len(self.works) == len(self.pieces), "waited for before it was posted"
        for work in self.works:
            work.wait()
        return self.channel.assemble({piece.peer: piece.tensor for piece in self.pieces}, self.tag)
