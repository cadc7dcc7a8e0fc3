"""A reproduction for a terminal and as a page: its tables and curves, and what was expected beside what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

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
STEEP = 20  # times: curves that fall or rise by more are drawn on a logarithmic scale


def reproduction_text(reproduction: Reproduction, *, file: str | None = None) -> RenderableType:
    """`reproduce`: tables, then expectations."""
    parts: list[RenderableType] = [Text(reproduction.title)]
    for table in reproduction.tables:
        shown = _table(table.head[0], *(f"{name}>" for name in table.head[1:]))
        for row in table.rows:
            shown.add_row(*row)
        parts += [Text(""), Text(table.title), shown, *([Text(table.note)] if table.note else [])]
    expected = _table("expected", "ours>", "paper>", "the paper's figure is", "")
    for e in reproduction.expectations:
        expected.add_row(e.what, e.ours, e.paper, e.mark, "holds" if e.holds else "DOES NOT HOLD")
    held = sum(e.holds for e in reproduction.expectations)
    marks = [f"{mark}: {MARKS[mark]}" for mark in dict.fromkeys(e.mark for e in reproduction.expectations)]
    lines = [f"{held} of {len(reproduction.expectations)} expectations hold.", *marks, *reproduction.notes]
    return Group(*parts, Text(""), expected, *map(Text, [*lines, *([f"written to {file}"] if file else [])]))


def reproduction_page(reproduction: Reproduction) -> str:
    """One HTML file with everything in it."""
    style = files("fourfold.report.page").joinpath("page.css").read_text("utf-8")
    body = [f'<header><div><p class="brand">Fourfold</p><h1>{escape(reproduction.title)}</h1></div></header><main>']
    for table in reproduction.tables:
        note = f'<p class="hint">{escape(table.note)}</p>' if table.note else ""
        body.append(f"<section><h2>{escape(table.title)}</h2>{_html(table)}{note}{_plot(table.plot)}</section>")
    rows = tuple(
        (e.what, e.ours, e.paper, MARKS[e.mark], "holds" if e.holds else "does not hold") for e in reproduction.expectations
    )
    head = ("expected", "ours", "paper", "the paper's figure is", "")
    body.append(f"<section><h2>What was expected</h2>{_html(Table(title='', head=head, rows=rows))}")
    body += [*(f"<p>{escape(note)}</p>" for note in reproduction.notes), "</section></main>"]
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    top = f"<head>{meta}<title>{escape(reproduction.title)}</title><style>{style}</style></head>"
    return f'<!DOCTYPE html><html lang="en">{top}<body>{"".join(body)}</body></html>'


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _plot(curves: Curves) -> str:
    """Curves over a logarithmic x; from zero up, or logarithmic too where they fall or rise steeply."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    ticks = _ticks(min(ys), max(ys))
    steep = ticks[0] > 0
    across, up = _scale(xs[0], xs[-1], logarithmic=True), _scale(ticks[0], ticks[-1], logarithmic=steep)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDE - LEFT - 20) * across(x), 10 + (TALL - UNDER - 10) * (1 - up(y))

    names = (f'<span style="color:var(--c{k % 10})">&#9632;</span> {escape(name)}' for k, name in enumerate(curves))
    inside = "".join(_drawn(curves, xs, ticks, at))
    picture = f'<svg viewBox="0 0 {WIDE} {TALL}" role="img" style="max-width:{WIDE}px">{inside}</svg>'
    return f'{picture}<p class="hint">{" &emsp; ".join(names)}</p>'


def _ticks(least: float, most: float) -> list[float]:
    """Where lines are drawn across, the first and the last around all values: powers of ten, or quarters from zero."""
    if least > 0 and most / least > STEEP:
        return [10.0**k for k in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
    return [1.08 * most * k / 4 for k in range(5)]


def _scale(low: float, high: float, *, logarithmic: bool) -> Callable[[float], float]:
    """From 0 at the low end to 1 at the high one."""
    if low == high:
        return lambda value: 0.5
    if logarithmic:
        return lambda value: math.log(value / low) / math.log(high / low)
    return lambda value: (value - low) / (high - low)


def _drawn(
    curves: Curves, xs: Sequence[float], ticks: Sequence[float], at: Callable[[float, float], tuple[float, float]]
) -> Iterator[str]:
    for x in xs:
        across, down = at(x, ticks[0])
        yield f'<text x="{across:.1f}" y="{down + 18:.1f}" text-anchor="middle">{x:g}</text>'
    for tick in ticks:
        across, down = at(xs[0], tick)
        yield f'<line x1="{LEFT}" x2="{WIDE - 20}" y1="{down:.1f}" y2="{down:.1f}" style="stroke:var(--line)"/>'
        text = f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}"
        yield f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{text}</text>'
    for k, curve in enumerate(curves.values()):
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in curve))
        yield f'<polyline points="{line}" style="fill:none;stroke:var(--c{k % 10});stroke-width:2"/>'
