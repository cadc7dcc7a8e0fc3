"""Losses on a shard: local terms over the global denominator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.loss import MEAN, NONE, SUM
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.comm.world import World
from fourfold.runtime.kernels.attention import joint_log_softmax, log_softmax
from fourfold.runtime.kernels.base import Arguments, RankContext, Run, kernel, overload, plain
from fourfold.runtime.kernels.reduce import joint_sum


class _JointNllLoss(torch.autograd.Function):
    """Negative log-likelihood with the classes divided along some axes; the result is the same on all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, world: World, axes: tuple[str, ...]) -> Tensor:
        logp = joint_log_softmax(x, 1, world, axes)
        mine = (at >= 0).unsqueeze(1)
        index = at.clamp(min=0).unsqueeze(1)
        picked = logp.gather(1, index) * mine if x.shape[1] else x.new_zeros(index.shape)
        ctx.save_for_backward(logp, index, mine)
        return -world.all_reduce(picked, axes).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logp, index, mine = ctx.saved_tensors
        g = grads[0].unsqueeze(1)
        dx = logp.exp() * g
        if dx.shape[1]:
            dx.scatter_add_(1, index, -(g * mine))
        return dx, None, None, None


@kernel("cross_entropy")
def cross_entropy(step: Compute, local: RankContext) -> Run:
    detail, sums = step.nest.detail, step.axes_of("sum")
    classes = step.axes_of("joint")
    if not sums and not classes:
        return plain(step, local)
    arguments = Arguments(step, local)
    if sums:
        local.world.group(sums)  # created now, because all ranks must take part
    divided = _Classes.of(step, local, classes) if classes else None
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    spatial = 1
    for size in step.needs[0].shape[2:]:
        spatial *= size

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        named = dict(zip(names, args, strict=False)) | kwargs
        x, target, weight = named["input"], named["target"], named.get("weight")
        if divided is not None:
            if torch.is_autocast_enabled(x.device.type):  # as log_softmax does inside of the op
                x = x.float()
            losses = divided.losses(x, target, weight, detail)
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
    valid, safe = _valid(target, detail)
    with torch.no_grad():
        count = valid.sum().to(total.dtype) if weight is None else (weight[safe] * valid).sum().to(total.dtype)
        return world.all_reduce(count, axes) if axes else count


def _valid(target: Tensor, detail: Any) -> tuple[Tensor, Tensor]:
    """Which targets count, and the targets with 0 for those that do not."""
    valid = target != detail["ignore"]
    return valid, torch.where(valid, target, torch.zeros_like(target))


@dataclass(frozen=True)
class _Classes:
    """Classes divided over ranks: every rank has the terms of its own, the loss per sample is their sum."""

    world: World
    axes: tuple[str, ...]
    place: Tensor  # global class -> local column, -1 where another rank owns it
    owned: Tensor

    @staticmethod
    def of(step: Compute, local: RankContext, axes: tuple[str, ...]) -> _Classes:
        local.world.group(axes)  # created now, because all ranks must take part
        owned = torch.tensor(list(local.box(step.needs[0])[1]), dtype=torch.long, device=local.device)
        place = torch.full((step.needs[0].shape[1],), -1, dtype=torch.long, device=local.device)
        place[owned] = torch.arange(len(owned), device=local.device)
        return _Classes(local.world, axes, place, owned)

    def losses(self, x: Tensor, target: Tensor, weight: Tensor | None, detail: Any) -> Tensor:
        smooth = detail["smoothing"]
        if detail["soft"]:
            share = target * (1 - smooth) + smooth / len(self.place) if smooth else target
            return -self._sum(log_softmax(x, 1, self.world, self.axes) * share, weight)
        valid, safe = _valid(target, detail)
        factor = valid.to(x.dtype) if weight is None else valid * weight[safe]
        if detail["logits"] and not smooth:
            picked = _JointNllLoss.apply(x, self.place[safe], self.world, self.axes)  # type: ignore[no-untyped-call]
            return picked * factor
        logp = log_softmax(x, 1, self.world, self.axes) if detail["logits"] else x
        loss = -self._at_targets(logp, self.place[safe]) * factor
        return (1 - smooth) * loss - smooth / len(self.place) * self._sum(logp, weight) * valid if smooth else loss

    def _sum(self, terms: Tensor, weight: Tensor | None) -> Tensor:
        """Over all classes, weighted."""
        if weight is not None:
            terms = terms * weight[self.owned].view(-1, *(1,) * (terms.dim() - 2))
        return joint_sum(terms.sum(1), self.world, self.axes)

    def _at_targets(self, logp: Tensor, at: Tensor) -> Tensor:
        """The value of each target's class."""
        if not len(self.owned):
            return joint_sum(logp.sum(1), self.world, self.axes)
        mine = logp.gather(1, at.clamp(min=0).unsqueeze(1)).squeeze(1)
        return joint_sum(torch.where(at >= 0, mine, torch.zeros_like(mine)), self.world, self.axes)


@kernel("elementwise_loss")
def elementwise_loss(step: Compute, local: RankContext) -> Run:
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
