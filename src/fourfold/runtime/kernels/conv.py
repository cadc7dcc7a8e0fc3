"""Convolutions on a shard: the rows needed have been fetched; padding only at the global border."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.nest import Window
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import RankContext, Run, adds_bias, attach, is_split, kernel

_CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def _groups(step: Compute, local: RankContext) -> int:
    if not any(loop.name == "g" for loop in step.nest.loops):
        return 1
    return len(step.loops["g"].at(local.world.coords))


def _add_bias(step: Compute, local: RankContext, y: Tensor, rest: tuple[Tensor, ...], adds: bool, count: int) -> Tensor:
    """Add the bias on one rank; the others only attach it to their graph."""
    if not rest:
        return y
    return y + rest[0].view(-1, *(1,) * count) if adds else attach(y, rest)


@kernel("conv")
def conv(step: Compute, local: RankContext) -> Run:
    detail, count = step.nest.detail, len(step.nest.detail["kernel"])
    call, groups = _CONV[count], _groups(step, local)
    stride, dilation = list(detail["stride"]), list(detail["dilation"])
    adds, shape = adds_bias(step, local), local.shape(step.gives[0])
    padding, before_after = [0] * count, [0] * (2 * count)
    for i, (low, high) in enumerate(detail["padding"]):
        at = 2 * (count - 1 - i)
        if is_split(step, f"d{i}"):
            term = step.nest.operands[0][2 + i][0]
            assert isinstance(term, Window)
            start, stop = term.need.reach(local.box(step.gives[0])[2 + i])  # type: ignore[attr-defined]
            size = step.needs[0].dims[2 + i].size
            before_after[at : at + 2] = [max(0, -start), max(0, stop - size)]
        elif low == high:
            padding[i] = low
        else:
            before_after[at : at + 2] = [low, high]
    empty = math.prod(local.shape(step.needs[0])) == 0
    plain = not any(before_after) and adds and not empty

    def run(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        if plain:
            return call(x, w, bias[0] if bias else None, stride, padding, dilation, groups)
        if empty:
            y = attach(x.new_zeros(shape), (x, w))
        else:
            padded = F.pad(x, before_after) if any(before_after) else x
            if adds:
                return call(padded, w, bias[0] if bias else None, stride, padding, dilation, groups)
            y = call(padded, w, None, stride, padding, dilation, groups)
        return _add_bias(step, local, y, bias, adds, count)

    return run


@kernel("conv_transpose")
def conv_transpose(step: Compute, local: RankContext) -> Run:
    detail, count = step.nest.detail, len(step.nest.detail["kernel"])
    call, groups = _TRANSPOSED[count], _groups(step, local)
    stride, dilation, kernel_size = list(detail["stride"]), list(detail["dilation"]), detail["kernel"]
    adds, shape = adds_bias(step, local), local.shape(step.gives[0])
    padding, extra, crop = list(detail["padding"]), [0] * count, [0] * (2 * count)
    for i in range(count):
        size, out = step.needs[0].dims[2 + i].size, step.gives[0].dims[2 + i].size
        if not is_split(step, f"d{i}"):
            extra[i] = out - ((size - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel_size[i] - 1) + 1)
            continue
        (first, last), (low, high) = local.box(step.needs[0])[2 + i].bounds, local.box(step.gives[0])[2 + i].bounds
        begin = first * stride[i] - padding[i]
        end = begin + (last - first - 1) * stride[i] + dilation[i] * (kernel_size[i] - 1) + 1
        crop[2 * (count - 1 - i) : 2 * (count - i)] = [begin - low, high - end]
        padding[i] = 0
    empty = math.prod(local.shape(step.needs[0])) == 0
    plain = not any(crop) and adds and not empty

    def run(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        if plain:
            return call(x, w, bias[0] if bias else None, stride, padding, extra, groups, dilation)
        if empty:
            y = attach(x.new_zeros(shape), (x, w))
        else:
            y = call(x, w, None, stride, padding, extra, groups, dilation)
            y = F.pad(y, crop) if any(crop) else y
        return _add_bias(step, local, y, bias, adds, count)

    return run
