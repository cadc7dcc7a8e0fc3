"""VGG-16, for ImageNet and for CIFAR-10: the network on which all four papers show their gain.

Source: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition" (2014),
configuration D; parameter names are torchvision's. The CIFAR form, used by SplitBrain, keeps the 13
convolutions and five poolings, which take 32 pixels to one, and the classifier 512 -> width -> width ->
classes.
"""

from torch import Tensor, nn

from fourfold.models.arguments import dropout_layer, require_at_least, require_probability
from fourfold.models.example import Example, class_loss, integers, normal

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # configuration D: (channels / base channels, convolutions)
SHRINK = 2 ** len(STAGES)  # each stage ends in a pooling that halves the image
GRID = 7  # side of the feature map that the ImageNet classifier reads: what 224 pixels give


def convolutions(*, channels: int, norm: bool) -> nn.Sequential:
    """The 13 convolutions with ReLU, a pooling after each stage, and batch norms if asked."""
    layers: list[nn.Module] = []
    before = 3
    for factor, count in STAGES:
        after = factor * channels
        for _ in range(count):
            layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
            if norm:
                layers.append(nn.BatchNorm2d(after))
            layers.append(nn.ReLU(inplace=True))
            before = after
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


def linears(inputs: int, width: int, classes: int, dropout: float) -> nn.Sequential:
    """The classifier: two hidden layers of one width, then the classes."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(inplace=True),
        dropout_layer(dropout),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        dropout_layer(dropout),
        nn.Linear(width, classes),
    )


class VGG(nn.Module):
    """Convolutions, a pooling of what they leave (or none), linear layers."""

    def __init__(self, features: nn.Sequential, avgpool: nn.Module, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = avgpool
        self.classifier = classifier
        self.apply(initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] to logits [N, classes]."""
        pooled: Tensor = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


def initialise(layer: nn.Module) -> None:
    """He initialisation: without it, and without norms, the signal dies out in sixteen layers."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def vgg16(
    *,
    batch: int = 8,
    image: int = 224,
    classes: int = 1000,
    width: int = 4096,
    channels: int = 64,
    dropout: float = 0.5,
    norm: bool = False,
) -> Example:
    """VGG-16 on images: 13 convolutions, 3 linear layers, 138 M parameters.

    image: side in pixels; width: of the two hidden linear layers; channels: of the first stage, others scale;
    norm: batch norm after each convolution.
    """
    require_at_least(1, batch=batch, classes=classes, width=width, channels=channels)
    require_at_least(SHRINK, image=image)
    require_probability(dropout=dropout)
    module = VGG(
        convolutions(channels=channels, norm=norm),
        nn.AdaptiveAvgPool2d((GRID, GRID)),
        linears(STAGES[-1][0] * channels * GRID**2, width, classes, dropout),
    )
    return _example(module, batch, image, classes)


def vgg16_cifar(
    *,
    batch: int = 32,
    image: int = 32,
    classes: int = 10,
    width: int = 4096,
    channels: int = 64,
    dropout: float = 0.0,
    norm: bool = False,
) -> Example:
    """VGG-16 for CIFAR-10: 13 convolutions, classifier 512 -> width -> width -> 10, 34 M parameters.

    image: side in pixels; width: of the two hidden linear layers; channels: of the first stage, others scale;
    norm: batch norm after each convolution.
    """
    require_at_least(1, batch=batch, classes=classes, width=width, channels=channels)
    require_at_least(SHRINK, image=image)
    require_probability(dropout=dropout)
    module = VGG(
        convolutions(channels=channels, norm=norm),
        nn.Identity(),
        linears(STAGES[-1][0] * channels * (image // SHRINK) ** 2, width, classes, dropout),
    )
    return _example(module, batch, image, classes)


def _example(module: VGG, batch: int, image: int, classes: int) -> Example:
    images = normal(batch, 3, image, image, seed=0)
    return Example(module, (images,), (integers(batch, below=classes, seed=1),), class_loss)
