"""Scaling curves, the cost fields of plans, and traces."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourfold.cli.main import run
from fourfold.cluster import cluster_named
from fourfold.cluster.local import RANKS_A_CORE, usable_cores
from fourfold.errors import InvalidInput
from fourfold.oracle.cost_model import Forecast, Setting, forecast
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.scaling import Row, Study, fastest
from fourfold.oracle.time.items import CATEGORIES
from fourfold.planner.explain import with_scaled_memory
from fourfold.plans import lower_plan, named
from fourfold.report.scaling import Sparks, scaling_record, scaling_text
from fourfold.report.trace import MICRO, trace_record
from fourfold.timeline import Event, Timeline
from small import graph_of

SMALL = "vgg16-cifar,batch=8,width=64,channels=8"
COUNTS = (1, 2, 4, 16)
KEYS = {
    "devices", "strategy", "batch", "step_seconds", "interval_seconds", "epoch_seconds", "samples_per_second", "efficiency",
    "breakdown", "peak_bytes", "capacity_bytes", "feasible", "limits",
}  # fmt: skip


@cache
def setting(devices: int, *, model: Any = "fourfold") -> Setting:
    return Setting(prices=Prices(cluster=cluster_named("abci", devices=devices)), model=model)


def study(**fields: Any) -> Study:
    settings = {count: setting(count) for count in COUNTS}
    return Study(**{"graph": graph_of("vgg16-cifar"), "settings": settings, "batch": 8, **fields})


@cache
def rows(strategies: tuple[str, ...], **fields: Any) -> tuple[Row, ...]:
    asked = study(**fields)
    return tuple(asked.row(strategy, count) for count in COUNTS for strategy in strategies)


@pytest.fixture
def record(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*arguments: object, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert run([*map(str, arguments), "--json"]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_one_device_is_as_efficient_as_one_device() -> None:
    for row in rows(("data", "filter", "pipeline")):
        if row.devices == 1:
            assert row.efficiency == pytest.approx(1.0)


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_weak_scaling_grows_the_batch_and_strong_keeps_it(scaling: str) -> None:
    found = rows(("data",), scaling=scaling)
    assert [row.batch for row in found] == ([8, 16, 32, 128] if scaling == "weak" else [8] * 4)
    for row in found:
        assert row.forecast is not None
        assert row.samples_per_second == pytest.approx(row.batch / row.forecast.step_seconds)
        assert row.efficiency == pytest.approx(row.samples_per_second / row.devices / found[0].samples_per_second)


def test_an_epoch_is_its_samples_at_the_speed_of_a_step() -> None:
    (row, *_) = rows(("data",), samples=1000)
    assert row.forecast is not None
    assert row.epoch_seconds == pytest.approx(1000 / 8 * row.forecast.step_seconds)
    assert rows(("data",))[0].epoch_seconds is None


def test_what_a_strategy_cannot_do_is_a_row_with_the_reason() -> None:
    *_, row = rows(("filter",))
    assert row.devices == 16
    assert not row.feasible
    assert row.forecast is None
    assert "filters, fewer than the 16 ranks" in row.limits[0]


def test_the_fastest_row_fits() -> None:
    found = rows(("data", "filter", "pipeline"))
    best = fastest(found)
    assert set(best) == set(COUNTS)
    for count, row in best.items():
        same = [other.forecast.step_seconds for other in found if other.devices == count and other.forecast is not None]
        assert row.forecast is not None and row.forecast.step_seconds == min(same)
    tiny = {count: one.on(with_scaled_memory(one.cluster, 1e-9)) for count, one in study().settings.items()}
    full = [study(settings=tiny).row("data", count) for count in COUNTS]
    assert all(row.forecast is not None for row in full) and fastest(full) == {}


def test_a_model_of_fixed_batch_does_not_scale_weakly() -> None:
    with pytest.raises(InvalidInput, match="fixes its batch at 8"):
        study(graph=replace(graph_of("vgg16-cifar"), batch=8), scaling="weak")


def test_paradls_formulas_give_terms_and_no_interval() -> None:
    graph = graph_of("vgg16-cifar")
    lowered = lower_plan(graph, named("data", graph, ranks=4, batch=8))
    found = forecast(lowered, setting(4, model="paradl"))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert found.breakdown["gradient_exchange"] > 0
    assert (found.interval, found.timeline, found.stage_peaks) == (None, None, ())


def drawn(width: int, encoding: str = "utf-8", **fields: Any) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    found = rows(("data", "filter", "spatial", "data+filter", "spatial+pipeline"), **fields)
    text = scaling_text(study(**fields), found, setting(16), model="vgg16-cifar", trace=None)
    Console(file=out, width=width, highlight=False).print(text)
    out.seek(0)
    return out.read()


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_terminal(width: int) -> None:
    text = drawn(width, scaling="weak", samples=50_000)
    assert max(map(len, text.splitlines())) <= width
    assert "filter on 16: " in text
    head = next(line for line in text.splitlines() if line.startswith("devices"))
    assert {"strategy", "batch", "step", "epoch", "efficiency"} <= set(head.split())
    assert len([line for line in text.splitlines() if line.strip().startswith(("1 ", "2 ", "4 ", "16 "))]) == len(COUNTS)


def test_assumed_rates_beside_measured_ones_are_told() -> None:
    settings = {1: Setting(prices=Prices(cluster=cluster_named("local", devices=1))), 2: setting(2)}
    asked = study(settings=settings)
    assert scaling_record(asked, [], setting(2), model="", trace=None)["assumed_devices"] == [1]
    out = io.StringIO()
    Console(file=out).print(scaling_text(asked, [], setting(2), model="", trace=None))
    assert "Rates of 1 devices are assumed, not calibrated" in out.getvalue()


def test_a_terminal_without_blocks_gets_digits() -> None:
    assert "▁" not in drawn(100, "ascii", scaling="weak", samples=50_000)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=out).print(Sparks((0.0, 0.5, None, 1.0, 1.5)))
    out.seek(0)
    assert out.read().strip() == "04.99"


def test_simulate_gives_rows_under_their_keys(record: Callable[..., dict[str, Any]]) -> None:
    asked = ("--cluster", "abci", "--devices", "4,1,16", "--strategy", "data", "--strategy", "filter", "--samples", "100")
    found = record("simulate", SMALL, *asked)
    assert (found["model"], found["cluster"], found["scaling"], found["samples"]) == (SMALL, "abci", "strong", 100)
    assert [(row["devices"], row["strategy"]) for row in found["rows"]] == [
        (count, name) for count in (1, 4, 16) for name in ("data", "filter")
    ]
    for row in found["rows"]:
        assert row.keys() >= KEYS
        if row["feasible"]:
            low, high = row["interval_seconds"]
            assert low <= row["step_seconds"] <= high
            assert sum(row["breakdown"].values()) == pytest.approx(row["step_seconds"])
    assert found["rows"][-1]["step_seconds"] is None
    assert found["best"]["16"] == 4, "filter cannot be on 16"


def test_nothing_feasible_is_exit_code_1(record: Callable[..., dict[str, Any]]) -> None:
    found = record("simulate", SMALL, "--cluster", "abci", "--devices", "16", "--strategy", "filter", code=1)
    assert found["best"] == {"16": None}


def test_a_plan_has_its_costs(record: Callable[..., dict[str, Any]]) -> None:
    asked = ("--strategy", "pipeline", "--devices", 2, "--cluster", "dgx-h100", "--precision", "tf32", "--optimizer", "adamw")
    found = record("plan", SMALL, *asked)
    assert (found["cluster"], found["precision"], found["optimizer"]) == ("dgx-h100", "tf32", "adamw")
    (candidate,) = found["candidates"]
    assert candidate["breakdown"].keys() == set(CATEGORIES)
    assert sum(candidate["breakdown"].values()) == pytest.approx(candidate["step_seconds"])
    assert max(stage["peak_bytes"] for stage in candidate["stages"]) == candidate["peak_bytes"]
    assert 0 < candidate["peak_bytes"] < candidate["capacity_bytes"]
    assert sum(candidate["known_from"].values()) == pytest.approx(1.0)


def test_a_plan_that_does_not_fit_is_no_best(
    record: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster, file = tmp_path / "tiny.toml", tmp_path / "plan.json"
    cluster.write_text(
        'version = 1\nname = "tiny"\n[device.small]\nkind = "gpu"\nmemory_MiB = 1\nbandwidth_GBps = 100\n'
        'rate_fp32_TFLOPs = 1\n[[nodes]]\ncount = 1\ndevice = "small"\ndevices_per_node = 2\n'
        '[[link]]\nname = "bus"\nlatency_us = 5\nbandwidth_GBps = 10\n'
    )
    asked = ("plan", SMALL, "--strategy", "data", "--devices", "2", "--cluster", str(cluster), "-o", str(file))
    found = record(*asked, code=1)
    assert found["best"] is None
    (candidate,) = found["candidates"]
    assert candidate["feasible"] is False
    assert "the device holds 1.0 MiB" in candidate["limits"][0]
    assert file.exists(), "an infeasible plan can be looked at"
    assert run([*asked]) == 1
    assert "does not fit: rank 0 needs" in " ".join(capsys.readouterr().out.split())


def test_ranks_beyond_this_machine_are_not_predicted_for_it(record: Callable[..., dict[str, Any]]) -> None:
    found = record("plan", SMALL, "--strategy", "data", "--devices", RANKS_A_CORE * usable_cores() + 1)
    assert found["cluster"] is None
    (candidate,) = found["candidates"]
    assert candidate["step_seconds"] is None
    assert (candidate["feasible"], found["best"]) == (True, 0)


def staged() -> Forecast:
    graph = graph_of("vgg16-cifar")
    return forecast(lower_plan(graph, named("data+pipeline", graph, ranks=4, batch=8)), setting(4))


def threads(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    out: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            out.setdefault((event["pid"], event["tid"]), []).append(event)
    return out


def check_trace(trace: dict[str, Any]) -> None:
    """Whether a trace keeps to the format, and each thread does one thing after the other."""
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "X":
            assert isinstance(event["ts"], float) and isinstance(event["dur"], float)
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert isinstance(event["cat"], str)
    for events in threads(trace).values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_a_trace_of_a_predicted_step_keeps_to_the_format() -> None:
    found = staged()
    assert found.timeline is not None
    trace = json.loads(json.dumps(trace_record(found.timeline, places=found.places)))
    check_trace(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] in ("process_name", "thread_name")}
    assert names == {"predicted", "ranks 0-1", "ranks 2-3"}
    back = [
        (e["tid"], e["ts"] / MICRO, (e["ts"] + e["dur"]) / MICRO) for e in trace["traceEvents"] if e["ph"] == "X"
    ]  # fmt: skip
    assert back == [pytest.approx((e.rank, e.start, e.end)) for e in found.timeline.events]


def test_predicted_and_measured_steps_are_two_processes_of_one_trace() -> None:
    events = [Event(rank=rank, action="0F0", kind="F", start=0.25 * rank, end=0.5) for rank in (0, 1)]
    trace = trace_record(Timeline((events[0],)), Timeline(tuple(events)))
    check_trace(trace)
    assert {key: len(found) for key, found in threads(trace).items()} == {(1, 0): 1, (2, 0): 1, (2, 1): 1}
    assert threads(trace)[2, 1][0]["dur"] == pytest.approx(0.25e6)


def test_commands_write_traces(record: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    one, two = tmp_path / "simulated.json", tmp_path / "planned.json"
    asked = ("--strategy", "data+pipeline", "--devices", 4, "--cluster", "abci")
    assert record("simulate", SMALL, *asked, "--trace", one)["trace"] == str(one)
    assert record("plan", SMALL, *asked, "--trace", two)["trace"] == str(two)
    assert json.loads(one.read_text()) == json.loads(two.read_text())
    check_trace(json.loads(one.read_text()))
