"""Files that a command writes besides what it prints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.errors import InvalidInput
from fourfold.files import json_text, write_file
from fourfold.timeline import Timeline

if TYPE_CHECKING:
    from fourfold.graph import Graph
    from fourfold.oracle.cost_model import Forecast, Setting
    from fourfold.oracle.predict import Prediction
    from fourfold.plans import Plan


def check_place(path: Path | None) -> None:
    """Refuse a file that cannot be written before the work for it is done."""
    if path is not None and not path.parent.is_dir():
        raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise InvalidInput(f"cannot write {path}: it is a folder; name a file in it")


def check_trace(path: Path | None, setting: Setting | None) -> None:
    """Refuse a trace where there will be no timeline."""
    check_place(path)
    if path is not None and setting is None:
        raise InvalidInput("--trace needs times, and so many ranks are not for this machine; name a --cluster")
    if path is not None and setting is not None and setting.model != "fourfold":
        raise InvalidInput(f"--trace needs a timeline, which {setting.model}'s formulas do not give; leave --cost-model out")


def write_plan(plan: Plan, graph: Graph, path: Path, *, made_for: Mapping[str, str] | None) -> None:
    """Write a plan, and keep its graph where `explain` and `report` look for it."""
    from fourfold.plans import save_plan
    from fourfold.workload.graph_cache import keep_graph

    save_plan(plan, path, made_for=made_for)
    with suppress(InvalidInput):  # a cache that cannot be written to: they ask for the model then
        keep_graph(graph)


def write_record(record: dict[str, Any], path: Path | None) -> None:
    """What `--json` prints as a file, on the rank that speaks."""
    from fourfold.runtime.rank_pool import is_leader

    if path is not None and is_leader():
        write_file(path, json_text(record))


def write_timelines(foretold: Prediction | None, measured: Timeline, plan: Plan, path: Path) -> str | None:
    """Write the measured step and, where there is one, the predicted one; the file, on the rank that speaks."""
    from fourfold.report.trace import trace_record
    from fourfold.runtime.rank_pool import is_leader

    if not is_leader():
        return None
    places = tuple(dict.fromkeys(stage.ranks for stage in plan.parts))
    predicted = foretold.estimate.timeline if foretold is not None else Timeline(())
    record = trace_record(predicted, measured, places=places)
    write_file(path, json_text(record))
    return str(path)


def write_trace(forecast: Forecast | None, path: Path | None) -> str | None:
    """Write the predicted timeline, where there is one; the file it went to."""
    from fourfold.report.trace import trace_record

    if path is None or forecast is None or forecast.timeline is None:
        return None
    record = trace_record(forecast.timeline, places=forecast.places)
    write_file(path, json_text(record))
    return str(path)


def draw_step(forecast: Forecast | None, path: Path | None, title: str) -> None:
    """Draw the predicted timeline, where there is one."""
    from fourfold.report.pictures import timeline_picture

    if path is not None and forecast is not None and forecast.timeline is not None:
        timeline_picture(forecast.timeline, path, title=title, places=forecast.places)
