"""Matrix products on a shard: plain, but a bias under a summed split is added by one rank only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import RankContext, Run, adds_bias, attach, kernel, plain


@kernel("linear")
def linear(step: Compute, local: RankContext) -> Run:
    if adds_bias(step, local):
        return F.linear

    def run(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return attach(F.linear(x, w), bias)

    return run


@kernel("addmm")
def addmm(step: Compute, local: RankContext) -> Run:
    if adds_bias(step, local):
        return plain(step, local)
    alpha = step.op.kwargs.get("alpha", 1)

    def run(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return attach(y if alpha == 1 else y * alpha, (bias,))

    return run
