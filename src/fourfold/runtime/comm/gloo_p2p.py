"""Large messages between hosts by gloo, with receives posted before sends.

gloo tells the other rank that a receive is posted over the connection that carries data. A rank that sends first says so behind
its own data, and a link that could carry both ways at once carries one after the other: of 8 MiB each way between two hosts at
1 Gbit/s, 67 ms on the wire, its all-to-all took 121 ms, its all-gather 98; with receives posted first both take 75. Its
reduce-scatter is an all-reduce of the whole tensor, twice the bytes. Small messages, and all within a host, are better off with
its collectives (1 KiB: 1.1 ms, by single messages 1.4). `plans.lists.paths` decides by that which of them takes which way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fourfold.runtime.comm.world import all_gather_single, reduce_scatter_single


class Flight:
    """Tensors on their way from and to each rank of a group; empty ones do not travel. What is sent must not change before they
    have come."""

    def __init__(self, received: Iterable[Tensor], sent: Iterable[Tensor], group: Any) -> None:
        self.works: list[Any] = [dist.irecv(t, group=group, group_src=k) for k, t in enumerate(received) if t.numel()]
        self.sent = list(sent)
        self.works += [dist.isend(t, group=group, group_dst=k) for k, t in enumerate(self.sent) if t.numel()]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def all_to_all(
    received: Tensor, packed: Tensor, receives: Sequence[int], sends: Sequence[int], group: Any, *, direct: bool
) -> Any:
    """Flat tensors with so many elements from and for each rank, none for itself; `direct`: by single messages."""
    if direct:
        return Flight(received.split(list(receives)), packed.split(list(sends)), group)
    return dist.all_to_all_single(received, packed, list(receives), list(sends), group=group, async_op=True)


def all_gather(rows: Tensor, row: Tensor, group: Any, *, direct: bool) -> Any:
    """Flat tensors of all ranks, one after the other; directly between two alone."""
    if not direct:
        return all_gather_single(rows.view(-1), row, group=group, async_op=True)
    me = dist.get_rank(group)
    rows = rows.view(2, -1)
    rows[me] = row
    return Flight(_others(rows, me), _others([row, row], me), group)


def reduce_scatter(out: Tensor, rows: Tensor, group: Any, *, direct: bool) -> None:
    """The sum of all ranks' rows for this one, added in rank order."""
    if not direct:
        reduce_scatter_single(out.view(-1), rows.reshape(-1), group=group)
        return
    me, count = dist.get_rank(group), dist.get_world_size(group)
    rows = rows.reshape(count, -1).contiguous()  # a view's rows may lie apart
    came = [rows[k] if k == me else rows.new_empty(rows.shape[1]) for k in range(count)]
    Flight(_others(came, me), _others(rows, me), group).wait()
    total = out.view(-1).copy_(came[0])
    for other in came[1:]:
        total += other


def _others(rows: Iterable[Tensor], me: int) -> list[Tensor]:
    """The rows, this rank's own empty."""
    return [row[:0] if k == me else row for k, row in enumerate(rows)]
