"""LSTM on the samples a rank owns; dropout between layers is drawn by us, so that every split sees the same."""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import Arguments, Local, Run, kernel
from fourfold.runtime.kernels.random import drop


@kernel("lstm")
def lstm(step: Compute, local: Local) -> Run:
    arguments = Arguments(step, local)
    _, _, _, biases, layers, dropout, train, both, first = step.op.args
    width = 4 if biases else 2
    per_layer = width * (2 if both else 1)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, _ = arguments.fill(tensors)
        x, (h, c), weights = args[0], args[1], args[2]
        if not (dropout and train):
            return torch.lstm(x, (h, c), list(weights), biases, layers, 0.0, train, both, first)
        hs, cs, sides = [], [], 2 if both else 1
        for k in range(layers):
            if k:
                x = drop(x, dropout, step, local, step.gives[0], k)
            now = slice(k * sides, (k + 1) * sides)
            own = list(weights[k * per_layer : (k + 1) * per_layer])
            x, hk, ck = torch.lstm(x, (h[now], c[now]), own, biases, 1, 0.0, train, both, first)
            hs.append(hk)
            cs.append(ck)
        return x, torch.cat(hs), torch.cat(cs)

    return run
