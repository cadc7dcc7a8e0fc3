"""LSTM on the samples a rank owns; dropout between layers is drawn by `drop`, so that it is equal under every split."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import Arguments, RankContext, Run, kernel
from fourfold.runtime.kernels.random import drop

CUDNN_LSTM = 2  # among cuDNN's kinds of recurrent layers


@kernel("lstm")
def lstm(step: Compute, local: RankContext) -> Run:
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


@torch.no_grad()
def flatten_weights(step: Compute, state: Mapping[str, Tensor]) -> None:
    """Move the weights of an LSTM on a GPU into one buffer, as nn.LSTM does, unless they are in one: cuDNN copies them there at
    every call otherwise."""
    _, _, _, biases, layers, dropout, train, both, first = step.op.args
    weights = [state[name] for name in step.inputs if name in state]
    width, sides = 4 if biases else 2, 2 if both else 1
    if len(weights) != width * layers * sides or not torch.backends.cudnn.is_acceptable(weights[0]):
        return
    count = 1 if dropout and train else layers  # in a call
    for k in range(0, len(weights), width * sides * count):
        own = weights[k : k + width * sides * count]
        if len({weight.untyped_storage().data_ptr() for weight in own}) == 1:
            continue
        sizes = (own[0].shape[1], CUDNN_LSTM, own[0].shape[0] // 4, 0, count)
        torch._cudnn_rnn_flatten_weight(own, width, *sizes, first, both)
