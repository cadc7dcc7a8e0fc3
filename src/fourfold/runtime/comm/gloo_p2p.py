"""Large messages between hosts as gloo point-to-point sends, with receives posted before sends.

gloo announces a posted receive over the connection that carries data. If a rank sends first, the announcement queues behind its
own data, and a full-duplex link carries the two directions one after the other: with 8 MiB each way between two hosts at 1
Gbit/s (67 ms on the wire), gloo's all-to-all took 121 ms and its all-gather 98; with receives posted first both take 75. Its
reduce-scatter is an all-reduce of the whole tensor, twice the bytes. Small messages, and all within a host, are faster by
gloo's collectives (1 KiB: 1.1 ms against 1.4). `plans.lists.paths` chooses the path of each exchange by these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fourfold.runtime.comm.world import all_gather_single, reduce_scatter_single


class PointToPointWork:
    """Sends to and receives from each rank of a group, in flight; empty tensors are not sent. A sent tensor must not change
    before `wait` has returned."""

    def __init__(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor], group: Any) -> None:
        self.works: list[Any] = [dist.irecv(t, group=group, group_src=k) for k, t in enumerate(outputs) if t.numel()]
        self.inputs = list(inputs)
        self.works += [dist.isend(t, group=group, group_dst=k) for k, t in enumerate(self.inputs) if t.numel()]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def all_to_all(
    out: Tensor, packed: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int], group: Any, *, direct: bool
) -> Any:
    """Exchange flat tensors, with numbers of elements per rank, 0 for this one; `direct`: by point-to-point messages."""
    if direct:
        return PointToPointWork(out.split(list(receive_counts)), packed.split(list(send_counts)), group)
    return dist.all_to_all_single(out, packed, list(receive_counts), list(send_counts), group=group, async_op=True)


def all_gather(rows: Tensor, row: Tensor, group: Any, *, direct: bool) -> Any:
    """Gather the flat tensors of all ranks, one after the other; `direct` only between two ranks."""
    if not direct:
        return all_gather_single(rows.view(-1), row, group=group, async_op=True)
    me = dist.get_rank(group)
    rows = rows.view(2, -1)
    rows[me] = row
    return PointToPointWork(_others(rows, me), _others([row, row], me), group)


def reduce_scatter(out: Tensor, rows: Tensor, group: Any, *, direct: bool) -> None:
    """The sum of all ranks' rows for this one, added in rank order."""
    if not direct:
        reduce_scatter_single(out.view(-1), rows.reshape(-1), group=group)
        return
    me, count = dist.get_rank(group), dist.get_world_size(group)
    rows = rows.reshape(count, -1).contiguous()  # a view's rows may not be adjacent
    received_rows = [rows[k] if k == me else rows.new_empty(rows.shape[1]) for k in range(count)]
    PointToPointWork(_others(received_rows, me), _others(rows, me), group).wait()
    total = out.view(-1).copy_(received_rows[0])
    for other in received_rows[1:]:
        total += other


def _others(rows: Iterable[Tensor], me: int) -> list[Tensor]:
    """The rows, with an empty one for this rank."""
    return [row[:0] if k == me else row for k, row in enumerate(rows)]
