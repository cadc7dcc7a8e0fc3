"""A sample of the predictions that golden.py has written down: `make golden` compares all of them."""

from __future__ import annotations

import json

import pytest

from golden import TABLE, differences, names, predicted

SAMPLE = names()[5::37]  # of every model, on every cluster


@pytest.mark.parametrize("name", SAMPLE)
def test_a_prediction_is_what_was_written_down(name: str) -> None:
    table = json.loads(TABLE.read_text())
    assert not list(differences(table[name], predicted(name)))


def test_the_sample_has_every_model_and_cluster() -> None:
    rows = [name.split(" | ") for name in SAMPLE]
    every = [name.split(" | ") for name in names()]
    for column in (0, 2):
        assert {row[column] for row in rows} == {row[column] for row in every}
