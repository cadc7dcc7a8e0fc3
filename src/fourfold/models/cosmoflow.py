"""CosmoFlow: four-channel volumes too large for one device, the case that needs the domain split.

Source: Mathuriya et al., "CosmoFlow: using deep learning to learn the universe at scale" (2018), in the form
of the MLPerf HPC v1.0 reference (kernel 3, 32 to 512 filters, leaky ReLU of slope 0.3, fully-connected 128
and 64, outputs 1.2 tanh). As in Oyama et al., "The case for strong scaling in deep learning" (2020), a larger
volume gets more blocks, no wider ones.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from fourfold.models.arguments import dropout_layer, require_at_least, require_probability
from fourfold.models.example import Example, normal, square_loss

SLOPE = 0.3  # of the leaky ReLU: Keras' default, which the reference uses
REACH = 1.2  # outputs lie in (-1.2, 1.2), targets in [-1, 1]
WIDEST = 16  # filters double from block to block up to this multiple of the first block's
SIDE = 4  # pooling stops once the volume's side is no longer than this


def pooled_sides(size: int) -> list[int]:
    """The side of the volume after each block: 128 -> 64, 32, 16, 8, 4."""
    sides = []
    while size > SIDE:
        size //= 2
        sides.append(size)
    return sides


class CosmoFlow(nn.Module):
    """Blocks of convolution, leaky ReLU and pooling down to a side of 4 or less, then three linear layers."""

    def __init__(self, *, size: int, channels: int, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        sides = pooled_sides(size)
        widths = [channels, *(width * min(2**block, WIDEST) for block in range(len(sides)))]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv3d(before, after, kernel_size=3, padding=1), nn.LeakyReLU(SLOPE), nn.MaxPool3d(2))
                for before, after in pairwise(widths)
            )
        )
        self.head = nn.Sequential(
            nn.Linear(widths[-1] * sides[-1] ** 3, 128),
            nn.LeakyReLU(SLOPE),
            dropout_layer(dropout),
            nn.Linear(128, 64),
            nn.LeakyReLU(SLOPE),
            dropout_layer(dropout),
            nn.Linear(64, outputs),
        )
        self.apply(initialise)

    def forward(self, volumes: Tensor) -> Tensor:
        """Volumes [N, channels, D, H, W] to cosmological parameters [N, outputs]."""
        features: Tensor = self.blocks(volumes)
        return REACH * torch.tanh(self.head(features.flatten(1)))


def initialise(layer: nn.Module) -> None:
    """Glorot initialisation, Keras' default, which the reference uses."""
    if isinstance(layer, nn.Conv3d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def cosmoflow(
    *,
    batch: int = 2,
    size: int = 128,
    channels: int = 4,
    width: int = 32,
    outputs: int = 4,
    dropout: float = 0.0,
) -> Example:
    """CosmoFlow on volumes (size 128, 256 or 512): 3-D convolutions and poolings, 9 M parameters.

    size: side of the volume; channels: of the input; width: filters of the first block, doubling up to 16
    times; outputs: numbers to regress.
    """
    require_at_least(1, batch=batch, channels=channels, width=width, outputs=outputs)
    require_at_least(2 * SIDE, size=size)
    require_probability(dropout=dropout)
    module = CosmoFlow(size=size, channels=channels, width=width, outputs=outputs, dropout=dropout)
    volumes = normal(batch, channels, size, size, size, seed=0)
    return Example(module, (volumes,), (normal(batch, outputs, seed=1).clamp(-1.0, 1.0),), square_loss)
