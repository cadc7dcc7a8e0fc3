"""Normalisation with global statistics: every rank contributes its moments forward and its gradient sums backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.comm.world import World
from fourfold.runtime.kernels.base import Arguments, RankContext, Run, attach, joint_kernel, kernel, overload, plain


@dataclass(frozen=True)
class _Shares:
    """The number of values that each rank along some axes contributes to one statistic."""

    world: World
    axes: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @cached_property
    def weights(self) -> Tensor:
        """Each rank's part of the whole, as a column."""
        counts = torch.tensor(self.counts, dtype=torch.float64, device=self.world.device)
        return (counts / self.total).view(-1, 1, 1)

    @cached_property
    def counts_on_device(self) -> Tensor:
        return torch.tensor(self.counts, dtype=torch.int32, device=self.world.device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.world.all_reduce(tensor, self.axes)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics of half-precision values are float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _moments(rows: Tensor, shares: _Shares) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of ``rows[0, k]`` for every k over all ranks, joined without cancellation."""
    dtype = _statistics_dtype(rows.dtype)
    if rows.numel():
        wide = rows if rows.is_cuda else rows.to(dtype)  # a GPU's kernel adds in float32 by itself
        mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)  # much faster than var_mean on a CPU
    else:
        mean, variance = rows.new_zeros(rows.shape[1], dtype=dtype), rows.new_zeros(rows.shape[1], dtype=dtype)
    parts = shares.world.all_gather(torch.stack([mean, variance]), shares.axes)
    weights = shares.weights.to(dtype)
    joined = (parts * weights).sum(0)
    joined[1] += ((parts[:, 0] - joined[0]).square_() * weights[:, 0]).sum(0)
    return joined[0], joined[1]


class _BatchNorm(torch.autograd.Function):
    """Batch norm with the moments of all ranks; weight and bias gradients are this rank's share.

    A GPU has kernels of its own for each half (those of SyncBatchNorm); native_batch_norm's backward there wants moments that
    its own forward has saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shares: _Shares, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = _moments(x, shares)
        if not x.numel():
            y = x.clone()
        elif x.is_cuda:
            y = torch.batch_norm_elemt(x, weight, bias, mean, torch.rsqrt(variance + eps), eps)
        else:
            y = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.shares, ctx.eps, ctx.has_bias = shares, eps, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        run = _backward_on_gpu if x.is_cuda else _backward
        dx, dw, db = run(grads[0], x, weight, mean, variance, ctx.shares, ctx.eps)
        return dx, dw if weight is not None else None, db if ctx.has_bias else None, None, None


Gradients = tuple[Tensor, Tensor, Tensor]


def _backward(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, shares: _Shares, eps: float
) -> Gradients:
    """The gradients of x, weight and bias, by ``dx = w scale (g - mean(g) - xhat mean(g xhat))``, whose last two terms are a
    batch norm of x."""
    g = g.contiguous()
    ones = weight if weight is not None else torch.ones_like(mean)
    dx, dw, db = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    if x.numel():
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            g, x, ones, mean, variance, None, None, False, eps, [False, True, True]
        )
    means = shares.all_reduce(torch.stack([db, dw])) / -shares.total
    if x.numel():
        factor = ones * torch.rsqrt(variance + eps)
        shift, slope = means * factor
        dx = torch.native_batch_norm(x, slope, shift, mean, variance, False, 0.0, eps)[0]
        dx.addcmul_(g, factor.to(g.dtype).view(1, -1, *(1,) * (x.dim() - 2)))
    return dx, dw, db


def _backward_on_gpu(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, shares: _Shares, eps: float
) -> Gradients:
    """The same by SyncBatchNorm's kernels."""
    scale = torch.rsqrt(variance + eps)
    dw, db = torch.zeros_like(mean), torch.zeros_like(mean)
    if x.numel():
        g = _in_format_of(g, x)
        _, _, dw, db = torch.batch_norm_backward_reduce(g, x, mean, scale, _like_weight(weight, mean), False, True, True)
    sums = shares.all_reduce(torch.stack([db, dw]).to(mean.dtype))
    if not x.numel():
        return torch.zeros_like(x), dw, db
    dx = torch.batch_norm_backward_elemt(g, x, mean, scale, weight, sums[0], sums[1] / scale, shares.counts_on_device)
    return dx, dw, db


def _like_weight(weight: Tensor | None, mean: Tensor) -> Tensor:
    """The kernel gives no gradients without a weight, by which it does not multiply."""
    return weight if weight is not None else torch.ones_like(mean)


def _in_format_of(g: Tensor, x: Tensor) -> Tensor:
    """A gradient in the memory format of its tensor."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return g.contiguous(memory_format=last) if last and x.is_contiguous(memory_format=last) else g.contiguous()


def _rows(x: Tensor, first: int) -> Tensor:
    """One row per statistic; a shard without samples has no rows, and -1 could not infer their length."""
    return x.reshape(1, math.prod(x.shape[:first]), math.prod(x.shape[first:]))


class _Normalize(torch.autograd.Function):
    """``(x - mean) / std`` (or ``x / rms``) over all dims from `first` on and over ranks, without the affine part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, shares: _Shares, eps: float, subtract_mean: bool) -> Tensor:
        dims, kept = list(range(first, x.dim())), [*x.shape[:first], *(1,) * (x.dim() - first)]
        if subtract_mean:
            mean, variance = (t.view(kept) for t in _moments(_rows(x, first), shares))
        else:
            variance = shares.all_reduce(x.to(_statistics_dtype(x.dtype)).square().sum(dims, keepdim=True)) / shares.total
            mean = torch.zeros_like(variance)
        scale = torch.rsqrt(variance + eps)
        y = ((x - mean) * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        ctx.dims, ctx.shares, ctx.subtract_mean = dims, shares, subtract_mean
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, scale = ctx.saved_tensors
        g = grads[0]
        wide = scale.dtype
        sums = torch.stack([g.sum(ctx.dims, keepdim=True, dtype=wide), (g * y).sum(ctx.dims, keepdim=True, dtype=wide)])
        sums = ctx.shares.all_reduce(sums) / ctx.shares.total
        dx = g - y * sums[1]
        if ctx.subtract_mean:
            dx = dx - sums[0]
        return (dx * scale).to(y.dtype), None, None, None, None


def _shares(step: Compute, local: RankContext, axes: tuple[str, ...], count: Callable[[tuple[int, ...]], int]) -> _Shares:
    """The shares of the ranks along the axes; `count`: values per statistic from a local shape."""
    mesh = local.world.mesh
    if axes:
        local.world.group(axes)  # created now, because all ranks must take part
    shapes = [step.needs[0].local_shape(mesh.coords(r)) for r in mesh.group(local.world.rank, axes)]
    return _Shares(local.world, axes, tuple(map(count, shapes)))


def _track(buffer: Tensor, value: Tensor, momentum: float) -> None:
    buffer.lerp_(value.to(buffer.dtype), momentum)


@joint_kernel("batch_norm")
def batch_norm(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    arguments = Arguments(step, local)
    shares = _shares(step, local, axes, lambda shape: shape[0] * math.prod(shape[2:]))
    total = shares.total

    def run(*tensors: Tensor) -> Tensor:
        args, _ = arguments.fill(tensors)
        x, weight, bias, running_mean, running_var, _, momentum, eps = args[:8]
        y, mean, variance = _BatchNorm.apply(x, weight, bias, shares, eps)  # type: ignore[no-untyped-call]
        if running_mean is not None:
            with torch.no_grad():
                _track(running_mean, mean, momentum)
                _track(running_var, variance * (total / max(total - 1, 1)), momentum)
        return y

    return run


@kernel("instance_norm")
def instance_norm(step: Compute, local: RankContext) -> Run:
    axes = step.axes_of("joint")
    if not axes:
        return plain(step, local)
    arguments = Arguments(step, local)
    samples = tuple(a for a in axes if step.choice[a] == "n")
    space = tuple(a for a in axes if a not in samples)
    shares = _shares(step, local, space, lambda shape: math.prod(shape[2:]))
    across = _shares(step, local, samples, lambda shape: shape[0])
    spread = [1, -1, *(1,) * (len(step.needs[0].dims) - 2)]

    def run(*tensors: Tensor) -> Tensor:
        args, _ = arguments.fill(tensors)
        x, weight, bias, running_mean, running_var, _, momentum, eps = args[:8]
        y = _Normalize.apply(x, 2, shares, eps, True)  # type: ignore[no-untyped-call]
        if running_mean is not None:
            with torch.no_grad():
                rows = [t.view(x.shape[:2]).sum(0) for t in _moments(_rows(x, 2), shares)]
                mean, variance = across.all_reduce(torch.stack(rows)) / across.total
                _track(running_mean, mean, momentum)
                _track(running_var, variance * (shares.total / max(shares.total - 1, 1)), momentum)
        return _affine(y, weight, bias, spread)

    return run


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    if weight is not None:
        y = y * weight.reshape(shape)
    return y + bias.reshape(shape) if bias is not None else y


@kernel("group_norm")
def group_norm(step: Compute, local: RankContext) -> Run:
    arguments = Arguments(step, local)
    axes = step.axes_of("joint")
    rank = len(step.needs[0].dims)
    groups = len(step.loops["g"].at(local.world.coords))
    if not axes:
        call = overload(step.op.target)

        def local_groups(*tensors: Tensor) -> Tensor:
            args, kwargs = arguments.fill(tensors)
            args[1] = groups
            return call(*args, **kwargs)

        return local_groups
    shares = _shares(step, local, axes, lambda shape: shape[1] // groups * math.prod(shape[2:]) if groups else 0)

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        named = dict(zip(("x", "groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
        x = named["x"]
        channels = x.shape[1] // groups if groups else 0
        blocks = x.reshape(x.shape[0], groups, channels, *x.shape[2:])
        y = _Normalize.apply(blocks, 2, shares, named.get("eps", 1e-5), True)  # type: ignore[no-untyped-call]
        shape = [1, -1, *(1,) * (rank - 2)]
        return _affine(y.reshape(x.shape), named.get("weight"), named.get("bias"), shape)

    return run


@joint_kernel("layer_norm")
def layer_norm(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    arguments = Arguments(step, local)
    rms = step.op.target.startswith("aten.rms")
    first = next(d for d, loop in enumerate(step.nest.loops) if loop.kind == "joint")
    shares = _shares(step, local, axes, lambda shape: math.prod(shape[first:]))
    names = ("x", "shape", "weight", "eps") if rms else ("x", "shape", "weight", "bias", "eps")

    def run(*tensors: Tensor) -> Tensor:
        args, kwargs = arguments.fill(tensors)
        named = dict(zip(names, args, strict=False)) | kwargs
        x, weight, bias = named["x"], named.get("weight"), named.get("bias")
        eps = named.get("eps")
        if eps is None:
            eps = torch.finfo(x.dtype).eps if rms else 1e-5
        y = _Normalize.apply(x, first, shares, eps, not rms)  # type: ignore[no-untyped-call]
        if weight is not None:
            y = y * weight
        y = y + bias if bias is not None else y
        return attach(y, [t for t in tensors if not y.numel()])

    return run
