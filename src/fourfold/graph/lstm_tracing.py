"""Traces an LSTM by shapes alone. torch.export keeps `aten.lstm` as one op, but computes its results' shapes by running its
time steps one by one: a second for each layer of fifty steps. They follow from the operands' shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

LSTM = torch.ops.aten.lstm.input


def _shapes(
    given: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors as `aten.lstm.input` gives them, with nothing in them."""
    hidden, cell = hx
    width = hidden.shape[-1] * (2 if bidirectional else 1)
    return given.new_empty((*given.shape[:-1], width)), torch.empty_like(hidden), torch.empty_like(cell)


@contextmanager
def lstm_by_shapes() -> Iterator[None]:
    """Inside, `aten.lstm` gives its results' shapes at once; torch's own kernels are restored afterwards."""
    kept = dict(LSTM.py_kernels)
    LSTM.py_kernels.update(dict.fromkeys(kept, _shapes))
    LSTM._dispatch_cache.clear()
    try:
        yield
    finally:
        LSTM.py_kernels.update(kept)
        LSTM._dispatch_cache.clear()
