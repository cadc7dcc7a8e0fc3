"""Gradient sums between ranks of one host: through shared memory instead of sockets.

Every rank puts its gradients into its own row; rank k adds up the k-th slice of all rows in its own row, and the others
copy it from there. A rank writes nothing but its row, and three barriers separate putting, adding and copying. Where
cores are as many as ranks, sending 100 MB over loopback costs them more than a tenth of a step, and nothing is left to
overlap it with.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from fourfold.runtime.comm.shared.memory import SharedRows, shared_memory, viewed
from fourfold.runtime.comm.world import World


class SharedSum:
    """The gradients of one `Sum`."""

    def __init__(self, parameters: list[Tensor], rows: list[Tensor], board: SharedRows) -> None:
        self.parameters, self.rows, self.board = parameters, rows, board
        ends = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        row = rows[board.rank]
        self.views = [row[a:b].view(p.shape) for (a, b), p in zip(itertools.pairwise(ends), parameters, strict=True)]
        share = -(-ends[-1] // board.count)
        self.slices = [(k * share, min((k + 1) * share, ends[-1])) for k in range(board.count)]

    @staticmethod
    def open(parameters: list[Tensor], axes: tuple[str, ...], world: World) -> SharedSum:
        """Rows for the parameters' gradients, of ranks that share memory; all of them must call."""
        board, dtype, total = world.board(axes), parameters[0].dtype, sum(p.numel() for p in parameters)
        size = total * dtype.itemsize
        memory = shared_memory(world.group(axes), max(board.count * size, 1))
        return SharedSum(parameters, [viewed(memory, dtype, (total,), k * size) for k in range(board.count)], board)

    @property
    def own(self) -> Tensor:
        """This rank's row: memory that no allocator counts."""
        return self.rows[self.board.rank]

    def sum(self) -> None:
        """Sum all gradients; a parameter nobody used has gradient zero."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
        self.board.barrier()
        me, rows = self.board.rank, self.rows
        low, high = self.slices[me]
        for k in range(self.board.count):
            if k != me and low < high:
                rows[me][low:high].add_(rows[k][low:high])
        self.board.barrier()
        for k, (low, high) in enumerate(self.slices):
            if k != me and low < high:
                rows[me][low:high].copy_(rows[k][low:high])
        self.board.barrier()
