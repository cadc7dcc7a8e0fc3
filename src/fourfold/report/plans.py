"""A plan for scripts and for a terminal: its mesh, stages and schedule, the splits layer by layer, what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fourfold.oracle.cost_model import Forecast, Setting
from fourfold.plans import LoweredPlan, Plan, Program
from fourfold.report.costs import cost_record, cost_text, setting_record
from fourfold.report.record import work_record
from fourfold.report.stages import options_text, ranks_text, schedule_lines, stage_facts
from fourfold.report.text import WIDTH, _axes, _head, _or_none, _table
from fourfold.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The predicted cost of a plan, and the cluster and settings it is predicted for."""

    forecast: Forecast
    setting: Setting


def plan_record(
    plan: Plan, program: LoweredPlan, outlook: Outlook | None, *, seconds: float, file: str | None, trace: str | None
) -> dict[str, Any]:
    """`plan --json`: one candidate. Without an outlook its cost fields are null."""
    forecast = outlook.forecast if outlook is not None else None
    feasible = forecast is None or forecast.feasible
    return {
        "model": plan.model,
        **setting_record(outlook.setting if outlook is not None else None),
        "devices": plan.size,
        "batch": plan.batch,
        "search_seconds": seconds,
        "best": 0 if feasible else None,
        "candidates": [candidate_record(plan, program, forecast)],
        "file": file,
        "trace": trace,
    }


def candidate_record(plan: Plan, program: LoweredPlan, forecast: Forecast | None) -> dict[str, Any]:
    """A plan among `candidates`."""
    stages = _stages(program, forecast)
    same_mesh = len({part.stage.mesh for part in program.parts}) == 1
    return {
        "strategy": plan.strategy,
        "mesh": stages[0]["mesh"] if same_mesh else None,
        "stages": stages,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule if len(stages) > 1 else None,
        "zero": plan.zero,
        "recompute": [[segment.first, segment.last] for segment in plan.recompute],
        **cost_record(forecast),
        "feasible": forecast is None or forecast.feasible,
        "limits": list(plan.notes if forecast is None else forecast.limits),
        **work_record(program),
    }


def _stages(program: LoweredPlan, forecast: Forecast | None) -> list[dict[str, Any]]:
    peaks = (forecast.stage_peaks if forecast is not None else ()) or [None] * len(program.parts)
    return [
        {
            "ranks": list(part.stage.ranks),
            "mesh": dict(part.stage.mesh.axes),
            "ops": [compute.op.path for compute in part.program.computes()],
            "peak_bytes": peak,
            **asdict(facts),
        }
        for part, facts, peak in zip(program.parts, stage_facts(program), peaks, strict=True)
    ]


def plan_text(plan: Plan, program: LoweredPlan, outlook: Outlook | None, *, files: Sequence[str] = ()) -> RenderableType:
    """`plan`: the mesh, stages and schedule, the splits layer by layer, what stays whole, the cost; the files written."""
    axes = _axes(program)
    parts = [_head(plan, plan.model, f"batch {plan.batch}", options_text(plan), f"graph {plan.graph}")]
    if plan.stages:
        parts += [_stage_table(program), Text("Schedule: stage, F (forward) or B (backward), micro-batch")]
        parts += [Text(line, no_wrap=True) for line in schedule_lines(plan, WIDTH)]
    if axes or not plan.stages:
        parts.append(split_table(program, axes))
    if axes:
        parts.append(Text(f"{program.split_flops_fraction:.1%} of the FLOPs are split over every mesh axis"))
    if outlook is not None:
        parts += [Text(""), cost_text(outlook.forecast, outlook.setting)]
    notes = plan.notes if outlook is None else outlook.forecast.limits
    word = "note" if outlook is None or outlook.forecast.feasible else "does not fit"
    lines = [f"{word if number == 0 else 'note'}: {note}" for number, note in enumerate(notes)]
    return Group(*parts, *map(Text, [*lines, *(f"written to {file}" for file in files)]))


def _stage_table(program: LoweredPlan) -> Table:
    """Who has which layers, and what a stage holds and sends."""
    table = _table("stage>", "ranks", "layers", "FLOPs>", "in flight>", "weights/rank>", "sends/micro-batch>")
    facts = stage_facts(program)
    total = sum(fact.flops for fact in facts) or 1
    for part, fact in zip(program.parts, facts, strict=True):
        named = [c.op.module or c.op.path for c in part.program.computes() if c.nest.anchor]
        layers = f"{named[0]} .. {named[-1]}" if len(set(named)) > 1 else "".join(named[:1])
        share, sent = f"{fact.flops / total:.1%}", _or_none(fact.sent_bytes, bytes_text)
        weights = _or_none(fact.parameter_bytes, bytes_text)
        table.add_row(str(part.index), ranks_text(part.stage.ranks), layers, share, str(fact.in_flight), weights, sent)
    return table


def split_table(program: LoweredPlan, axes: Sequence[str]) -> Table:
    """How layers are split, stage by stage."""
    staged = len(program.parts) > 1
    table = _table(*(["stage>"] if staged else []), "layers", *axes, "share of FLOPs>")
    total = sum(c.nest.flops for c in program.computes() if c.nest.anchor) or 1
    for part in program.parts:
        for first, last, labels, flops in _runs(part.program, axes):
            layers = first if first == last else f"{first} .. {last}"
            table.add_row(*([str(part.index)] if staged else []), layers, *labels, f"{flops / total:.1%}")
    return table


def _runs(program: Program, axes: Sequence[str]) -> list[tuple[str, str, tuple[str, ...], float]]:
    """Consecutive layers that are split alike: first, last, splits, FLOPs."""
    anchors = [c for c in program.computes() if c.nest.anchor]
    out: list[tuple[str, str, tuple[str, ...], float]] = []
    for compute in anchors:
        by_axis = compute.labels()
        labels = tuple(by_axis.get(axis, "") for axis in axes)
        share = float(compute.nest.flops)
        if out and out[-1][2] == labels:
            first, _, _, before = out.pop()
            out.append((first, compute.op.path, labels, before + share))
        else:
            out.append((compute.op.path, compute.op.path, labels, share))
    return out
