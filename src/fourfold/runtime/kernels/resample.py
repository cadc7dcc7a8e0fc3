"""Interpolation and adaptive averages on a shard: the 1-D weights of the owned rows, dim by dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fourfold.ops.nest import Window
from fourfold.ops.window import RowMap
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import RankContext, Run, attach, is_split, kernel, plain


@kernel("resample")
def resample(step: Compute, local: RankContext) -> Run:
    """Interpolation and adaptive averages: the 1-D weights of the owned rows, dim by dim."""
    terms = step.nest.operands[0]
    split = [d for d in range(2, len(terms)) if any(is_split(step, n) for n in loops_of(terms[d]))]
    if not split:
        return plain(step, local)
    plans = [(d, _weights(step, local, d)) for d in range(2, len(terms))]
    empty, shape = math.prod(local.shape(step.needs[0])) == 0, local.shape(step.gives[0])

    def run(x: Tensor) -> Tensor:
        if empty:
            return attach(x.new_zeros(shape), (x,))
        for dim, weights in plans:
            x = _apply(x, dim, weights)
        return x

    return run


def loops_of(terms: tuple[object, ...]) -> tuple[str, ...]:
    term = terms[0]
    return (term.loop,) if isinstance(term, Window) else (str(term),)


Weights = Tensor | float
"""Of one dim: dense (owned outputs x held inputs), the input that each owned output copies, or a factor for a global sum."""


def _weights(step: Compute, local: RankContext, dim: int) -> Weights:
    term = step.nest.operands[0][dim][0]
    if not isinstance(term, Window):
        return 1.0 / step.needs[0].dims[dim].size
    assert isinstance(term.need, RowMap)
    held = {row: k for k, row in enumerate(local.box(step.needs[0])[dim])}
    owned = list(local.box(step.gives[0])[dim])
    weights = torch.zeros(len(owned), len(held), dtype=torch.float64)
    for k, o in enumerate(owned):
        for tap, weight in zip(term.need.taps[o], term.need.weights[o], strict=True):
            weights[k, held[tap]] += weight
    copies = bool(held) and bool((weights == 1).sum(1).eq(1).all()) and int((weights != 0).sum()) == len(weights)
    return (weights.argmax(1) if copies else weights).to(local.device)


def _apply(x: Tensor, dim: int, weights: Weights) -> Tensor:
    if isinstance(weights, float):
        return x.sum(dim, keepdim=True) * weights
    if not weights.is_floating_point():
        return x.index_select(dim, weights)
    return (x.movedim(dim, -1) @ weights.to(x.dtype).T).movedim(-1, dim)
