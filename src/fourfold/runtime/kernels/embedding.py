"""Look-ups on a shard: indices are global, rows are local."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.index import IndexSet
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import Arguments, RankContext, Run, is_split, kernel, overload, plain


def local_rows(held: IndexSet, local: RankContext) -> Tensor:
    """Global row -> local row, -1 where another rank holds it."""
    place = torch.full((held.size,), -1, dtype=torch.long, device=local.device)
    place[torch.tensor(list(held), dtype=torch.long, device=local.device)] = torch.arange(len(held), device=local.device)
    return place


@kernel("embedding")
def embedding(step: Compute, local: RankContext) -> Run:
    table = local.box(step.needs[0])[0]
    padding = step.nest.detail["padding"]
    if not is_split(step, "v"):
        return plain(step, local)
    place = local_rows(table, local)
    pad = int(place[padding]) if padding >= 0 else -1

    def run(weight: Tensor, ids: Tensor) -> Tensor:
        if not len(table):
            return (weight.sum() * 0).expand(*ids.shape, weight.shape[1])
        at = place[ids]
        rows = F.embedding(at.clamp(min=0), weight, pad if pad >= 0 else None)
        return rows * (at >= 0).unsqueeze(-1)

    return run


@kernel("index")
def index(step: Compute, local: RankContext) -> Run:
    """Along a divided dim of the source the fetch has brought just the rows that the local indices name."""
    held = local.box(step.needs[0])
    rows_by_operand = {k: local_rows(held[d], local) for k, d in enumerate(step.nest.detail["dims"]) if not held[d].is_whole}
    if not rows_by_operand:
        return plain(step, local)
    arguments, call = Arguments(step, local), overload(step.op.target)

    def run(x: Tensor, *indices: Tensor) -> Any:
        here = [rows_by_operand[k][i] if k in rows_by_operand else i for k, i in enumerate(indices)]
        args, kwargs = arguments.fill((x, *here))
        return call(*args, **kwargs)

    return run
