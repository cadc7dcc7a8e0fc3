"""How the messages between stages travel: the interface `Transport` and its three implementations.

`TaggedGloo` gives each message a tag; the order of calls does not matter. Without tags (`OrderedNccl`, and for tests
`StrictGloo`) each `Boundary` has a communicator, where the k-th message from one rank to another is the k-th received, and all
pieces of an action are one grouped call. `plans.lists.order.message_order` proves that the lists of a plan allow that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.order.stage_calls import Boundary, boundaries, pairs
from fourfold.runtime.comm.world import TIMEOUT, at_leave

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to send to a rank, or a buffer to receive one from it. `tag` and `name` tell it from all others of a step."""

    peer: int
    is_send: bool
    tensor: Tensor
    tag: int
    name: str


class Work(Protocol):
    """A message under way. On a GPU the current stream waits, not the host."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """Starts messages. `posts_ahead`: whether a receive may be posted long before its message: it holds up nothing else."""

    posts_ahead: bool

    def post(self, boundary: Boundary, pieces: Sequence[Piece]) -> Sequence[Work]:
        """Start messages of one boundary together; the work of each. Buffers must live until it was waited for."""
        ...


class TaggedGloo:
    """Sends and receives each message alone, by its tag."""

    posts_ahead = True

    def post(self, boundary: Boundary, pieces: Sequence[Piece]) -> Sequence[Work]:
        return [(dist.isend if p.is_send else dist.irecv)(p.tensor, p.peer, tag=p.tag) for p in pieces]  # type: ignore[misc]


@dataclass
class Communicator:
    """A process group for one boundary, and the pairs of ranks that have exchanged something on it."""

    group: Any
    connected: set[Pair] = field(default_factory=set)


class OrderedNccl:
    """A communicator, and so a stream, for each boundary. All processes must make it together."""

    posts_ahead = False  # a posted receive occupies the device until its message comes

    def __init__(self, lowered: LoweredPlan, *, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.communicators = communicators(lowered, "nccl")
        for boundary, communicator in self.communicators.items():
            self._connect(communicator, pairs(lowered, boundary))

    def _connect(self, communicator: Communicator, rank_pairs: list[Pair]) -> None:
        """Send a byte between all pairs, in one grouped call. A pair connects at its first message, in which the host waits for
        the peer; all ranks go through the communicators in one order, so that all get there."""
        new = [pair for pair in rank_pairs if pair not in communicator.connected]
        communicator.connected.update(new)
        sides = [(a == self.rank, b if a == self.rank else a) for a, b in rank_pairs if self.rank in (a, b)] if new else []
        pieces = [Piece(peer, is_send, torch.zeros(1, dtype=torch.uint8, device=self.device), 0, "") for is_send, peer in sides]
        for work in _post_grouped(communicator.group, pieces):
            work.wait()

    def post(self, boundary: Boundary, pieces: Sequence[Piece]) -> Sequence[Work]:
        return _post_grouped(self.communicators[boundary].group, pieces)


def _post_grouped(group: Any, pieces: Sequence[Piece]) -> Sequence[Work]:
    """One grouped call, as bytes: NCCL does not know all dtypes."""
    if not pieces:
        return []
    ops = [
        dist.P2POp(dist.isend if p.is_send else dist.irecv, p.tensor.view(-1).view(torch.uint8), p.peer, group) for p in pieces
    ]
    works: Sequence[Work] = dist.batch_isend_irecv(ops)
    return works if len(works) == len(pieces) else [works[0]] * len(pieces)


_communicators: dict[tuple[Any, ...], Communicator] = {}
at_leave(_communicators.clear)


def communicators(lowered: LoweredPlan, backend: str) -> dict[Boundary, Communicator]:
    """A process group for each boundary that messages pass, of the ranks that send or receive there. The same ones each time;
    all processes must call, whether they are among these ranks or not."""
    out: dict[Boundary, Communicator] = {}
    for boundary in boundaries(lowered):
        ranks = tuple(sorted({rank for pair in pairs(lowered, boundary) for rank in pair}))
        if not ranks:
            continue
        key = (id(dist.group.WORLD), backend, boundary, ranks)
        if key not in _communicators:
            _communicators[key] = Communicator(dist.new_group(list(ranks), timeout=TIMEOUT, backend=backend))
        out[boundary] = _communicators[key]
    return out
