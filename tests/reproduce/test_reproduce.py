"""The papers rerun: the deterministic parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import run
from fourfold.cli.reproduce import PAPERS
from fourfold.reproduce import bapipe, paradl, splitbrain
from fourfold.reproduce.integrated import ALEXNET, crossover, formulas
from fourfold.reproduce.study import Reproduction, at_least, close_to

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def test_the_integrated_paper_s_table_is_met() -> None:
    _, expected = formulas()
    assert len(expected) == 4 * 6 + len(ALEXNET)
    assert all(e.holds for e in expected), [e for e in expected if not e.holds]


def test_an_expectation_can_fail() -> None:
    assert (
        not close_to("x", 1.02, 1.0, within=0.01, mark="read").holds
        and close_to("x", 1.005, 1.0, within=0.01, mark="read").holds
    )
    assert not at_least("x", 0.99, 1.0, mark="read").holds and at_least("x", 1.0, 1.0, mark="read").holds


def test_model_beats_batch_for_the_classifier_only() -> None:
    values = {layer.name: crossover(layer, first=k == 0) for k, layer in enumerate(ALEXNET)}
    assert all((value > 500) == name.startswith("FC") for name, value in values.items())


def test_a_width_saves_what_it_was_sought_for() -> None:
    """The width put back into the network: the classifier's share of its weights, sharded, is what was asked for."""
    width = splitbrain.width_saving(0.67, 8)
    assert width is not None and splitbrain.width_saving(0.67, 2) is None
    wide = splitbrain.load_workload(f"vgg16-cifar,width={round(width)}", batch=2, data=False).graph
    assert splitbrain.classifier_share(wide) * (1 - 1 / 8) == pytest.approx(0.67, abs=1e-3)


def test_passes_shrink_the_buffer_by_as_many() -> None:
    assert splitbrain.gathered("splitbrain:k=4,passes=1", 4) == 4 * splitbrain.gathered("splitbrain:k=4", 4) > 0


def test_the_schedules_take_the_times_of_the_table() -> None:
    table, expected = bapipe._schedules()
    assert all(e.holds for e in expected) and [row[1] for row in table.rows] == ["105", "117", "138.5", "108"]


@pytest.mark.slow
@pytest.mark.parametrize("case", bapipe.SLOW, ids=lambda case: case.model)
def test_a_balanced_cut_on_a_slow_link_beats_data_parallelism_and_the_even_cut(case: bapipe.Case) -> None:
    found = bapipe.compared(case)
    assert found.speedup > 1.3 and found.even is not None and found.even.seconds >= found.best.seconds


def test_the_deepest_is_found_by_halving() -> None:
    for most in (0, 4, 8, 60, 256):
        assert bapipe.deepest(lambda layers, most=most: layers <= most) == most


def test_the_accuracy_that_is_shipped_is_what_was_measured() -> None:
    from accuracy import Row
    from records import RESULTS

    kept = paradl.shipped_accuracy()
    paths = [path for path in RESULTS.glob("*-accuracy.json") if "memory" not in path.name]
    raw = [Row(**row) for path in paths for row in json.loads(path.read_text())["rows"]]
    known = {(r.place, r.model, r.plan, round(r.predicted, 6), round(r.measured, 6)) for r in raw}
    assert len(kept["rows"]) > 100 and {tuple(row) for row in kept["rows"]} <= known


def test_the_readme_sums_up_the_records() -> None:
    from reproduce import load_records, with_summary

    text = (BENCHMARKS.parent / "README.md").read_text()
    assert [record["name"] for record in load_records()] == list(PAPERS)
    assert with_summary(text) == text


@pytest.mark.parametrize("paper", [name if name == "paradl" else pytest.param(name, marks=pytest.mark.slow) for name in PAPERS])
def test_reproduce_writes_a_page_and_a_record(paper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert run(["reproduce", paper, "--no-runs", "-o", str(page), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["holds"] and page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(page.with_suffix(".json").read_text())["tables"] == record["tables"]


def test_a_failed_expectation_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Reproduction(
        name="paradl", title="t", tables=(), expectations=(close_to("x", 2.0, 1.0, within=0.01, mark="read"),)
    )
    monkeypatch.setattr(paradl, "reproduce", lambda progress, *, runs: failed)
    assert run(["reproduce", "paradl", "-o", str(tmp_path / "page.html")]) == 1
    assert "does not hold" in (tmp_path / "page.html").read_text()


def test_an_unknown_paper_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "integrate"]) == 2
    assert "unknown paper 'integrate'" in capsys.readouterr().err
