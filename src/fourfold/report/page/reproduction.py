"""A reproduction for a terminal and as a page: its tables and curves, and what was expected beside what came out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fourfold.report.page.html_file import html_file
from fourfold.report.text import _table
from fourfold.reproduce.study import Reproduction, Table

MARKS = {
    "read": "read in the authors' text or tables",
    "recomputed": "recomputed from the paper's formulas",
    "remembered": "remembered or rederived: the structure is trusted, constants are not",
    "unknown": "the paper's figure is not known",
}


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
    """One HTML file with everything in it. What is shown is worked out here, how it is drawn in `reproduction.js`."""
    expected = Table(
        title="What was expected",
        head=("expected", "ours", "paper", "the paper's figure is", ""),
        rows=tuple(
            (e.what, e.ours, e.paper, MARKS[e.mark], "holds" if e.holds else "does not hold") for e in reproduction.expectations
        ),
    )
    tables = [table.record() for table in (*reproduction.tables, expected)]
    return html_file("reproduction", {"title": reproduction.title, "tables": tables, "notes": list(reproduction.notes)})
