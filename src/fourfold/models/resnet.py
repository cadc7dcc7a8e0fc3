"""ResNet-50 and ResNet-152: small weights, large activations, batch norm everywhere.

Source: He et al., "Deep residual learning for image recognition" (2015), in the v1.5 form that everyone
measures: the stride of a bottleneck sits on its 3x3 convolution. Parameter names are torchvision's.
"""

from torch import Tensor, nn

from fourfold.models.arguments import require_at_least
from fourfold.models.example import Example, class_loss, integers, normal

EXPANSION = 4  # a bottleneck's output is four times as wide as its 3x3 convolution
STAGES = 4
SHRINK = 32  # stem and stages together divide the image's side by this, rounding up


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norm, added to the input (projected where the shape changes)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = EXPANSION * width
        self.conv1 = nn.Conv2d(before, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, before, H, W] to [N, 4 width, H / stride, W / stride]."""
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.downsample(x)
        result: Tensor = self.relu(y)
        return result


class ResNet(nn.Module):
    """A 7x7 stem, four stages of bottlenecks, the last three halving the image, a mean, a linear layer."""

    def __init__(self, *, blocks: tuple[int, ...], classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stage(width, width, blocks[0], stride=1)
        self.layer2 = stage(EXPANSION * width, 2 * width, blocks[1], stride=2)
        self.layer3 = stage(2 * EXPANSION * width, 4 * width, blocks[2], stride=2)
        self.layer4 = stage(4 * EXPANSION * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * EXPANSION * width, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] to logits [N, classes]."""
        x: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def stage(before: int, width: int, count: int, *, stride: int) -> nn.Sequential:
    """Bottlenecks of one width, the first of which takes the stride."""
    first = Bottleneck(before, width, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width, 1) for _ in range(count - 1)))


def resnet50(*, batch: int = 8, image: int = 224, classes: int = 1000, width: int = 64, blocks: str = "3-4-6-3") -> Example:
    """ResNet-50 (v1.5) on images: bottlenecks with batch norm, 26 M parameters.

    image: side in pixels; width: channels of the stem, others scale; blocks: bottlenecks of each of the four
    stages.
    """
    return _example(batch, image, classes, width, blocks)


def resnet152(*, batch: int = 8, image: int = 224, classes: int = 1000, width: int = 64, blocks: str = "3-8-36-3") -> Example:
    """ResNet-152 (v1.5) on images: bottlenecks with batch norm, 60 M parameters.

    image: side in pixels; width: channels of the stem, others scale; blocks: bottlenecks of each of the four
    stages.
    """
    return _example(batch, image, classes, width, blocks)


def _example(batch: int, image: int, classes: int, width: int, blocks: str) -> Example:
    require_at_least(1, batch=batch, classes=classes, width=width)
    require_at_least(SHRINK, image=image)
    if batch == 1 and image == SHRINK:
        raise ValueError(
            f"batch 1 of {image} pixels leaves 1 value per channel to the last batch norm, which needs 2;"
            f" use image={SHRINK + 1} or batch=2"
        )
    module = ResNet(blocks=_counts(blocks), classes=classes, width=width)
    images = normal(batch, 3, image, image, seed=0)
    return Example(module, (images,), (integers(batch, below=classes, seed=1),), class_loss)


def _counts(blocks: str) -> tuple[int, ...]:
    """`3-4-6-3` as numbers."""
    parts = blocks.split("-")
    if len(parts) != STAGES or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"blocks is {blocks!r}, not {STAGES} positive numbers; use a form like 1-1-1-1")
    return tuple(int(part) for part in parts)
