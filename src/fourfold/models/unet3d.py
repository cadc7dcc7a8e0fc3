"""3-D U-Net: skips that cross the whole depth and large volumes, the case that is hard for pipelines.

Source: Cicek et al., "3D U-Net: learning dense volumetric segmentation from sparse annotation" (2016): two
3^3 convolutions with batch norm per level, filters doubled before each pooling, transposed convolutions up,
skips concatenated. Two changes, as in most later code: convolutions are padded, so that sizes stay, and have
no bias unless asked, since the batch norm behind them cancels it.
"""

import torch
from torch import Tensor, nn

from fourfold.models.arguments import require_at_least, require_multiple
from fourfold.models.example import Example, class_loss, integers, normal


def unit(before: int, between: int, after: int, *, bias: bool) -> nn.Sequential:
    """Convolution, batch norm, ReLU, twice."""
    return nn.Sequential(
        nn.Conv3d(before, between, kernel_size=3, padding=1, bias=bias),
        nn.BatchNorm3d(between),
        nn.ReLU(inplace=True),
        nn.Conv3d(between, after, kernel_size=3, padding=1, bias=bias),
        nn.BatchNorm3d(after),
        nn.ReLU(inplace=True),
    )


class UNet3D(nn.Module):
    """Level l of the way down gives `width * 2^(l+1)` filters; the way up returns as many as its skip."""

    def __init__(self, *, channels: int, classes: int, width: int, depth: int, bias: bool) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        levels = range(depth - 1)
        self.down = nn.ModuleList(
            unit(channels if level == 0 else widths[level], widths[level], widths[level + 1], bias=bias) for level in levels
        )
        self.pool = nn.MaxPool3d(2)
        self.bottom = unit(widths[-2], widths[-2], widths[-1], bias=bias)
        self.rise = nn.ModuleList(
            nn.ConvTranspose3d(widths[level + 2], widths[level + 2], kernel_size=2, stride=2, bias=False)
            for level in reversed(levels)
        )
        self.up = nn.ModuleList(
            unit(widths[level + 1] + widths[level + 2], widths[level + 1], widths[level + 1], bias=bias)
            for level in reversed(levels)
        )
        self.head = nn.Conv3d(widths[1], classes, kernel_size=1)

    def forward(self, volumes: Tensor) -> Tensor:
        """Volumes [N, channels, D, H, W] to logits of each voxel [N, classes, D, H, W]."""
        x = volumes
        skips: list[Tensor] = []
        for down in self.down:
            skip: Tensor = down(x)
            skips.append(skip)
            x = self.pool(skip)
        x = self.bottom(x)
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat((skips.pop(), rise(x)), dim=1))
        logits: Tensor = self.head(x)
        return logits


def unet3d(
    *,
    batch: int = 2,
    size: int = 128,
    channels: int = 1,
    classes: int = 3,
    width: int = 32,
    depth: int = 4,
    bias: bool = False,
) -> Example:
    """3-D U-Net on volumes: batch norm and skips, a class per voxel, 19 M parameters.

    size: side of the volume; channels: of the input; width: filters of the first convolution, doubling level
    by level; depth: levels, one pooling fewer; bias: as in the paper, a bias that the batch norm behind it
    cancels.
    """
    require_at_least(1, batch=batch, size=size, channels=channels, classes=classes, width=width)
    require_at_least(2, depth=depth)
    require_multiple(2 ** (depth - 1), f"{depth - 1} poolings by 2", size=size)
    if batch == 1 and size == 2 ** (depth - 1):
        raise ValueError(
            f"batch 1 of size {size} leaves 1 value per channel to the lowest batch norm, which needs 2;"
            f" use size={2 * size} or batch=2"
        )
    module = UNet3D(channels=channels, classes=classes, width=width, depth=depth, bias=bias)
    volumes = normal(batch, channels, size, size, size, seed=0)
    labels = integers(batch, size, size, size, below=classes, seed=1)
    return Example(module, (volumes,), (labels,), class_loss)
