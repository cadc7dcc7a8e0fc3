"""AlexNet: the network of the integrated grid paper's tables, nearly all of it in fully-connected layers.

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), the single-tower
form, with the adaptive pooling before the classifier that torchvision added; parameter names are
torchvision's.
"""

from torch import Tensor, nn

from fourfold.models.arguments import dropout_layer, require_at_least, require_probability
from fourfold.models.example import Example, class_loss, integers, normal

GRID = 6  # side of the feature map that the classifier reads: what 224 pixels give


class AlexNet(nn.Module):
    """Five convolutions, then three linear layers that hold 96 % of the parameters."""

    def __init__(self, *, classes: int, width: int, channels: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(channels, 3 * channels, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(3 * channels, 6 * channels, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * channels, 4 * channels, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * channels, 4 * channels, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((GRID, GRID))
        self.classifier = nn.Sequential(
            dropout_layer(dropout),
            nn.Linear(4 * channels * GRID * GRID, width),
            nn.ReLU(inplace=True),
            dropout_layer(dropout),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] to logits [N, classes]."""
        pooled: Tensor = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


def alexnet(
    *,
    batch: int = 32,
    image: int = 224,
    classes: int = 1000,
    width: int = 4096,
    channels: int = 64,
    dropout: float = 0.5,
) -> Example:
    """AlexNet (one tower) on images: 5 convolutions, 3 linear layers, 61 M parameters.

    image: side in pixels; width: of the two hidden linear layers; channels: of the first convolution, others
    scale.
    """
    require_at_least(1, batch=batch, classes=classes, width=width, channels=channels)
    require_at_least(63, image=image)  # three stride-2 poolings of window 3 behind a stride of 4
    require_probability(dropout=dropout)
    module = AlexNet(classes=classes, width=width, channels=channels, dropout=dropout)
    images = normal(batch, 3, image, image, seed=0)
    return Example(module, (images,), (integers(batch, below=classes, seed=1),), class_loss)
