"""Matrix products on a shard: plain, but a bias under a summed split is added by one rank only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import Local, Run, adds_once, attached, kernel, plain


@kernel("linear")
def linear(step: Compute, local: Local) -> Run:
    if adds_once(step, local):
        return F.linear

    def run(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return attached(F.linear(x, w), bias)

    return run


@kernel("addmm")
def addmm(step: Compute, local: Local) -> Run:
    if adds_once(step, local):
        return plain(step, local)
    alpha = step.op.kwargs.get("alpha", 1)

    def run(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return attached(y if alpha == 1 else y * alpha, (bias,))

    return run
