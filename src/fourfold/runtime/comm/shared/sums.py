"""Gradient sums between ranks of one host through shared memory, a reduce-scatter and an all-gather without sockets.

Every rank copies its gradients into its own row; rank k adds up slice k of all rows, and the others copy that slice from it:
steps (5) to (7) of the package's docstring. Where there are no more cores than ranks, sending 100 MB over loopback takes more
than a tenth of a step, and no core is idle to overlap it with.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from fourfold.runtime.comm.shared.memory import SharedRows, shared_memory, tensor_at
from fourfold.runtime.comm.world import World


class SharedSum:
    """The gradients of one `Sum`. `rows[k]`: the row of rank k; `sync`: for barriers between those ranks."""

    def __init__(self, parameters: list[Tensor], rows: list[Tensor], sync: SharedRows) -> None:
        self.parameters, self.rows, self.sync = parameters, rows, sync
        ends = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        row = rows[sync.rank]
        self.views = [row[a:b].view(p.shape) for (a, b), p in zip(itertools.pairwise(ends), parameters, strict=True)]
        length = -(-ends[-1] // sync.count)
        self.slices = [(k * length, min((k + 1) * length, ends[-1])) for k in range(sync.count)]

    @staticmethod
    def open(parameters: list[Tensor], axes: tuple[str, ...], world: World) -> SharedSum:
        """Rows for the parameters' gradients, of ranks that share memory; all of them must call."""
        sync, dtype, total = world.shared_rows(axes), parameters[0].dtype, sum(p.numel() for p in parameters)
        size = total * dtype.itemsize
        memory = shared_memory(world.group(axes), max(sync.count * size, 1))
        return SharedSum(parameters, [tensor_at(memory, dtype, (total,), k * size) for k in range(sync.count)], sync)

    @property
    def own_row(self) -> Tensor:
        """This rank's row, which no allocator counts."""
        return self.rows[self.sync.rank]

    def sum(self) -> None:
        """Sum all gradients; a parameter without a gradient on this rank counts as zero."""
        for parameter, view in zip(self.parameters, self.views, strict=True):  # step (5)
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
        self.sync.barrier()
        me, rows = self.sync.rank, self.rows
        low, high = self.slices[me]
        for k in range(self.sync.count):  # step (6)
            if k != me and low < high:
                rows[me][low:high].add_(rows[k][low:high])
        self.sync.barrier()
        for k, (low, high) in enumerate(self.slices):  # step (7)
            if k != me and low < high:
                rows[me][low:high].copy_(rows[k][low:high])
        self.sync.barrier()
