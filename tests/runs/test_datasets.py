"""Sets of examples: every rank sees its part of the same order, each example once an epoch, and training on them learns."""

from __future__ import annotations

import json

import pytest
import torch

from fourfold.cli.main import run
from fourfold.errors import InvalidInput
from fourfold.runs.datasets import dataset
from fourfold.runs.train import Trainer
from fourfold.workload.workload import load_workload

MODEL = "vgg16-cifar,width=64,channels=8"


def test_digits_fit_the_shapes_of_the_model() -> None:
    images, classes = dataset("digits", load_workload(MODEL, batch=16)) or []
    assert images.shape == (1797, 3, 32, 32) and classes.shape == (1797,)
    assert images.mean().abs() < 1e-3 and (images.std() - 1).abs() < 1e-3
    assert sorted(set(classes.tolist())) == list(range(10))


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
        (f"{MODEL},classes=5", 2, "digits", "the model tells 5"),
        (MODEL, 2000, "digits", "there are 1797 digits, the batch is 2000"),
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
