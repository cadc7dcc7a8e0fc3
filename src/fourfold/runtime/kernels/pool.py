"""Pooling on a shard: windows were fetched, borders are padded, averages divide by global counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.nest import Window
from fourfold.ops.window import RowMap
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import RankContext, Run, is_split, kernel, plain
from fourfold.runtime.kernels.reduce import MaxWithIndex, global_rows
from fourfold.runtime.kernels.resample import loops_of

_MAX = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}


def _borders(step: Compute, local: RankContext) -> list[int]:
    """Padding before and after every spatial dim, last dim first, as F.pad takes it."""
    out: list[int] = []
    for i in reversed(range(len(step.nest.detail["kernel"]))):
        term = step.nest.operands[0][2 + i][0]
        assert isinstance(term, Window)
        start, stop = term.need.reach(local.box(step.gives[0])[2 + i])  # type: ignore[attr-defined]
        out += [max(0, -start), max(0, stop - step.needs[0].dims[2 + i].size)]
    return out


def _split(step: Compute) -> bool:
    return any(is_split(step, f"d{i}") for i in range(len(step.nest.detail["kernel"])))


def _drop_unused_rows(x: Tensor, step: Compute, local: RankContext) -> Tensor:
    """Drop rows of unsplit dims past the last window (torch would ignore them)."""
    for i in range(len(step.nest.detail["kernel"])):
        term = step.nest.operands[0][2 + i][0]
        assert isinstance(term, Window)
        if not is_split(step, f"d{i}"):
            _, stop = term.need.reach(local.box(step.gives[0])[2 + i])  # type: ignore[attr-defined]
            x = x.narrow(2 + i, 0, min(stop, x.shape[2 + i]))
    return x


@kernel("max_pool")
def max_pool(step: Compute, local: RankContext) -> Run:
    if not _split(step):
        return plain(step, local)
    detail = step.nest.detail
    call, borders = _MAX[len(detail["kernel"])], _borders(step, local)
    many = len(step.op.results) > 1

    def run(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = _drop_unused_rows(x, step, local)
        x = F.pad(x, borders, value=-math.inf) if any(borders) else x
        y = call(x, detail["kernel"], detail["stride"], 0, detail["dilation"])
        return (y, torch.zeros_like(y, dtype=torch.long)) if many else y

    return run


@kernel("avg_pool")
def avg_pool(step: Compute, local: RankContext) -> Run:
    if not _split(step):
        return plain(step, local)
    detail, borders = step.nest.detail, _borders(step, local)
    count = len(detail["kernel"])
    divisors = [_divisors(step, local, i) for i in range(count)]

    def run(x: Tensor) -> Tensor:
        x = _drop_unused_rows(x, step, local)
        x = F.pad(x, borders) if any(borders) else x
        y = _window_sums(x, detail["kernel"], detail["stride"])
        if detail["divisor"]:
            return y / detail["divisor"]
        for i, divisor in enumerate(divisors):
            y = y / divisor.to(y.dtype).view(-1, *(1,) * (count - 1 - i))
        return y

    return run


def _window_sums(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Window sums in one to three dims."""
    if len(size) == 1:
        return F.avg_pool2d(x.unsqueeze(-2), (1, *size), (1, *stride), divisor_override=1).squeeze(-2)
    call = F.avg_pool2d if len(size) == 2 else F.avg_pool3d
    return call(x, size, stride, divisor_override=1)


def _divisors(step: Compute, local: RankContext, i: int) -> Tensor:
    """The divisor of each owned window of dim i: its global extent, with or without padding."""
    detail = step.nest.detail
    size, pad = step.needs[0].dims[2 + i].size, detail["padding"][i]
    out = []
    for o in local.box(step.gives[0])[2 + i]:
        start = o * detail["stride"][i] - pad
        stop = min(start + detail["kernel"][i], size + pad)
        out.append(stop - start if detail["count_include_pad"] else min(stop, size) - max(start, 0))
    return torch.tensor(out, dtype=torch.float64, device=local.device)


@kernel("adaptive_max")
def adaptive_max(step: Compute, local: RankContext) -> Run:
    """Dim by dim from the last, so that the first of equal maxima takes the gradient, as in torch."""
    terms, axes = step.nest.operands[0], step.axes_of("joint")
    if not axes and not any(is_split(step, n) for t in terms[2:] for n in loops_of(t)):
        return plain(step, local)
    passes = [_max_pass(step, local, dim, axes) for dim in reversed(range(2, len(terms)))]
    many = step.op.results[0] != step.op.name

    def run(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        for reduce in passes:
            x = reduce(x)
        return (x, torch.zeros_like(x, dtype=torch.long)) if many else x

    return run


def _max_pass(step: Compute, local: RankContext, dim: int, axes: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """Maxima along one dim: of every window, of the whole dim, or of the whole dim over the ranks that divide it."""
    term = step.nest.operands[0][dim][0]
    if isinstance(term, Window):
        assert isinstance(term.need, RowMap)
        held = {row: k for k, row in enumerate(local.box(step.needs[0])[dim])}
        spans = [(held[term.need.taps[o][0]], held[term.need.taps[o][-1]] + 1) for o in local.box(step.gives[0])[dim]]
        if not spans:
            return lambda x: x.narrow(dim, 0, 0)
        return lambda x: torch.cat([x.narrow(dim, low, high - low).max(dim, keepdim=True)[0] for low, high in spans], dim)
    own = tuple(a for a in axes if step.choice[a] == term)
    if not own:
        return lambda x: x.max(dim, keepdim=True)[0]
    local.world.group(own)  # created now, because all ranks must take part
    rows = global_rows(step, local, dim)
    return lambda x: MaxWithIndex.apply(x, dim, rows, local.world, own)[0]  # type: ignore[no-untyped-call]
