"""LSTM on the samples a rank owns; dropout between layers is drawn by us, so that every split sees the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import Arguments, Local, Run, kernel
from fourfold.runtime.kernels.random import drop

CUDNN_LSTM = 2  # among cuDNN's kinds of recurrent layers


@kernel("lstm")
def lstm(step: Compute, local: Local) -> Run:
    arguments = Arguments(step, local)
    _, _, _, biases, layers, dropout, train, both, first = step.op.args
    width = 4 if biases else 2
    per_layer = width * (2 if both else 1)
    flat: set[int] = set()  # first weights of calls whose weights lie in one buffer

    def flatten(weights: Sequence[Tensor]) -> None:
        if weights[0].is_cuda and all(w.is_leaf for w in weights) and id(weights[0]) not in flat:
            flat.add(id(weights[0]))
            _flatten(weights, width, first, both)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, _ = arguments.fill(tensors)
        x, (h, c), weights = args[0], args[1], args[2]
        if not (dropout and train):
            flatten(weights)
            return torch.lstm(x, (h, c), list(weights), biases, layers, 0.0, train, both, first)
        hs, cs, sides = [], [], 2 if both else 1
        for k in range(layers):
            if k:
                x = drop(x, dropout, step, local, step.gives[0], k)
            now = slice(k * sides, (k + 1) * sides)
            own = list(weights[k * per_layer : (k + 1) * per_layer])
            flatten(own)
            x, hk, ck = torch.lstm(x, (h[now], c[now]), own, biases, 1, 0.0, train, both, first)
            hs.append(hk)
            cs.append(ck)
        return x, torch.cat(hs), torch.cat(cs)

    return run


@torch.no_grad()
def _flatten(weights: Sequence[Tensor], width: int, batch_first: bool, both: bool) -> None:
    """Move parameters into one buffer, as nn.LSTM does: cuDNN copies them there at every call otherwise."""
    layers, hidden = len(weights) // (width * (2 if both else 1)), weights[0].shape[0] // 4
    if torch.backends.cudnn.is_acceptable(weights[0]):
        torch._cudnn_rnn_flatten_weight(
            list(weights), width, weights[0].shape[1], CUDNN_LSTM, hidden, 0, layers, batch_first, both
        )
