"""A reproduction for a terminal and as a page: its tables and curves, and what was expected beside what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fourfold.report.text import _table
from fourfold.reproduce.study import Reproduction, Table

Curves = Mapping[str, Sequence[tuple[float, float]]]
MARKS = {
    "read": "read in the authors' text or tables",
    "recomputed": "recomputed from the paper's formulas",
    "remembered": "remembered or rederived: the structure is trusted, constants are not",
    "unknown": "the paper's figure is not known",
}
WIDE, TALL, LEFT, UNDER = 640, 280, 64, 40  # of a plot, in pixels


def reproduction_text(told: Reproduction, *, file: str | None = None) -> RenderableType:
    """`reproduce`: tables, then expectations."""
    parts: list[RenderableType] = [Text(told.title)]
    for table in told.tables:
        shown = _table(table.head[0], *(f"{name}>" for name in table.head[1:]))
        for row in table.rows:
            shown.add_row(*row)
        parts += [Text(""), Text(table.title), shown, *([Text(table.note)] if table.note else [])]
    expected = _table("expected", "ours>", "paper>", "the paper's figure is", "")
    for e in told.expectations:
        expected.add_row(e.what, e.ours, e.paper, e.mark, "holds" if e.holds else "DOES NOT HOLD")
    held = sum(e.holds for e in told.expectations)
    marks = [f"{mark}: {MARKS[mark]}" for mark in dict.fromkeys(e.mark for e in told.expectations)]
    lines = [f"{held} of {len(told.expectations)} expectations hold.", *marks, *told.notes]
    return Group(*parts, Text(""), expected, *map(Text, [*lines, *([f"written to {file}"] if file else [])]))


def summary(records: Iterable[Mapping[str, Any]]) -> str:
    """A table for a page in Markdown: of each paper's record, what held, and its chief expectations."""
    out = ["| paper | what | here | the paper | the paper's figure is |", "|---|---|---|---|---|"]
    for record in records:
        held = sum(e["holds"] for e in record["expectations"])
        about = f"{record['title']}: {held} of {len(record['expectations'])} hold"
        for e in (e for e in record["expectations"] if e["chief"]):
            fails = "" if e["holds"] else " (does not hold)"
            out.append(f"| {about} | {e['what']} | {e['ours']}{fails} | {e['paper']} | {e['mark']} |")
            about = ""
    return "\n".join(out)


def reproduction_page(told: Reproduction) -> str:
    """One HTML file with everything in it."""
    style = files("fourfold.report").joinpath("page.css").read_text("utf-8")
    body = [f'<header><div><p class="brand">Fourfold</p><h1>{escape(told.title)}</h1></div></header><main>']
    for table in told.tables:
        note = f'<p class="hint">{escape(table.note)}</p>' if table.note else ""
        body.append(f"<section><h2>{escape(table.title)}</h2>{_html(table)}{note}{_plot(table.plot)}</section>")
    rows = tuple((e.what, e.ours, e.paper, MARKS[e.mark], "holds" if e.holds else "does not hold") for e in told.expectations)
    head = ("expected", "ours", "paper", "the paper's figure is", "")
    body.append(f"<section><h2>What was expected</h2>{_html(Table(title='', head=head, rows=rows))}")
    body += [*(f"<p>{escape(note)}</p>" for note in told.notes), "</section></main>"]
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    top = f"<head>{meta}<title>{escape(told.title)}</title><style>{style}</style></head>"
    return f'<!DOCTYPE html><html lang="en">{top}<body>{"".join(body)}</body></html>'


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _plot(curves: Curves) -> str:
    """Curves over a logarithmic x, from zero up."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    xs, top = sorted({x for x, _ in points}), max(y for _, y in points) * 1.08
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDE - LEFT - 20) * ((math.log2(x) - low) / (high - low) if high > low else 0.5)
        return across, 10 + (TALL - UNDER - 10) * (1 - y / top)

    inside = "".join(_drawn(curves, xs, top, at))
    return f'<svg viewBox="0 0 {WIDE} {TALL}" role="img" style="max-width:{WIDE}px">{inside}</svg>'


def _drawn(curves: Curves, xs: Sequence[float], top: float, at: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    for x in xs:
        across, down = at(x, 0)
        yield f'<text x="{across:.1f}" y="{down + 18:.1f}" text-anchor="middle">{x:g}</text>'
    for k in range(5):
        across, down = at(xs[0], top * k / 4)
        yield f'<line x1="{LEFT}" x2="{WIDE - 20}" y1="{down:.1f}" y2="{down:.1f}" style="stroke:var(--line)"/>'
        yield f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{top * k / 4:.3g}</text>'
    for k, (name, curve) in enumerate(curves.items()):
        places = [at(x, y) for x, y in curve]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield f'<polyline points="{line}" style="fill:none;stroke:var(--c{k % 10});stroke-width:2"/>'
        across, down = places[len(places) // 2]
        yield f'<text x="{across + 8:.1f}" y="{down - 8:.1f}" style="fill:var(--c{k % 10})">{escape(name)}</text>'
