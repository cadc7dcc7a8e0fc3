"""What every factory returns: a module with one batch to feed it, what it should answer, and how wrong it is.

Also the made-up data and the losses the factories share. Data comes from a seeded CPU generator and is then
moved, so that every process and every device sees the same numbers; on meta only shapes exist. Losses are
module-level functions because they travel to other processes by name.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Example(NamedTuple):
    """A module with one batch of data: batch is dim 0 of each tensor. The loss is called as `loss(outputs, *targets)`; without
    one, the mean square of the outputs stands in."""

    module: nn.Module
    inputs: tuple[Tensor, ...] | Mapping[str, Tensor]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None

    @property
    def tensors(self) -> list[Tensor]:
        """Inputs and targets in the order a graph names them."""
        inputs = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        return [*inputs, *self.targets]

    @property
    def batch(self) -> int:
        return next(int(t.shape[0]) for t in self.tensors if t.dim())


def normal(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers of the default dtype on the default device, the same for the same seed."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(shape)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def integers(*shape: int, below: int, seed: int) -> Tensor:
    """Labels or token ids, uniform in `[0, below)`, on the default device, the same for the same seed."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int64)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu").to(device)


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, mean over samples (and voxels): logits [N, C, ...], labels [N, ...]."""
    return F.cross_entropy(logits, labels)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy, mean over all positions of all samples: logits [N, T, V], tokens [N, T]."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean square error."""
    return F.mse_loss(outputs, targets)
