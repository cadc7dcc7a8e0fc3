"""Softmax over a divided dim, and attention for the query rows a rank owns."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.ownership import Own
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.comm.world import World
from fourfold.runtime.kernels.base import RankContext, Run, is_split, joint_kernel, kernel
from fourfold.runtime.kernels.random import drop


def joint_log_softmax(x: Tensor, dim: int, world: World, axes: tuple[str, ...]) -> Tensor:
    """log-softmax of a dim divided along some axes; no gradient of its own."""
    top = x.amax(dim, keepdim=True) if x.shape[dim] else x.new_full(_reduced_shape(x, dim), -math.inf)
    shifted = x - world.all_reduce_max(top, axes)
    return shifted - world.all_reduce(shifted.exp().sum(dim, keepdim=True), axes).log()


def _reduced_shape(x: Tensor, dim: int) -> list[int]:
    return [1 if d == dim else s for d, s in enumerate(x.shape)]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, world: World, axes: tuple[str, ...], log: bool) -> Tensor:
        y = joint_log_softmax(x, dim, world, axes)
        ctx.dim, ctx.world, ctx.axes, ctx.log = dim, world, axes, log
        y = y if log else y.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (y,), g = ctx.saved_tensors, grads[0]
        total = ctx.world.all_reduce((g if ctx.log else g * y).sum(ctx.dim, keepdim=True), ctx.axes)
        return (g - y.exp() * total) if ctx.log else y * (g - total), None, None, None, None


def log_softmax(x: Tensor, dim: int, world: World, axes: tuple[str, ...]) -> Tensor:
    """log-softmax of a dim divided along some axes."""
    return _Softmax.apply(x, dim, world, axes, True)  # type: ignore[no-untyped-call]


@joint_kernel("softmax")
def softmax(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    world, dim, log = local.world, step.nest.detail["dim"], step.nest.detail["log"]
    return lambda x: _Softmax.apply(x, dim, world, axes, log)  # type: ignore[no-untyped-call]


@kernel("attention")
def attention(step: Compute, local: RankContext) -> Run:
    detail = step.nest.detail
    rows = list(local.box(step.gives[0])[2])
    keys = step.needs[1].shape[2]
    causal, split = detail["causal"], is_split(step, "t")
    mask_given = len(step.inputs) > 3
    group = detail["group"] if not is_split(step, "g") else None if detail["group"] > 1 else 1
    visible = None
    if causal and (split or detail["dropout"]):
        index = torch.tensor(rows, device=local.device)
        visible = index[:, None] >= torch.arange(keys, device=local.device)[None, :]
    pick = None
    if group is None:  # query heads of one group on several ranks: pair each with its key-value head
        heads = list(local.box(step.gives[0])[1])
        held = {h: k for k, h in enumerate(local.box(step.needs[1])[1])}
        pick = torch.tensor([held[h // detail["group"]] for h in heads], device=local.device)

    def run(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        bias = mask[0] if mask_given else visible
        if pick is not None:
            k, v = k.index_select(1, pick), v.index_select(1, pick)
        enable_gqa = q.shape[1] != k.shape[1]
        if detail["dropout"]:
            return _drop_attention(q, k, v, bias, step, local, enable_gqa)
        return F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=causal and bias is None, scale=detail["scale"], enable_gqa=enable_gqa
        )

    return run


def _drop_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, step: Compute, local: RankContext, enable_gqa: bool
) -> Tensor:
    """Attention written out, because its dropout mask is drawn by `drop`."""
    if enable_gqa:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scale = step.nest.detail["scale"] or 1 / math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    weights = scores.softmax(-1)
    layout = step.gives[0]
    square = Layout((*layout.dims[:3], Own.whole(k.shape[2])))
    return drop(weights, step.nest.detail["dropout"], step, local, square) @ v
