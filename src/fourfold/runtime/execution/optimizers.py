"""The optimizers that commands know by name, as torch makes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fourfold.errors import InvalidInput, nearest

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.01),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.01, momentum=0.9),
    "adamw": lambda tensors: torch.optim.AdamW(tensors, lr=3e-4),
}


def optimizer_named(name: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    if name not in OPTIMIZERS:
        raise InvalidInput(f"unknown optimizer '{name}'{nearest(name, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
