"""A plan explained in words: what it is, why it was chosen, what limits it, what would change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fourfold.oracle.predict import Prediction
from fourfold.oracle.time.items import CATEGORY_LABELS
from fourfold.planner.explain import Comparison, Explanation, WhatIf
from fourfold.planner.search import TIE, same_plan
from fourfold.report.costs import setting_words
from fourfold.report.plans import split_table
from fourfold.report.ranking import plan_name
from fourfold.report.text import WIDTH, _axes, _table, mesh_text
from fourfold.units import bytes_text, seconds_text

LEAST_SHOWN = 0.02  # of the step: smaller differences are left out
FINDINGS = 6


def explanation_text(explanation: Explanation, *, model: str) -> RenderableType:
    """`explain`: words, a map of the layers, and what-ifs."""
    plan = explanation.plan
    low, high = plan.estimate.interval
    head = f"{model}, batch {plan.plan.batch}, on {setting_words(explanation.task.setting)}"
    step = (
        f"{_called(plan)} takes {seconds_text(plan.step_seconds)} a step (between {seconds_text(low)} and {seconds_text(high)})"
    )
    memory = f"{bytes_text(plan.peak_bytes)} of {bytes_text(plan.capacity_bytes)} on the device with the highest peak"
    parts: list[RenderableType] = [Text(head), Text(f"{step} and {memory}."), Text("")]
    parts += [Text(line) for line in _spent(plan)]
    parts += [Text(""), Text("How layers are split"), split_table(plan.lowered, _axes(plan.lowered))]
    if explanation.comparisons:
        why = [line for against in explanation.comparisons for line in _why_not(plan, against)]
        parts += [Text(""), Text("Why not another plan"), *map(Text, why)]
    if explanation.findings:
        parts += [
            Text(""),
            Text("What limits this plan"),
            *(Text(f"- {finding.text}") for finding in explanation.findings[:FINDINGS]),
        ]
    return Group(*parts, Text(""), Text("The best plan if something changes"), _changes(explanation))


def _called(candidate: Prediction) -> str:
    name = plan_name(candidate)
    return f"{'The best plan found' if name.startswith('auto') else name} ({mesh_text(candidate.plan)})"


def _spent(plan: Prediction) -> Iterator[str]:
    """Where the step goes, in a sentence."""
    terms = sorted(plan.estimate.breakdown.items(), key=lambda pair: -pair[1])
    shown = [
        f"{s / plan.step_seconds:.0%} {CATEGORY_LABELS[term]}" for term, s in terms if s >= LEAST_SHOWN * plan.step_seconds
    ]
    yield f"Time of a step: {', '.join(shown)}."


def _why_not(plan: Prediction, comparison: Comparison) -> Iterator[str]:
    other = comparison.other
    name = f"{plan_name(other)} on {mesh_text(other.plan)}"
    ratio = other.step_seconds / plan.step_seconds
    if not other.feasible:
        need, room = bytes_text(other.peak_bytes), bytes_text(other.capacity_bytes)
        yield f"- {name} would take {seconds_text(other.step_seconds)} but does not fit: {need} of {room}."
        return
    if comparison.extra_seconds < 0:
        equal = plan.step_seconds <= (1 + TIE) * other.step_seconds
        word = f"equal within {TIE:.0%}" if equal else "it is the better plan"
        notes = f", but {'; '.join(other.plan.notes)}" if other.plan.notes else f": {word}"
        yield f"- {name} takes {seconds_text(other.step_seconds)}, {ratio:.2f} times as long{notes}."
        return
    longer = [
        f"{seconds_text(s)} more {CATEGORY_LABELS[t]}"
        for t, s in comparison.extra_by_category
        if s > LEAST_SHOWN * plan.step_seconds
    ][:2]
    saved = [
        f"{seconds_text(-s)} less {CATEGORY_LABELS[t]}"
        for t, s in comparison.extra_by_category
        if s < -LEAST_SHOWN * plan.step_seconds
    ][:1]
    why = "; ".join(filter(None, [" and ".join(longer), f"but {saved[0]}" if saved else ""]))
    if not why and ratio < 1 + LEAST_SHOWN:
        yield f"- {name} takes {seconds_text(other.step_seconds)}, about as long."
    else:
        reason = why or "many small differences"
        yield f"- {name} takes {seconds_text(other.step_seconds)}, {ratio:.2f} times as long: {reason}."


def _changes(explanation: Explanation) -> Table:
    table = _table("with", "the best plan is", "mesh", "step>", "samples/s>", "")
    here = explanation.plan.plan.batch / explanation.plan.step_seconds
    for change in explanation.changes:
        table.add_row(*_row(change, explanation, here))
    return table


def _row(change: WhatIf, explanation: Explanation, here: float) -> list[str]:
    if change.best is None:
        return [change.change, "none fits", change.reason[: WIDTH // 3], "", "", ""]
    best = change.best
    speed = best.plan.batch / best.step_seconds
    same = same_plan(replace(explanation.plan.plan, batch=best.plan.batch), best.plan)
    word = "the same plan" if same else plan_name(best)
    return [change.change, word, mesh_text(best.plan), seconds_text(best.step_seconds), f"{speed:.4g}", f"{speed / here:.2f}x"]


def explanation_record(explanation: Explanation, *, model: str) -> dict[str, Any]:
    """`explain --json`, in SI units."""
    plan = explanation.plan
    return {
        "model": model,
        "cluster": explanation.task.cluster.name,
        "devices": explanation.task.devices,
        "batch": plan.plan.batch,
        "strategy": plan.plan.strategy,
        "step_seconds": plan.step_seconds,
        "breakdown": dict(plan.breakdown),
        "peak_bytes": plan.peak_bytes,
        "capacity_bytes": int(plan.capacity_bytes),
        "against": [
            {
                "strategy": a.other.plan.strategy,
                "mesh": mesh_text(a.other.plan),
                "step_seconds": a.other.step_seconds,
                "longer_seconds": dict(a.extra_by_category),
            }
            for a in explanation.comparisons
        ],
        "findings": [
            {"name": f.name, "kind": f.kind, "where": f.where, "text": f.text, "numbers": dict(f.numbers)}
            for f in explanation.findings
        ],
        "changes": [
            {
                "change": c.change,
                "strategy": c.best.plan.strategy if c.best is not None else None,
                "mesh": mesh_text(c.best.plan) if c.best is not None else None,
                "step_seconds": c.best.step_seconds if c.best is not None else None,
                "reason": c.reason,
            }
            for c in explanation.changes
        ],
    }
