"""The page of a search and its plans. What is shown is worked out here, how it is drawn in `page.js`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fourfold.oracle.predict import Prediction
from fourfold.oracle.scaling import Row
from fourfold.oracle.time.items import CATEGORY_LABELS, Item
from fourfold.planner import Ranking
from fourfold.planner.search import same_plan
from fourfold.planner.what_if import Answer, Point, WhatIfGrid
from fourfold.plans.lists.lowered_plan import LoweredStage
from fourfold.report.costs import setting_words
from fourfold.report.page.html_file import html_file
from fourfold.report.ranking import plan_name
from fourfold.report.runs import Run
from fourfold.report.stages import options_text, ranks_text
from fourfold.report.text import mesh_text
from fourfold.timeline import Timeline
from fourfold.units import bytes_text

EVENTS = 3000  # of a timeline at most
PLANS = 10
EXCHANGES = ("layer_exchange", "halo")


def page(
    ranking: Ranking,
    *,
    model: str,
    chosen: Prediction | None = None,
    grid: WhatIfGrid | None = None,
    scaling: Sequence[Row] = (),
    runs: Sequence[Run] = (),
) -> str:
    """The page of a search. `chosen`: the plan it is about, if not the best; `runs`: what `train` and `verify` measured."""
    data = {
        "model": model,
        "categories": CATEGORY_LABELS,
        "where": setting_words(ranking.task.setting),
        "devices": ranking.task.devices,
        "batch": ranking.task.batch,
        "searched": ranking.seconds,
        "plans": [_plan(c) for c in _shown(ranking, chosen)],
        "refused": [{"strategy": r.strategy, "reason": r.reason} for r in ranking.refusals],
        "notes": list(ranking.notes),
        "nearest": "" if ranking.best is not None else ranking.nearest(),
        "grid": _grid(grid, ranking) if grid is not None else None,
        "scaling": [_scaled(row) for row in scaling],
        "runs": [asdict(run) for run in runs],
    }
    return html_file("page", data)


def _shown(ranking: Ranking, chosen: Prediction | None) -> list[Prediction]:
    some = list(ranking.candidates[:PLANS])
    if chosen is None:
        return some
    return [chosen, *(c for c in some if not same_plan(c.plan, chosen.plan))]


def _plan(c: Prediction) -> dict[str, Any]:
    plan = c.plan
    low, high = c.interval
    axes = list(dict.fromkeys(axis for part in c.lowered.parts for axis, size in part.stage.mesh.axes if size > 1))
    return {
        "name": plan_name(c),
        "mesh": mesh_text(plan),
        "options": options_text(plan),
        "step": c.step_seconds,
        "interval": [low, high],
        "breakdown": dict(c.breakdown),
        "samples": plan.batch / c.step_seconds,
        "peak": c.peak_bytes,
        "capacity": c.capacity_bytes,
        "feasible": c.feasible,
        "notes": list(plan.notes),
        "findings": [finding.text for finding in c.findings],
        "memory": [
            {
                "ranks": ranks_text(peak.ranks),
                "bytes": peak.bytes,
                "parts": {k: v for k, v in peak.parts.items() if v},
                "when": f"{peak.action} {peak.op}".strip(),
            }
            for peak in c.memory.peaks
        ],
        "axes": axes,
        "layers": [layer for part in c.lowered.parts for layer in _layers(c, part, axes)],
        "timeline": _timeline(c.timeline, c),
    }


def _timeline(timeline: Timeline, c: Prediction) -> dict[str, Any]:
    lanes = {ranks[0]: ranks_text(ranks) for ranks in c.lowered.places}
    events = [e for e in timeline.events if e.kind != "wait" and e.end > e.start][:EVENTS]
    return {
        "lanes": [lanes.get(rank, str(rank)) for rank in timeline.ranks],
        "events": [[timeline.ranks.index(e.rank), e.kind, e.action, e.start, e.end] for e in events],
        "cut": len(events) == EVENTS,
    }


def _layers(c: Prediction, part: LoweredStage, axes: Sequence[str]) -> list[dict[str, Any]]:
    """The layers of a stage: how each is split, and what it costs with all that is done to its result."""
    computes = part.program.computes()
    homes, out = dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for compute in computes:
        if compute.nest.anchor or not out:
            labels = compute.labels() if compute.nest.anchor else {}  # a stage may begin with an op that follows others
            split = [labels.get(axis, "") for axis in axes]
            out.append(
                {"name": compute.op.path, "stage": part.index, "split": split, "compute": 0.0, "exchange": 0.0, "what": {}}
            )
        homes[compute.op.path] = out[-1]
    items = c.estimate.items
    forward, backward = (list(items.get((part.index, way), ())) for way in ("F", "B"))
    _spend(forward, homes)
    _spend(backward[::-1], homes)
    return [{**layer, "what": [f"{k}, {n} x" if n > 1 else k for k, n in layer["what"].items()]} for layer in out]


def _spend(items: Sequence[Item], homes: Mapping[str, dict[str, Any]]) -> None:
    """Add items to their layers; an exchange belongs to the op that follows it, one after all ops to the last."""
    waiting, home = list[Item](), next(iter(homes.values()))
    for item in items:
        if item.category in EXCHANGES:
            waiting.append(item)
        elif item.category == "compute":
            home = homes.get(item.label, home)
            home["compute"] += item.seconds
            _exchanged(waiting, home)
    _exchanged(waiting, home)


def _exchanged(waiting: list[Item], home: dict[str, Any]) -> None:
    for moved in waiting:
        home["exchange"] += moved.seconds
        if moved.pattern:
            words = f"{moved.pattern.replace('_', '-')} over {', '.join(moved.axes)}, {bytes_text(moved.size)}"
            home["what"][words] = home["what"].get(words, 0) + 1
    waiting.clear()


def _grid(grid: WhatIfGrid, ranking: Ranking) -> dict[str, Any]:
    cells = {_key(point): _cell(answer) for point, answer in grid.answers.items()}
    task = ranking.task
    asked = {"batch": task.batch, "links": 1, "devices": task.devices}
    sides = {"batch": list(grid.batches), "links": list(grid.links), "devices": list(grid.devices)}
    return {**sides, "cells": cells, "asked": asked}


def _key(point: Point) -> str:
    return f"{point.batch}|{point.links:g}|{point.devices}"


def _cell(answer: Answer) -> dict[str, Any]:
    best = answer.best
    if best is None:
        return {"reason": answer.reason}
    return {
        "name": plan_name(best),
        "mesh": mesh_text(best.plan),
        "step": best.step_seconds,
        "samples": best.plan.batch / best.step_seconds,
        "breakdown": dict(best.breakdown),
        "peak": best.peak_bytes,
        "capacity": best.capacity_bytes,
        "measured": best.estimate.measured_share,
    }


def _scaled(row: Row) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "devices": row.devices,
        "samples": row.samples_per_second,
        "feasible": row.feasible,
        "efficiency": row.efficiency,
        "why": row.limits[0] if row.limits and row.forecast is None else "",
    }
