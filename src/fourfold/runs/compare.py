"""What "equal" means: the error of one tensor against a reference, and the worst of many.

Per tensor, ``error = ||difference|| / max(||reference||, rms over all tensors * sqrt(numel))``: a gradient that is truly
zero is compared with the size of the others. For parameters and buffers the reference is the change since the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.runtime.comm.exchange import is_inexact

if TYPE_CHECKING:
    from fourfold.runs.comparison_run import RunResult


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
    """As float64 numbers; a complex one is two of them."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().to("cpu", torch.complex128).resolve_conj())
    return tensor.detach().to("cpu", torch.float64)


class Distances:
    """How far trials are from a reference, by kind and step."""

    def __init__(self, reference: RunResult, start: Mapping[str, Tensor], trainable: set[str]) -> None:
        self.reference, self.start, self.trainable = reference, start, trainable

    def of(self, trial: RunResult) -> dict[tuple[str, int], Worst]:
        reference, last = self.reference, len(self.reference.losses)
        out = {
            ("loss", 1): _loss(trial.losses[:1], reference.losses[:1]),
            ("output", 1): worst_error(trial.outputs, reference.outputs),
            ("gradient", 1): worst_error(trial.gradients, _with_zeros(reference.gradients, trial.gradients)),
            **self._state(trial.first_state, reference.first_state, 1),
        }
        if last > 1:
            out["loss", last] = _loss(trial.losses[1:], reference.losses[1:])
            out.update(self._state(trial.state, reference.state, last))
        return out

    def whole_gradient(self, trial: RunResult) -> Worst:
        """The distance of all gradients taken together as one vector."""
        reference = _with_zeros(self.reference.gradients, trial.gradients)
        off = sum(float((_wide(trial.gradients[k]) - _wide(g)).square().sum()) for k, g in reference.items())
        size = sum(float(_wide(g).square().sum()) for g in reference.values())
        return Worst(error=math.sqrt(off / size) if size else math.sqrt(off), tensor="all")

    def _state(self, got: Mapping[str, Tensor], reference: Mapping[str, Tensor], step: int) -> dict[tuple[str, int], Worst]:
        got = {**self.start, **got}  # what is in the module but not in the graph no step has touched
        parameters = {k: t for k, t in reference.items() if k in self.trainable}
        rest = {k: t for k, t in reference.items() if k not in self.trainable}
        floats = {k: t for k, t in rest.items() if is_inexact(t)}
        buffers = worst_error(got, floats, self.start)
        for key in rest.keys() - floats.keys():
            if not torch.equal(got[key], reference[key]):
                buffers = Worst(error=math.inf, tensor=key)
        return {("parameter", step): worst_error(got, parameters, self.start), ("buffer", step): buffers}


def _with_zeros(reference: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A gradient that the reference does not have is zero."""
    return {**{k: torch.zeros_like(g) for k, g in got.items()}, **reference}


def _loss(got: list[float], reference: list[float]) -> Worst:
    errors = [abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(got, reference, strict=True)]
    finite = all(map(math.isfinite, [*got, *reference]))
    return Worst(error=max(errors) if finite else math.inf, tensor="loss")


def first_bad(losses: Sequence[float]) -> int | None:
    """The first step, counted from 1, whose loss is NaN or infinite."""
    return next((step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)), None)
