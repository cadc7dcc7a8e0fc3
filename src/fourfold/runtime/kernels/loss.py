"""Losses on a shard: local terms over the global denominator; means of plain tensors likewise."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.loss import MEAN, NONE, SUM
from fourfold.plan.program import Compute
from fourfold.runtime.kernels.attention import joint_log_softmax
from fourfold.runtime.kernels.base import Arguments, Local, Run, kernel, overload, plain
from fourfold.runtime.world import World


@kernel("mean")
def mean(step: Compute, local: Local) -> Run:
    detail = step.nest.detail
    if not step.axes_of("sum"):
        return plain(step, local)
    dims, count, keep = list(detail["dims"]), detail["count"], detail["keepdim"]
    return lambda x: x.sum(dims, keepdim=keep) / count if dims else x


class _PickedLoss(torch.autograd.Function):
    """Negative log-likelihood with the classes divided over a group; the result is the same on all its ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, group: Any) -> Tensor:
        logp = joint_log_softmax(x, 1, group)
        mine = (at >= 0).unsqueeze(1)
        index = at.clamp(min=0).unsqueeze(1)
        picked = logp.gather(1, index) * mine if x.shape[1] else x.new_zeros(index.shape)
        dist.all_reduce(picked, group=group)
        ctx.save_for_backward(logp, index, mine)
        return -picked.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logp, index, mine = ctx.saved_tensors
        g = grads[0].unsqueeze(1)
        dx = logp.exp() * g
        if dx.shape[1]:
            dx.scatter_add_(1, index, -(g * mine))
        return dx, None, None


@kernel("cross_entropy")
def cross_entropy(step: Compute, local: Local) -> Run:
    detail, sums = step.nest.detail, step.axes_of("sum")
    classes = step.axes_of("joint")
    if not sums and not classes:
        return plain(step, local)
    arguments = Arguments(step, local)
    if sums:
        local.world.group(sums)  # made now, by all ranks
    place = _places(step, local) if classes else None
    split = local.world.group(classes) if classes else None
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    spatial = 1
    for size in step.needs[0].shape[2:]:
        spatial *= size

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        named = dict(zip(names, args, strict=False)) | kwargs
        x, target, weight = named["input"], named["target"], named.get("weight")
        if place is not None:
            losses = _weighted(_PickedLoss.apply(x, _at(place, target, detail), split), target, weight, detail)  # type: ignore[no-untyped-call]
            total = losses if detail["reduction"] == NONE else losses.sum()
        else:
            total = _total(x, target, weight, detail)
        if detail["reduction"] != MEAN:
            return total
        if detail["soft"]:
            return total / (detail["rows"] * spatial)
        return total / _denominator(target, weight, detail, total, local.world, sums)

    return run


def _total(x: Tensor, target: Tensor, weight: Tensor | None, detail: Any) -> Tensor:
    reduction = "none" if detail["reduction"] == NONE else "sum"
    if not x.numel():
        return x.sum()
    if not detail["logits"]:
        return F.nll_loss(x, target, weight, ignore_index=detail["ignore"], reduction=reduction)
    if detail["soft"]:
        return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=detail["smoothing"])
    return F.cross_entropy(
        x, target, weight, ignore_index=detail["ignore"], reduction=reduction, label_smoothing=detail["smoothing"]
    )


def _denominator(
    target: Tensor, weight: Tensor | None, detail: Any, total: Tensor, world: World, axes: tuple[str, ...]
) -> Tensor:
    """The sum of the weights of all targets that count, on all ranks."""
    valid = target != detail["ignore"]
    with torch.no_grad():
        count = valid.sum().to(total.dtype) if weight is None else (weight[target.clamp(min=0)] * valid).sum().to(total.dtype)
        return world.summed(count, axes) if axes else count


def _places(step: Compute, local: Local) -> Tensor:
    """Global class -> local column, -1 where another rank owns it."""
    owned = torch.tensor(list(local.box(step.needs[0])[1]), dtype=torch.long, device=local.device)
    place = torch.full((step.needs[0].shape[1],), -1, dtype=torch.long, device=local.device)
    place[owned] = torch.arange(len(owned), device=local.device)
    return place


def _at(place: Tensor, target: Tensor, detail: Any) -> Tensor:
    safe = torch.where(target == detail["ignore"], torch.zeros_like(target), target)
    return place[safe]


def _weighted(losses: Tensor, target: Tensor, weight: Tensor | None, detail: Any) -> Tensor:
    valid = target != detail["ignore"]
    losses = losses * valid
    if weight is not None:
        losses = losses * weight[torch.where(valid, target, torch.zeros_like(target))]
    return losses


@kernel("elementwise_loss")
def elementwise_loss(step: Compute, local: Local) -> Run:
    detail = step.nest.detail
    if not step.axes_of("sum"):
        return plain(step, local)
    arguments, call = Arguments(step, local), overload(step.op.target)
    at, count = detail["position"], detail["count"]

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        while len(args) <= at:
            args.append(kwargs.pop("reduction", MEAN) if len(args) == at else None)
        args[at] = SUM
        total = call(*args, **{k: v for k, v in kwargs.items() if k != "reduction"})
        return total / count if detail["reduction"] == MEAN else total

    return run
