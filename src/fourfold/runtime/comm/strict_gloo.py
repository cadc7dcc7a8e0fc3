"""Messages between stages on processors under NCCL's rules, for tests: gloo's tags would hide what NCCL punishes.

Each communicator has a thread that executes grouped calls one after the other. Within a call all pairs make progress at once,
several messages of a pair in their order. Tags say only what a transmission is for, not which message it belongs to:

    sender                        receiver
    header: name, bytes  ----->   compared with what this rank expects
                         <-----   1: go on, 0: it expects another
    the tensor           ----->

So a send is done only when its receive is there, and a message taken for another is an error that names both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import WorkerFailed
from fourfold.plans.lists.order.stage_calls import Boundary
from fourfold.runtime.comm.stage_messages import Communicator, Piece, Work
from fourfold.runtime.comm.world import TIMEOUT, at_leave

HEADER_BYTES = 256
HEADER, ANSWER, TENSOR = range(3)
"""Tags: the kinds of transmission."""


class StrictGloo:
    """Grouped calls in order, on each communicator."""

    posts_ahead = False

    def __init__(self, communicators: Mapping[Boundary, Communicator]) -> None:
        mine = {b: c for b, c in communicators.items() if dist.get_rank(c.group) >= 0}
        self.queues = {boundary: _queue(boundary, communicator) for boundary, communicator in mine.items()}

    def post(self, boundary: Boundary, pieces: Sequence[Piece]) -> Sequence[Work]:
        return [self.queues[boundary].add(pieces)] * len(pieces)


class _CallWork:
    """The work of a grouped call."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def wait(self) -> None:
        try:
            self.future.result(timeout=TIMEOUT.total_seconds())
        except TimeoutError:
            raise WorkerFailed(f"messages between stages did not meet within {TIMEOUT.total_seconds():g} s") from None


class _Queue:
    """The calls of one communicator, executed by one thread."""

    def __init__(self, boundary: Boundary, communicator: Communicator) -> None:
        self.communicator = communicator  # kept alive, since `_queues` knows it by its id
        self.boundary, self.group, self.rank = boundary, communicator.group, dist.get_rank()
        self.calls: SimpleQueue[tuple[Sequence[Piece], _CallWork] | None] = SimpleQueue()
        self.pairs = ThreadPoolExecutor(2 * dist.get_world_size(self.group), thread_name_prefix=f"messages {boundary}")
        self.thread = threading.Thread(target=self._serve, name=f"messages {boundary}", daemon=True)
        self.thread.start()

    def add(self, pieces: Sequence[Piece]) -> _CallWork:
        done = _CallWork()
        self.calls.put((pieces, done))
        return done

    def end(self) -> None:
        self.calls.put(None)
        self.thread.join(timeout=1.0)
        self.pairs.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        failure: BaseException | None = None
        while (call := self.calls.get()) is not None:
            pieces, done = call
            try:
                if failure is None:
                    self._execute(pieces)
            except BaseException as error:
                failure = error
            if failure is None:
                done.future.set_result(None)
            else:
                done.future.set_exception(failure)  # those behind it never have their turn

    def _execute(self, pieces: Sequence[Piece]) -> None:
        by_pair: dict[tuple[int, bool], list[Piece]] = {}
        for piece in pieces:
            by_pair.setdefault((piece.peer, piece.is_send), []).append(piece)
        running = [self.pairs.submit(self._exchange, some) for some in by_pair.values()]
        for each in running:
            each.result()

    def _exchange(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            (self._send if piece.is_send else self._receive)(piece)

    def _send(self, piece: Piece) -> None:
        answer = torch.zeros(1, dtype=torch.uint8)
        dist.send(_header(piece), piece.peer, self.group, HEADER)
        dist.recv(answer, piece.peer, self.group, ANSWER)
        if not answer.item():
            raise WorkerFailed(
                f"rank {self.rank} sends {_text(_header(piece))} on {self.boundary}; rank {piece.peer} expects another"
            )
        dist.send(piece.tensor, piece.peer, self.group, TENSOR)

    def _receive(self, piece: Piece) -> None:
        header, expected = torch.zeros(HEADER_BYTES, dtype=torch.uint8), _header(piece)
        dist.recv(header, piece.peer, self.group, HEADER)
        same = torch.equal(header, expected)
        answer = dist.isend(torch.tensor([same], dtype=torch.uint8), piece.peer, self.group, ANSWER)
        if same:
            dist.recv(piece.tensor, piece.peer, self.group, TENSOR)
        answer.wait()  # type: ignore[union-attr]
        if not same:
            raise WorkerFailed(
                f"rank {self.rank} expects {_text(expected)} on {self.boundary}; rank {piece.peer} sends {_text(header)}"
            )


def _header(piece: Piece) -> Tensor:
    text = f"{piece.tensor.nbytes} bytes of {piece.name}".encode()[:HEADER_BYTES]
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _text(header: Tensor) -> str:
    return bytes(header.tolist()).decode(errors="replace").rstrip()


_queues: dict[int, _Queue] = {}
"""By the id of the communicator."""


def _queue(boundary: Boundary, communicator: Communicator) -> _Queue:
    """The queue of a communicator, the same each time."""
    key = id(communicator)
    if key not in _queues:
        _queues[key] = _Queue(boundary, communicator)
    return _queues[key]


def _end() -> None:
    for queue in _queues.values():
        queue.end()
    _queues.clear()


at_leave(_end)
