"""What "equal" means: the error of one tensor against a reference, and the worst of many.

Per tensor, ``error = ||difference|| / max(||reference||, rms over all tensors * sqrt(numel))``: a gradient that is truly
zero is compared with the size of the others. For parameters and buffers the reference is the change since the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The largest error of a kind and the tensor it belongs to."""

    error: float
    tensor: str


def worst_error(got: Mapping[str, Tensor], reference: Mapping[str, Tensor], start: Mapping[str, Tensor] | None = None) -> Worst:
    """The largest error over all tensors; with `start`, of their change."""
    deltas = {k: _wide(v) - _wide(start[k]) if start is not None else _wide(v) for k, v in reference.items()}
    floats = [d for d in deltas.values() if d.numel()]
    squares = sum(float(d.square().sum()) for d in floats)
    count = sum(d.numel() for d in floats)
    rms = math.sqrt(squares / count) if count else 0.0
    worst = Worst(error=0.0, tensor="")
    for key, delta in deltas.items():
        value = got.get(key)
        if value is None or value.shape != reference[key].shape:
            return Worst(error=math.inf, tensor=key)
        difference = float((_wide(value) - _wide(reference[key])).norm())
        scale = max(float(delta.norm()), rms * math.sqrt(delta.numel()))
        error = 0.0 if difference == 0 else difference / scale if scale else math.inf
        if not math.isfinite(difference):
            error = math.inf
        if error > worst.error or not worst.tensor:
            worst = Worst(error=error, tensor=key)
    return worst


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
