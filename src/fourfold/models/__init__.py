"""The networks of the four papers as plain modules, so that plans can be tried without any other package.

They know nothing of parallelism: a factory builds the module with one batch of made-up data and its loss, on
whatever device is the default one (`with torch.device("meta")` allocates nothing). Left out: pretrained
weights and real data; alexnet, vgg16 and the resnets do keep torchvision's parameter names, so that its
checkpoints load.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fourfold.models.alexnet import alexnet
from fourfold.models.cosmoflow import cosmoflow
from fourfold.models.example import Example
from fourfold.models.gnmt import gnmt
from fourfold.models.gpt2 import gpt2
from fourfold.models.resnet import resnet50, resnet152
from fourfold.models.unet3d import unet3d
from fourfold.models.vgg import vgg16, vgg16_cifar

__all__ = ["MODELS", "Example", "Factory", "describe"]

Factory = Callable[..., Example]
"""Called with keywords only, `batch` and the model's own: int, float, bool or str, all with defaults."""

MODELS: Mapping[str, Factory] = MappingProxyType(
    {
        "alexnet": alexnet,
        "vgg16": vgg16,
        "vgg16-cifar": vgg16_cifar,
        "resnet50": resnet50,
        "resnet152": resnet152,
        "cosmoflow": cosmoflow,
        "gnmt": gnmt,
        "unet3d": unet3d,
        "gpt2": gpt2,
    }
)


def describe(name: str) -> str:
    """One line about a built-in model: the first of its factory's docstring."""
    return (MODELS[name].__doc__ or "").strip().partition("\n")[0]
