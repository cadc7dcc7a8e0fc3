"""Normalisation with global statistics: every rank contributes its moments forward and its gradient sums backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.plan.program import Compute
from fourfold.runtime.kernels.base import Arguments, Local, Run, attached, kernel, overload, plain
from fourfold.runtime.world import all_gather_single


def _moments(x: Tensor, dims: list[int], counts: list[int], group: Any) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance over `dims` and over the ranks of the group, joined without cancellation."""
    if x.numel():
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    else:
        shape = [1 if d in dims else s for d, s in enumerate(x.shape)]
        variance, mean = x.new_zeros(shape), x.new_zeros(shape)
    parts = x.new_empty((len(counts), 2, mean.numel()))
    all_gather_single(parts.view(-1), torch.cat([mean.reshape(-1), variance.reshape(-1)]), group=group)
    weight = torch.tensor(counts, dtype=x.dtype, device=x.device).view(-1, 1) / sum(counts)
    total = (parts[:, 0] * weight).sum(0)
    spread = ((parts[:, 1] + (parts[:, 0] - total).square()) * weight).sum(0)
    return total.view(mean.shape), spread.view(mean.shape)


class _BatchNorm(torch.autograd.Function):
    """Batch norm with the moments of all ranks; weight and bias gradients are this rank's share."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, counts: list[int], group: Any, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = (t.reshape(-1) for t in _moments(x, [0, *range(2, x.dim())], counts, group))
        y = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0] if x.numel() else x.clone()
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.group, ctx.count, ctx.eps, ctx.has_bias = group, sum(counts), eps, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        g = grads[0].contiguous()
        scale = torch.rsqrt(variance + ctx.eps)
        ones = weight if weight is not None else torch.ones_like(mean)
        if x.numel():
            dx, dw, db = torch.ops.aten.native_batch_norm_backward(
                g, x, ones, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        else:
            dx, dw, db = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.stack([db, dw])
        dist.all_reduce(sums, group=ctx.group)
        sums /= ctx.count
        shape = [1, -1, *(1,) * (x.dim() - 2)]
        slope = -ones * scale * scale * sums[1]
        shift = -ones * scale * sums[0] - slope * mean
        if x.numel():
            dx = torch.addcmul(dx.add_(shift.view(shape)), x, slope.view(shape))
        return dx, dw if weight is not None else None, db if ctx.has_bias else None, None, None, None


class _Normalize(torch.autograd.Function):
    """``(x - mean) / std`` (or ``x / rms``) over dims and ranks, without the affine part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: list[int], counts: list[int], group: Any, eps: float, centred: bool
    ) -> Tensor:
        if centred:
            mean, variance = _moments(x, dims, counts, group)
        else:
            variance = x.square().sum(dims, keepdim=True)
            dist.all_reduce(variance, group=group)
            variance, mean = variance / sum(counts), torch.zeros_like(variance)
        scale = torch.rsqrt(variance + eps)
        y = (x - mean) * scale
        ctx.save_for_backward(y, scale)
        ctx.dims, ctx.count, ctx.group, ctx.centred = dims, sum(counts), group, centred
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, scale = ctx.saved_tensors
        g = grads[0]
        sums = torch.stack([g.sum(ctx.dims, keepdim=True), (g * y).sum(ctx.dims, keepdim=True)])
        dist.all_reduce(sums, group=ctx.group)
        sums = sums / ctx.count
        dx = g - y * sums[1]
        if ctx.centred:
            dx = dx - sums[0]
        return dx * scale, None, None, None, None, None


def _counts(step: Compute, local: Local, axes: tuple[str, ...], dims: list[int]) -> list[int]:
    """How many values each rank of the group brings to one statistic."""
    mesh = local.world.mesh
    shapes = [step.needs[0].local_shape(mesh.coords(r)) for r in mesh.group(local.world.rank, axes)]
    return [math.prod(shape[d] for d in dims) for shape in shapes]


def _track(buffer: Tensor, value: Tensor, momentum: float) -> None:
    buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)


@kernel("batch_norm")
def batch_norm(step: Compute, local: Local) -> Run:
    axes = step.axes_of("joint")
    if not axes:
        return plain(step, local)
    arguments = Arguments(step, local)
    group = local.world.group(axes)
    counts = _counts(step, local, axes, [0, *range(2, len(step.needs[0].dims))])
    total = sum(counts)

    def run(*tensors: Tensor) -> Tensor:
        args, _ = arguments.fill(tensors)
        x, weight, bias, running_mean, running_var, _, momentum, eps = args[:8]
        y, mean, variance = _BatchNorm.apply(x, weight, bias, counts, group, eps)  # type: ignore[no-untyped-call]
        if running_mean is not None:
            with torch.no_grad():
                _track(running_mean, mean, momentum)
                _track(running_var, variance * (total / max(total - 1, 1)), momentum)
        return y

    return run


@kernel("instance_norm")
def instance_norm(step: Compute, local: Local) -> Run:
    axes = step.axes_of("joint")
    if not axes:
        return plain(step, local)
    arguments = Arguments(step, local)
    dims = list(range(2, len(step.needs[0].dims)))
    group, counts = local.world.group(axes), _counts(step, local, axes, dims)

    def run(*tensors: Tensor) -> Tensor:
        args, _ = arguments.fill(tensors)
        x, weight, bias, eps = args[0], args[1], args[2], args[7]
        y = _Normalize.apply(x, dims, counts, group, eps, True)  # type: ignore[no-untyped-call]
        return _affine(y, weight, bias, [1, -1, *(1,) * len(dims)])

    return run


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    if weight is not None:
        y = y * weight.reshape(shape)
    return y + bias.reshape(shape) if bias is not None else y


@kernel("group_norm")
def group_norm(step: Compute, local: Local) -> Run:
    arguments = Arguments(step, local)
    axes = step.axes_of("joint")
    rank = len(step.needs[0].dims)
    x_shape = local.shape(step.needs[0])
    per_group = step.nest.loop("c").size
    groups = x_shape[1] // per_group if step.choice_of("c") is None else step.nest.loop("g").size
    if not axes:
        call = overload(step.op.target)

        def local_groups(*tensors: Tensor) -> Tensor:
            args, kwargs = arguments.fill(tensors)
            args[1] = groups
            return call(*args, **kwargs)

        return local_groups
    group = local.world.group(axes)
    dims = list(range(2, rank + 1))
    counts = _group_counts(step, local, axes)

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        named = dict(zip(("x", "groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
        x = named["x"]
        channels = x.shape[1] // groups if groups else 0
        blocks = x.reshape(x.shape[0], groups, channels, *x.shape[2:])
        y = _Normalize.apply(blocks, dims, counts, group, named.get("eps", 1e-5), True)  # type: ignore[no-untyped-call]
        shape = [1, -1, *(1,) * (rank - 2)]
        return _affine(y.reshape(x.shape), named.get("weight"), named.get("bias"), shape)

    return run


def _group_counts(step: Compute, local: Local, axes: tuple[str, ...]) -> list[int]:
    mesh = local.world.mesh
    out = []
    for r in mesh.group(local.world.rank, axes):
        shape = step.needs[0].local_shape(mesh.coords(r))
        channels = step.nest.loop("c").size if step.choice_of("c") is None else shape[1] // step.nest.loop("g").size
        out.append(channels * math.prod(shape[2:]))
    return out


@kernel("layer_norm")
def layer_norm(step: Compute, local: Local) -> Run:
    axes = step.axes_of("joint")
    if not axes:
        return plain(step, local)
    arguments = Arguments(step, local)
    rms = step.op.target.startswith("aten.rms")
    dims = [d for d, loop in enumerate(step.nest.loops) if loop.kind == "joint"]
    group, counts = local.world.group(axes), _counts(step, local, axes, dims)
    names = ("x", "shape", "weight", "eps") if rms else ("x", "shape", "weight", "bias", "eps")

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        named = dict(zip(names, args, strict=False)) | kwargs
        x, weight, bias = named["x"], named.get("weight"), named.get("bias")
        eps = named.get("eps")
        if eps is None:
            eps = torch.finfo(x.dtype).eps if rms else 1e-5
        y = _Normalize.apply(x, dims, counts, group, eps, not rms)  # type: ignore[no-untyped-call]
        if weight is not None:
            y = y * weight
        y = y + bias if bias is not None else y
        return attached(y, [t for t in tensors if not y.numel()])

    return run
