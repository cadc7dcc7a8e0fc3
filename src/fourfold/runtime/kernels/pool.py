"""Pooling and resampling on a shard: windows were fetched, borders are padded, averages divide by global counts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.nest import Window
from fourfold.ops.window import Rows
from fourfold.plan.program import Compute
from fourfold.runtime.kernels.base import Local, Run, attached, is_split, kernel, plain

_MAX = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}


def _borders(step: Compute, local: Local) -> list[int]:
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


def _fit(x: Tensor, step: Compute, local: Local) -> Tensor:
    """Drop rows of unsplit dims past the last window (torch would ignore them)."""
    for i in range(len(step.nest.detail["kernel"])):
        term = step.nest.operands[0][2 + i][0]
        assert isinstance(term, Window)
        if not is_split(step, f"d{i}"):
            _, stop = term.need.reach(local.box(step.gives[0])[2 + i])  # type: ignore[attr-defined]
            x = x.narrow(2 + i, 0, min(stop, x.shape[2 + i]))
    return x


@kernel("max_pool")
def max_pool(step: Compute, local: Local) -> Run:
    if not _split(step):
        return plain(step, local)
    detail = step.nest.detail
    call, borders = _MAX[len(detail["kernel"])], _borders(step, local)
    many = len(step.op.results) > 1

    def run(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = F.pad(_fit(x, step, local), borders, value=-math.inf) if any(borders) else _fit(x, step, local)
        y = call(x, detail["kernel"], detail["stride"], 0, detail["dilation"])
        return (y, torch.zeros_like(y, dtype=torch.long)) if many else y

    return run


@kernel("avg_pool")
def avg_pool(step: Compute, local: Local) -> Run:
    if not _split(step):
        return plain(step, local)
    detail, borders = step.nest.detail, _borders(step, local)
    count = len(detail["kernel"])
    divisors = [_counts(step, local, i) for i in range(count)]

    def run(x: Tensor) -> Tensor:
        x = F.pad(_fit(x, step, local), borders) if any(borders) else _fit(x, step, local)
        y = _sums(x, detail["kernel"], detail["stride"])
        if detail["divisor"]:
            return y / detail["divisor"]
        for i, divisor in enumerate(divisors):
            y = y / divisor.to(y.dtype).view(-1, *(1,) * (count - 1 - i))
        return y

    return run


def _sums(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Window sums in one to three dims."""
    if len(size) == 1:
        return F.avg_pool2d(x.unsqueeze(-2), (1, *size), (1, *stride), divisor_override=1).squeeze(-2)
    call = F.avg_pool2d if len(size) == 2 else F.avg_pool3d
    return call(x, size, stride, divisor_override=1)


def _counts(step: Compute, local: Local, i: int) -> Tensor:
    """What each owned window of dim i divides by: its global extent, with or without padding."""
    detail = step.nest.detail
    size, pad = step.needs[0].dims[2 + i].size, detail["padding"][i]
    out = []
    for o in local.box(step.gives[0])[2 + i]:
        start = o * detail["stride"][i] - pad
        stop = min(start + detail["kernel"][i], size + pad)
        out.append(stop - start if detail["count_include_pad"] else min(stop, size) - max(start, 0))
    return torch.tensor(out, dtype=torch.float64, device=local.device)


@kernel("adaptive_max")
def adaptive_max(step: Compute, local: Local) -> Run:
    windows = [(2 + i, t[0]) for i, t in enumerate(step.nest.operands[0][2:]) if t and isinstance(t[0], Window)]
    if not any(is_split(step, w.loop) for _, w in windows):
        return plain(step, local)
    spans = {}
    for dim, window in windows:
        assert isinstance(window.need, Rows)
        held = {row: k for k, row in enumerate(local.box(step.needs[0])[dim])}
        spans[dim] = [(held[window.need.taps[o][0]], held[window.need.taps[o][-1]] + 1) for o in local.box(step.gives[0])[dim]]
    whole = [d for d in range(2, len(step.nest.operands[0])) if d not in spans]
    many = step.op.results[0] != step.op.name

    def run(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        for dim, pieces in spans.items():
            x = torch.cat([x.narrow(dim, low, high - low).amax(dim, keepdim=True) for low, high in pieces], dim)
        for dim in whole:
            x = x.amax(dim, keepdim=True)
        return (x, torch.zeros_like(x, dtype=torch.long)) if many else x

    return run


@kernel("resample")
def resample(step: Compute, local: Local) -> Run:
    """Interpolation and adaptive averages: the 1-D weights of the owned rows, dim by dim."""
    terms = step.nest.operands[0]
    split = [d for d in range(2, len(terms)) if any(is_split(step, n) for n in _loop(terms[d]))]
    if not split:
        return plain(step, local)
    plans = [(d, _weights(step, local, d)) for d in range(2, len(terms))]
    empty, shape = math.prod(local.shape(step.needs[0])) == 0, local.shape(step.gives[0])

    def run(x: Tensor) -> Tensor:
        if empty:
            return attached(x.new_zeros(shape), (x,))
        for dim, weights in plans:
            x = _apply(x, dim, weights)
        return x

    return run


def _loop(terms: tuple[object, ...]) -> tuple[str, ...]:
    term = terms[0]
    return (term.loop,) if isinstance(term, Window) else (str(term),)


def _weights(step: Compute, local: Local, dim: int) -> Tensor | float:
    """Dense weights (owned outputs x held inputs), or a plain factor for a global average."""
    term = step.nest.operands[0][dim][0]
    if not isinstance(term, Window):
        return 1.0 / step.needs[0].dims[dim].size
    assert isinstance(term.need, Rows)
    held = {row: k for k, row in enumerate(local.box(step.needs[0])[dim])}
    owned = list(local.box(step.gives[0])[dim])
    weights = torch.zeros(len(owned), len(held), dtype=torch.float64)
    for k, o in enumerate(owned):
        for tap, weight in zip(term.need.taps[o], term.need.weights[o], strict=True):
            weights[k, held[tap]] += weight
    return weights.to(local.device)


def _apply(x: Tensor, dim: int, weights: Tensor | float) -> Tensor:
    if isinstance(weights, float):
        return x.sum(dim, keepdim=True) * weights
    if bool((weights == 1).sum(1).eq(1).all()) and int((weights != 0).sum()) == len(weights):
        return x.index_select(dim, weights.argmax(1))
    return (x.movedim(dim, -1) @ weights.to(x.dtype).T).movedim(-1, dim)
