"""The page: what it is told adds up, it needs nothing from outside, and the commands that write it refuse what is broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import run
from fourfold.cluster import cluster_named
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.prices.prices import Prices
from fourfold.planner import Ranking, SearchTask, search
from fourfold.planner.what_if import Point, WhatIfGrid, what_if_grid
from fourfold.report.page.html_file import html_file
from fourfold.report.page.page import EXCHANGES, page
from fourfold.report.page.reproduction import reproduction_page
from fourfold.reproduce.study import Expectation, Reproduction, Table
from small import batch_of, graph_of

CLUSTER, DEVICES = "ethernet-10g", 4


@cache
def ranking(name: str = "gpt2") -> Ranking:
    prices = Prices(cluster=cluster_named(CLUSTER, devices=DEVICES))
    return search(SearchTask(graph=graph_of(name), batch=batch_of(name), setting=Setting(prices=prices)))


@cache
def around(limit: float = 60.0) -> WhatIfGrid:
    return what_if_grid(ranking(), lambda count: cluster_named(CLUSTER, devices=count), limit=limit)


def trained(graph: str = "") -> dict[str, Any]:
    """What `train --record` writes."""
    return {
        "version": 1, "model": "gnmt", "graph": graph, "strategy": "data", "ranks": 4, "batch": 8, "precision": "fp32",
        "optimizer": "sgd", "steps": 2, "losses": [2.0, None], "step_seconds": 0.2, "samples_per_second": 40.0,
        "predicted_seconds": 0.19, "predicted_interval_seconds": [0.1, 0.3], "predicted_peak_bytes": 100,
        "peak_bytes": [90, 95], "trace": None, "waiting": None, "nonfinite_step": None,
    }  # fmt: skip


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    out: dict[str, Any] = json.loads(found[1])
    return out


@cache
def shown() -> dict[str, Any]:
    return data_of(page(ranking(), model="gpt2", grid=around()))


def reproduction(text: str = "step < epoch") -> Reproduction:
    """A paper whose every text is this one."""
    table = Table(title=text, head=(text,), rows=((text,),), note=text, plot={text: ((1.0, 10.0), (4.0, 300.0))})
    expected = Expectation(what=text, ours=text, paper=text, mark="read", holds=False)
    return Reproduction(name="paradl", title=text, tables=(table,), expectations=(expected,), notes=(text,))


@pytest.mark.parametrize("write", [lambda: page(ranking(), model="gpt2"), lambda: reproduction_page(reproduction())])
def test_a_page_needs_nothing_from_outside(write: Callable[[], str]) -> None:
    text = write()
    links = [word for word in re.findall(r"https?://[^\s\"'<)]+", text) if not word.startswith("http://www.w3.org/2000/svg")]
    assert not links and "/*css*/" not in text and "/*js*/" not in text and "/*data*/" not in text
    assert "@import" not in text and "src=" not in text


@pytest.mark.parametrize("name", ["page", "reproduction"])
def test_names_cannot_break_out_of_the_page(name: str) -> None:
    for note in ("</script><script>alert(1)</script>", "<!--<script>", "]]><!--", "<svg/onload=alert(1)>"):
        text = html_file(name, {"model": note, "notes": [note]})
        assert text.count("<script") == 2 and "<!--" not in text, "its own two scripts, and no comment that hides the end"
        assert data_of(text) == {"model": note, "notes": [note]}


def test_a_reproduction_s_page_has_its_tables_and_what_was_expected() -> None:
    data, paper = data_of(reproduction_page(reproduction())), reproduction()
    assert data["title"] == paper.title and data["notes"] == list(paper.notes)
    assert data["tables"][:-1] == paper.record()["tables"]
    text = paper.title
    assert data["tables"][-1]["rows"] == [[text, text, text, "read in the authors' text or tables", "does not hold"]]


def test_plans_are_told_as_the_ranking_has_them() -> None:
    plans = shown()["plans"]
    assert [p["step"] for p in plans] == [c.step_seconds for c in ranking().candidates[: len(plans)]]
    for told in plans:
        assert sum(told["breakdown"].values()) == pytest.approx(told["step"])
        assert all(sum(m["parts"].values()) == m["bytes"] for m in told["memory"])
        assert max(m["bytes"] for m in told["memory"]) == told["peak"] or not told["feasible"]


def test_layers_add_up_to_the_forward_and_backward_of_a_micro_batch() -> None:
    for told, candidate in zip(shown()["plans"], ranking().candidates, strict=False):
        items = [item for (_, way), some in candidate.estimate.items.items() if way in "FB" for item in some]
        compute = sum(i.seconds for i in items if i.category == "compute")
        moved = sum(i.seconds for i in items if i.category in EXCHANGES)
        assert sum(layer["compute"] for layer in told["layers"]) == pytest.approx(compute, rel=0.01)
        assert sum(layer["exchange"] for layer in told["layers"]) == pytest.approx(moved, rel=0.01, abs=1e-9)


def test_the_grid_has_what_was_asked_and_faster_links_never_hurt() -> None:
    found = around()
    best = ranking().best
    assert best is not None
    asked = Point(batch=batch_of("gpt2"), links=1, devices=DEVICES)
    assert found.answers[asked].best is best
    assert len(found.answers) == len(found.batches) * len(found.links) * len(found.devices)
    for point, answer in found.answers.items():
        faster = found.answers.get(Point(batch=point.batch, links=point.links * 10, devices=point.devices))
        if faster is not None and faster.best is not None and answer.best is not None:
            assert faster.best.step_seconds <= answer.best.step_seconds * 1.0001


def test_without_time_the_grid_has_the_answer_that_is_known() -> None:
    assert list(around(0.0).answers) == [Point(batch=batch_of("gpt2"), links=1, devices=DEVICES)]


def test_the_commands_write_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, file, ran = (tmp_path / name for name in ("a.html", "b.html", "plan.json", "run.json"))
    asked = ["plan", "alexnet", "--cluster", "ethernet-1g", "--devices", "4", "--batch", "64", "-o", str(file)]
    assert run([*asked, "--report", str(first), "--what-if", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(first)
    ran.write_text(json.dumps(trained(graph=json.loads(file.read_text())["graph"])))
    assert run(["report", str(file), str(ran), "-o", str(second), "--what-if", "0"]) == 0
    assert data_of(first.read_text())["runs"] == []
    told = data_of(second.read_text())
    assert told["runs"][0]["measured"] == 0.2 and told["grid"]["cells"] and told["scaling"] == []


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "is no JSON"),
        ('{"a": 1}', "is no record of a run"),
        (None, "cannot read"),
        (json.dumps({k: v for k, v in trained().items() if k != "version"}), "has no version: an earlier Fourfold wrote it"),
        (json.dumps({**trained(), "version": 2}), "record version 2, this Fourfold reads 1; run it again"),
        (json.dumps({**trained(), "lossses": []}), "lossses: is no key here; did you mean 'losses'?"),
        (json.dumps({**trained(), "ranks": 2.0}), "ranks: is 2.0, a whole number is needed"),
        (json.dumps({**trained(), "ranks": True}), "ranks: is true, a whole number is needed"),
        (json.dumps({**trained(), "step_seconds": -1}), "step_seconds: is -1, it must be at least 0"),
        (json.dumps({**trained(), "losses": [1.0, "2"]}), "losses 2: is '2', a number is needed"),
        (json.dumps({**trained(), "step_seconds": float("nan")}), "NaN is no number"),
        (json.dumps(trained(graph="0" * 16)), "is a run of gnmt (graph 0000000000000000), the plan is for alexnet (graph "),
    ],
)
def test_a_broken_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, word: str) -> None:
    file, ran = tmp_path / "plan.json", tmp_path / "run.json"
    assert run(["plan", "alexnet", "--cluster", "ethernet-1g", "--devices", "2", "--strategy", "data", "-o", str(file)]) == 0
    if content is not None:
        ran.write_text(content)
    capsys.readouterr()
    assert run(["report", str(file), str(ran), "-o", str(tmp_path / "r.html")]) == 2
    assert word in capsys.readouterr().err and not (tmp_path / "r.html").exists()
