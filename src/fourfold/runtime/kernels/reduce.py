"""Reductions over divided dims: means, and reductions that are not sums. Every rank reduces its shard, and the ranks combine a
few numbers.

Results and their gradients are the same on all ranks of the group, so backward communicates only to count ties.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.comm.world import World
from fourfold.runtime.kernels.base import RankContext, Run, joint_kernel, kernel, plain


class JointSum(torch.autograd.Function):
    """A sum over ranks whose result, and gradient, is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, axes: tuple[str, ...]) -> Tensor:
        return world.all_reduce(x, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None, None


def joint_sum(x: Tensor, world: World, axes: tuple[str, ...]) -> Tensor:
    return JointSum.apply(x, world, axes)  # type: ignore[no-untyped-call]


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _local_max(x: Tensor, dims: list[int]) -> Tensor:
    """The maximum over dims, with keepdim; the dtype's lowest value for an empty shard."""
    if all(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True)
    return x.new_full([1 if d in dims else s for d, s in enumerate(x.shape)], _lowest(x.dtype))


def _drop_dims(y: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Without the reduced dims, unless the op has keepdim."""
    return y if keepdim else y.reshape([s for d, s in enumerate(y.shape) if d not in dims])


class _Extreme(torch.autograd.Function):
    """Maximum over dims and ranks; equal maxima share the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], world: World, axes: tuple[str, ...]) -> Tensor:
        top = world.all_gather(_local_max(x, dims), axes).amax(0)
        ctx.save_for_backward(x == top)
        ctx.dims, ctx.world, ctx.axes = dims, world, axes
        return top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (mask,), g = ctx.saved_tensors, grads[0]
        ties = ctx.world.all_reduce(mask.sum(ctx.dims, keepdim=True).to(g.dtype), ctx.axes)
        return mask * (g / ties), None, None, None


@joint_kernel("extreme")
def extreme(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    detail = step.nest.detail
    dims, sign = list(detail["dims"]), detail["sign"]

    def run(x: Tensor) -> Tensor:
        y = _Extreme.apply(x * sign, dims, local.world, axes) * sign  # type: ignore[no-untyped-call]
        return _drop_dims(y, dims, detail["keepdim"])

    return run


class MaxWithIndex(torch.autograd.Function):
    """Maximum along one divided dim with its index in the whole dim; the first of equals counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rows: Tensor, world: World, axes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        if x.shape[dim]:
            value, at = x.max(dim, keepdim=True)
            row = rows[at]
        else:
            value = _local_max(x, [dim])
            row = torch.full_like(value, torch.iinfo(torch.long).max, dtype=torch.long)
        values, places = world.all_gather(value, axes), world.all_gather(row, axes)
        top = values.amax(0)
        place = torch.where((values == top) | values.isnan(), places, torch.iinfo(torch.long).max).amin(0)
        ctx.save_for_backward(place, rows)
        ctx.dim, ctx.rank = dim, x.dim()
        ctx.mark_non_differentiable(place)
        return top, place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        place, rows = ctx.saved_tensors
        mine = rows.view([-1 if d == ctx.dim else 1 for d in range(ctx.rank)])
        return grads[0] * (place == mine), None, None, None, None


def global_rows(step: Compute, local: RankContext, dim: int) -> Tensor:
    """Global numbers of the rows this rank holds of the first operand."""
    return torch.tensor(list(local.box(step.needs[0])[dim]), dtype=torch.long, device=local.device)


@joint_kernel("picked")
def max_with_index(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    detail = step.nest.detail
    (dim,), sign = detail["dims"], detail["sign"]
    rows = global_rows(step, local, dim)

    def run(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        value, place = MaxWithIndex.apply(x * sign, dim, rows, local.world, axes)  # type: ignore[no-untyped-call]
        value, place = (_drop_dims(t, [dim], detail["keepdim"]) for t in (value * sign, place))
        return (value, place) if detail["values"] else place

    return run


@joint_kernel("moments")
def moments(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    detail = step.nest.detail
    dims, count = list(detail["dims"]), detail["count"]
    freedom = max(count - detail["correction"], 0)

    def run(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        mean = joint_sum(x.sum(dims, keepdim=True), local.world, axes) / count
        # the deviations sum to zero, so the variance does not change with the mean to first order: no gradient flows there
        spread = joint_sum((x - mean.detach()).square().sum(dims, keepdim=True), local.world, axes) / freedom
        if detail["root"]:
            spread = torch.where(spread > 0, torch.where(spread > 0, spread, 1.0).sqrt(), spread)
        out = _drop_dims(spread, dims, detail["keepdim"])
        return (out, _drop_dims(mean, dims, detail["keepdim"])) if detail["mean"] else out

    return run


class _Norm(torch.autograd.Function):
    """``(sum |x|^p)^(1/p)`` over dims and ranks; zero has gradient zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], order: float, world: World, axes: tuple[str, ...]) -> Tensor:
        y = world.all_reduce(x.abs().pow(order).sum(dims, keepdim=True), axes).pow(1 / order)
        ctx.save_for_backward(x, y)
        ctx.order = order
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        slope = x.sign() * (x.abs() / torch.where(y > 0, y, 1.0)).pow(ctx.order - 1)
        return grads[0] * slope * (y > 0), None, None, None, None


@joint_kernel("vector_norm")
def vector_norm(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    detail = step.nest.detail
    dims = list(detail["dims"])

    def run(x: Tensor) -> Tensor:
        y = _Norm.apply(x, dims, detail["order"], local.world, axes)  # type: ignore[no-untyped-call]
        return _drop_dims(y, dims, detail["keepdim"])

    return run


@joint_kernel("logsumexp")
def logsumexp(step: Compute, local: RankContext, axes: tuple[str, ...]) -> Run:
    detail = step.nest.detail
    dims = list(detail["dims"])

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            top = local.world.all_gather(_local_max(x, dims), axes).amax(0)
            top = torch.where(top.isinf(), torch.zeros_like(top), top)
        y = top + joint_sum((x - top).exp().sum(dims, keepdim=True), local.world, axes).log()
        return _drop_dims(y, dims, detail["keepdim"])

    return run


@kernel("mean")
def mean(step: Compute, local: RankContext) -> Run:
    """A mean whose dims are divided is a sum over the global count."""
    detail = step.nest.detail
    if not step.axes_of("sum"):
        return plain(step, local)
    dims, count, keep = list(detail["dims"]), detail["count"], detail["keepdim"]
    return lambda x: x.sum(dims, keepdim=keep) / count if dims else x
