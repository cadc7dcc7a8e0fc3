"""Data to train on besides made-up numbers: whole sets of examples, fitted to the shapes a model takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.errors import InvalidInput, nearest
from fourfold.workload.workload import Workload

SYNTHETIC = "synthetic"
DATASETS = (SYNTHETIC, "digits")
CLASSES = 10  # of the digits
BRIGHTEST = 16.0  # of their pixels


def dataset(name: str, workload: Workload) -> list[Tensor] | None:
    """All examples of a set, in the order of the model's inputs and targets; None for numbers that are made up step by step."""
    if name not in DATASETS:
        raise InvalidInput(f"unknown data '{name}'{nearest(name, DATASETS)}; known: {', '.join(DATASETS)}")
    return _digits(workload) if name == "digits" else None


def _digits(workload: Workload) -> list[Tensor]:
    """The 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels, enlarged to the size of the model's images, in as
    many channels, of mean 0 and deviation 1."""
    example, graph = workload.example, workload.graph.at(workload.batch)
    shapes = [tuple(t.shape[1:]) for t in example.tensors]
    if len(shapes) != 2 or len(shapes[0]) != 3 or shapes[1] != () or example.targets[0].is_floating_point():
        taken = " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
        raise InvalidInput(
            f"digits are images with a class each, the model takes {taken}; use --data {SYNTHETIC}, or a model of images"
        )
    classes = int(graph.values[graph.outputs[0]].shape[-1])
    if classes < CLASSES:
        raise InvalidInput(f"digits have {CLASSES} classes, the model tells {classes}; give it more, or use --data {SYNTHETIC}")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InvalidInput("--data digits needs scikit-learn; pip install scikit-learn") from None
    found = load_digits()
    if workload.batch > len(found.target):
        raise InvalidInput(f"there are {len(found.target)} digits, the batch is {workload.batch}; use a smaller one")
    channels, *size = shapes[0]
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / BRIGHTEST
    wide = F.interpolate(images, size=size, mode="bilinear", align_corners=False).expand(-1, channels, *size)
    fitted = ((wide - wide.mean()) / wide.std()).to(example.tensors[0].dtype).contiguous()
    return [fitted, torch.tensor(found.target, dtype=example.targets[0].dtype)]
