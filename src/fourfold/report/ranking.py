"""The planner's result, for scripts and for a terminal: plans by their predicted step, why others are not possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from fourfold.oracle.predict import Prediction
from fourfold.oracle.time.items import Category
from fourfold.planner import Ranking
from fourfold.report.costs import setting_record, setting_words
from fourfold.report.plans import candidate_record
from fourfold.report.text import WIDTH, _table, mesh_text
from fourfold.units import bytes_text, seconds_text

BAR = 20  # signs of the slowest step shown
LONGEST = 3  # times the fastest step: bars of longer ones end open
SIGNS = {"compute": ("█", "#"), "exchange": ("▒", "x"), "pipeline": ("░", "."), "other": ("▪", "o")}
"""By what a step is spent on: a block, and what terminals without blocks get."""
KINDS: dict[Category, str] = {
    "compute": "compute",
    "gradient_exchange": "exchange",
    "layer_exchange": "exchange",
    "halo": "exchange",
    "pipeline": "pipeline",
    "update": "other",
    "other": "other",
}
REFUSED = 6  # reasons shown


def ranking_record(ranking: Ranking, *, model: str, top: int, file: str | None, trace: str | None) -> dict[str, Any]:
    """`plan --json`: the best first; `refused` are strategies that are not possible."""
    shown = ranking.candidates[:top]
    return {
        "model": model,
        **setting_record(ranking.task.setting),
        "devices": ranking.task.devices,
        "batch": ranking.task.batch,
        "search_seconds": ranking.seconds,
        "best": 0 if ranking.best is not None else None,
        "candidates": [candidate_record(c.plan, c.lowered, c) for c in shown],
        "refused": [{"strategy": r.strategy, "reason": r.reason} for r in ranking.refusals],
        "notes": list(ranking.notes),
        "file": file,
        "trace": trace,
    }


def ranking_text(ranking: Ranking, *, model: str, top: int, files: Sequence[str] = ()) -> RenderableType:
    """`plan`: the table of plans, and the strategies that are not possible."""
    task, shown = ranking.task, ranking.candidates[:top]
    what = f"{model}: batch {task.batch}, {len(ranking.candidates)} plans predicted in {ranking.seconds:.1f} s"
    where = f"on {setting_words(task.setting)}"
    head = Text(f"{what}, {where}" if len(what) + 2 + len(where) <= WIDTH else f"{what},\n{where}")
    parts: list[RenderableType] = [head]
    if shown:
        parts += [_plans(shown), Legend()]
    lines = [f"{r.strategy}: {r.reason}" for r in ranking.refusals[:REFUSED]]
    lines += (
        [f"and {len(ranking.refusals) - REFUSED} more strategies are not possible"] if len(ranking.refusals) > REFUSED else []
    )
    lines += [f"Nothing fits. {ranking.nearest()}"] if ranking.best is None else []
    lines += [*ranking.notes, *(f"written to {file}" for file in files)]
    return Group(*parts, *map(Text, lines))


def _plans(some: Sequence[Prediction]) -> RenderableType:
    table = _table("strategy", "mesh", "step>", "+->", "time spent on", "peak>", "capacity>")
    fastest = min(c.step_seconds for c in some)
    whole = min(max(c.step_seconds for c in some), LONGEST * fastest)
    for c in some:
        low, high = c.interval
        table.add_row(
            plan_name(c),
            mesh_text(c.plan),
            seconds_text(c.step_seconds),
            f"{(high - low) / 2 / c.step_seconds:.0%}",
            Spent(breakdown=tuple(c.breakdown.items()), whole=whole),
            bytes_text(c.peak_bytes) if c.feasible else f"({bytes_text(c.peak_bytes)})",
            bytes_text(c.capacity_bytes),
        )
    return table


def plan_name(c: Prediction) -> str:
    """A plan's strategy, with ZeRO, recomputation and micro-batches where it has them."""
    extra = [f"ZeRO-{c.plan.zero}"] if c.plan.zero and c.plan.strategy != "fsdp" else []
    extra += ["recompute"] if c.plan.recompute else []
    extra += [f"{c.plan.microbatches} micro"] if c.plan.microbatches > 1 else []
    return " ".join([c.plan.strategy.partition(":")[0], *(f"+{word}" for word in extra)])


class Spent:
    """A bar as long as the step, in signs of what it is spent on."""

    def __init__(self, *, breakdown: tuple[tuple[Category, float], ...], whole: float) -> None:
        self.breakdown, self.whole = breakdown, whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spent = dict.fromkeys(SIGNS, 0.0)
        for term, seconds in self.breakdown:
            spent[KINDS[term]] += seconds
        text, ends, at = "", 0.0, 0
        for kind, seconds in spent.items():
            ends += seconds
            until = round(BAR * ends / self.whole)
            text += SIGNS[kind][options.ascii_only] * (until - at)
            at = until
        yield Text(f"{text[: BAR - 1]}>" if len(text) > BAR else text, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(BAR, BAR)


class Legend:
    """What the signs of the bars mean."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = {"compute": "compute", "exchange": "communication", "pipeline": "waiting for stages", "other": "update"}
        signs = (f"{SIGNS[kind][options.ascii_only]} {word}" for kind, word in words.items())
        yield Text("   ".join([*signs, "( ) does not fit", "micro: micro-batches"]))
