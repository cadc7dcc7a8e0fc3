"""Slices, flips, rolls and paddings on a shard: rows by their global index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.nest import Window
from fourfold.ops.window import RowMap
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import RankContext, Run, is_split, kernel, plain


@kernel("slice")
def slice_(step: Compute, local: RankContext) -> Run:
    """Split along the sliced dim, the fetch has brought just the rows kept."""
    return (lambda x: x) if is_split(step, f"i{step.nest.detail['dim']}") else plain(step, local)


@kernel("rows")
def rows(step: Compute, local: RankContext) -> Run:
    """Slices with a step, flips, rolls and paddings along split dims."""
    windows = {d: t[0] for d, t in enumerate(step.nest.operands[0]) if t and isinstance(t[0], Window)}
    if not any(is_split(step, w.loop) for w in windows.values()):
        return plain(step, local)
    moves = []
    for dim, window in windows.items():
        assert isinstance(window.need, RowMap)
        held = {row: k for k, row in enumerate(local.box(step.needs[0])[dim])}
        taps = [window.need.taps[o][0] for o in local.box(step.gives[0])[dim]]
        inside = [held[t] for t in taps if t >= 0]
        first = next((k for k, t in enumerate(taps) if t >= 0), len(taps))
        last = len(taps) - next((k for k, t in enumerate(reversed(taps)) if t >= 0), 0) if inside else first
        moves.append((dim, torch.tensor(inside, dtype=torch.long, device=local.device), first, len(taps) - last))
    fill = step.nest.detail["fill"]

    def run(x: Tensor) -> Tensor:
        for dim, index, before, after in moves:
            x = x.index_select(dim, index)
            if before or after:
                x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], value=fill)
        return x

    return run
