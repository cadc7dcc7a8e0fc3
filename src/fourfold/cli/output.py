"""Files that a command writes besides what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.api.output import check_place
from fourfold.errors import InvalidInput
from fourfold.files import json_text, write_file
from fourfold.timeline import Timeline

if TYPE_CHECKING:
    from fourfold.api.planning import Forecast, Setting
    from fourfold.api.running import Plan, Prediction


def check_trace(path: Path | None, setting: Setting | None) -> None:
    """Refuse a trace where there will be no timeline."""
    check_place(path)
    if path is not None and setting is None:
        raise InvalidInput("--trace needs times, and so many ranks are not for this machine; name a --cluster")
    if path is not None and setting is not None and setting.model != "fourfold":
        raise InvalidInput(f"--trace needs a timeline, which {setting.model}'s formulas do not give; leave --cost-model out")


def write_record(record: dict[str, Any], path: Path | None) -> None:
    """Write what `--json` prints to a file."""
    if path is not None:
        write_file(path, json_text(record))


def write_timelines(prediction: Prediction | None, measured: Timeline, plan: Plan, path: Path) -> str:
    """Write the measured step and, where there is one, the predicted one; the file."""
    from fourfold.report.trace import trace_record

    places = tuple(dict.fromkeys(stage.ranks for stage in plan.parts))
    predicted = prediction.estimate.timeline if prediction is not None else Timeline(())
    record = trace_record(predicted, measured, places=places)
    write_file(path, json_text(record))
    return str(path)


def write_trace(cost: Forecast | None, path: Path | None) -> str | None:
    """Write the predicted timeline, where there is one; the file it went to."""
    from fourfold.report.trace import trace_record

    if path is None or cost is None or cost.timeline is None:
        return None
    record = trace_record(cost.timeline, places=cost.places)
    write_file(path, json_text(record))
    return str(path)


def draw_step(cost: Forecast | None, path: Path | None, title: str) -> None:
    """Draw the predicted timeline, where there is one."""
    from fourfold.report.pictures import timeline_picture

    if path is not None and cost is not None and cost.timeline is not None:
        timeline_picture(cost.timeline, path, title=title, places=cost.places)
