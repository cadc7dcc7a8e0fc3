"""Sets of examples: a fixed part is held out; of the rest, every rank sees its part of the same order, each example once an
epoch, and training on them learns."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from fourfold.cli.main import run
from fourfold.errors import InvalidInput
from fourfold.runs.datasets import Dataset, dataset
from fourfold.runs.train import Trainer
from fourfold.workload.workload import load_workload

MODEL = "vgg16-cifar,width=64,channels=8"


@cache
def digits(model: str = MODEL) -> Dataset:
    examples = dataset("digits", load_workload(model, batch=16))
    assert examples is not None
    return examples


def test_digits_fit_the_shapes_of_the_model() -> None:
    for (images, classes), count in ((digits().training, 1500), (digits().held_out, 297)):
        assert images.shape == (count, 3, 32, 32) and classes.shape == (count,) and images.is_contiguous()
        assert sorted(set(classes.tolist())) == list(range(10))


def test_the_examples_to_train_on_set_mean_and_deviation() -> None:
    images, others = digits().training[0], digits().held_out[0]
    assert images.mean().abs() < 1e-4 and (images.std() - 1).abs() < 1e-4
    assert 1e-4 < others.mean().abs() < 0.1, "the held-out ones are moved and scaled by the same numbers"


def test_the_last_digits_are_held_out_the_same_for_every_batch() -> None:
    assert digits().training[1].tolist() + digits().held_out[1].tolist() == load_digits().target.tolist()
    other = dataset("digits", load_workload(MODEL, batch=32))
    assert other is not None and all(map(torch.equal, other.held_out, digits().held_out))


def grey() -> tuple[Any, ...]:
    """A model of images with one channel."""
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return module, (torch.zeros(4, 1, 8, 8),), (torch.zeros(4, dtype=torch.long),), torch.nn.functional.cross_entropy


@pytest.mark.parametrize("model", [MODEL, f"{__file__}:grey"])
def test_no_part_keeps_the_other_in_memory(model: str) -> None:
    for tensor in (*digits(model).training, *digits(model).held_out):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_made_up_numbers_are_no_set() -> None:
    assert dataset("synthetic", load_workload("gpt2,layers=1", batch=2, data=False)) is None


def test_an_epoch_shows_every_example_once_and_the_next_in_another_order() -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.seed, trainer.example = 3, [torch.zeros(4, 1)]
    rows = [trainer._next(step, [torch.arange(10)])[0].tolist() for step in range(4)]
    assert sorted(rows[0] + rows[1]) == sorted(set(rows[0] + rows[1])) and rows[:2] != rows[2:]


@pytest.mark.parametrize(
    ("model", "batch", "name", "word"),
    [
        ("gpt2,layers=1", 2, "digits", "digits are images"),
        (MODEL, 2, "digit", "unknown data"),
        (f"{MODEL},classes=5", 2, "digits", "the model has 5"),
        (MODEL, 1600, "digits", "there are 1500 digits to train on, the batch is 1600"),
    ],
)
def test_what_does_not_fit_is_refused(model: str, batch: int, name: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        dataset(name, load_workload(model, batch=batch, data=False))


def test_training_on_digits_learns_and_does_not_depend_on_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", MODEL, "--ranks", "2", "--data", "digits", "--steps", "12", "--batch", "64", "--no-predict", "--json",
             "--precision", "fp64"]  # fmt: skip
    losses = []
    for strategy in ("data", "splitbrain:k=2"):
        assert run([*asked, "--strategy", strategy]) == 0
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < losses[0][0]
