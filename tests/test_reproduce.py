"""The papers rerun: the deterministic parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli.door import run
from fourfold.reproduce.integrated import ALEXNET, crossover, formulas
from fourfold.reproduce.study import near


def test_the_integrated_paper_s_table_is_met() -> None:
    _, expected = formulas()
    assert len(expected) == 4 * 6 + len(ALEXNET)
    assert all(e.holds for e in expected), [e for e in expected if not e.holds]


def test_an_expectation_can_fail() -> None:
    assert not near("x", 1.02, 1.0, within=0.01, mark="read").holds and near("x", 1.005, 1.0, within=0.01, mark="read").holds


def test_model_beats_batch_for_the_classifier_only() -> None:
    values = {layer.name: crossover(layer, first=k == 0) for k, layer in enumerate(ALEXNET)}
    assert all((value > 500) == name.startswith("FC") for name, value in values.items())


@pytest.mark.slow
def test_reproduce_writes_a_page_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "integrated.html"
    assert run(["reproduce", "integrated", "-o", str(page), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["holds"] and page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(page.with_suffix(".json").read_text())["tables"] == record["tables"]


def test_an_unknown_paper_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "integrate"]) == 2
    assert "unknown paper 'integrate'" in capsys.readouterr().err
