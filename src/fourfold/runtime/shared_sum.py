"""Gradient sums between ranks of one host: through shared memory instead of sockets.

Every rank puts its gradients into its own row; rank k adds up the k-th slice of all rows in its own row, and the others
copy it from there. A rank writes nothing but its row, and three barriers separate putting, adding and copying. Where
cores are as many as ranks, sending 100 MB over loopback costs them more than a tenth of a step, and nothing is left to
overlap it with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.runtime.board import Board, shared_memory
from fourfold.runtime.world import World


class SharedSums:
    """The gradients that can be summed so; `names` says which, the others are left to the buckets."""

    def __init__(self, parameters: Mapping[str, Tensor], reductions: Mapping[str, tuple[str, ...]], world: World) -> None:
        groups: dict[tuple[tuple[str, ...], torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in parameters.items():
            if name in reductions and tensor.device.type == "cpu":
                groups.setdefault((reductions[name], tensor.dtype), {})[name] = tensor
        made = [(members, _Block.open(list(members.values()), axes, world)) for (axes, _), members in groups.items()]
        self.blocks = [block for _, block in made if block is not None]
        self.names = {name for members, block in made if block is not None for name in members}

    @property
    def own(self) -> list[Tensor]:
        """This rank's rows: memory that no allocator counts."""
        return [block.rows[block.board.rank] for block in self.blocks]

    def finish(self) -> None:
        """Sum all gradients; a parameter nobody used has gradient zero."""
        for block in self.blocks:
            block.sum()


class _Block:
    """The gradients of one group and dtype."""

    def __init__(self, parameters: list[Tensor], rows: list[Tensor], board: Board) -> None:
        self.parameters, self.rows, self.board = parameters, rows, board
        ends = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        row = rows[board.rank]
        self.views = [row[a:b].view(p.shape) for (a, b), p in zip(itertools.pairwise(ends), parameters, strict=True)]
        share = -(-ends[-1] // board.count)
        self.slices = [(k * share, min((k + 1) * share, ends[-1])) for k in range(board.count)]

    @staticmethod
    def open(parameters: list[Tensor], axes: tuple[str, ...], world: World) -> _Block | None:
        """Rows for the parameters' gradients, if the group shares a host; all ranks must call."""
        board = world.board(axes)
        if board is None:
            return None
        total = sum(p.numel() for p in parameters)
        if not total:
            return None
        size = board.count * total * parameters[0].element_size()
        memory = shared_memory(world.group(axes), size)
        if memory is None:
            return None
        size, dtype = size // board.count, parameters[0].dtype
        rows = [torch.frombuffer(memory, dtype=dtype, count=total, offset=k * size) for k in range(board.count)]
        return _Block(parameters, rows, board)

    def sum(self) -> None:
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
