"""Data to train on besides made-up numbers: sets of examples fitted to the shapes a model takes, a part held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.errors import InvalidInput, nearest
from fourfold.workload.workload import Workload

SYNTHETIC = "synthetic"
DATASETS = (SYNTHETIC, "digits")
CLASSES = 10  # of the digits
BRIGHTEST = 16.0  # of their pixels
HELD_OUT = 297  # digits, the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The examples to train on, and others to test with; each a tensor per input and target of the model, in its order."""

    training: list[Tensor]
    held_out: list[Tensor]


def dataset(name: str, workload: Workload) -> Dataset | None:
    """A set by its name; None for numbers that are made up step by step."""
    if name not in DATASETS:
        raise InvalidInput(f"unknown data '{name}'{nearest(name, DATASETS)}; known: {', '.join(DATASETS)}")
    return _digits(workload) if name == "digits" else None


def _digits(workload: Workload) -> Dataset:
    """The 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels, enlarged to the size of the model's images, in as
    many channels, of mean 0 and deviation 1 over those to train on."""
    _check_takes_digits(workload)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InvalidInput("--data digits needs scikit-learn; pip install scikit-learn") from None
    digits = load_digits()
    count = len(digits.target) - HELD_OUT
    if workload.batch > count:
        raise InvalidInput(f"there are {count} digits to train on, the batch is {workload.batch}; use a smaller one")
    image, number = workload.example.tensors
    channels, *size = image.shape[1:]
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / BRIGHTEST
    images = F.interpolate(small, size=size, mode="bilinear", align_corners=False)
    mean, deviation = images[:count].mean(), images[:count].std()
    images = ((images - mean) / deviation).to(image.dtype).expand(-1, channels, *size)
    classes = torch.tensor(digits.target, dtype=number.dtype)
    whole = (images, classes)
    return Dataset(  # copies: torch.save writes all of what a slice is a part of
        training=[tensor[:count].clone() for tensor in whole], held_out=[tensor[count:].clone() for tensor in whole]
    )


def _check_takes_digits(workload: Workload) -> None:
    """Refuse a model that does not take an image and give one of ten classes."""
    example, graph = workload.example, workload.graph.at(workload.batch)
    shapes = [tuple(t.shape[1:]) for t in example.tensors]
    if len(shapes) != 2 or len(shapes[0]) != 3 or shapes[1] != () or example.targets[0].is_floating_point():
        taken = " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
        raise InvalidInput(
            f"digits are images with a class each, the model takes {taken}; use --data {SYNTHETIC}, or a model of images"
        )
    classes = int(graph.values[graph.outputs[0]].shape[-1])
    if classes < CLASSES:
        raise InvalidInput(f"digits have {CLASSES} classes, the model has {classes}; give it more, or use --data {SYNTHETIC}")
