"""What a reproduction says: tables, and expectations that hold or do not, each with how sure the paper's figure is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Mark = Literal["read", "recomputed", "remembered", "unknown"]
"""How sure a paper's figure is: read in the authors' text or tables; recomputed from their formulas; remembered or rederived
(the structure trusted, constants not); unknown."""

Progress = Callable[[str, int, int], None]
"""Hears what is done next, how much is done, and of how much."""


def silent(words: str, done: int, of: int) -> None:
    """Tells nobody."""


class Steps:
    """Numbers the steps that are reported."""

    def __init__(self, progress: Progress, of: int) -> None:
        self.progress, self.of, self.done = progress, of, 0

    def __call__(self, words: str) -> None:
        self.progress(words, self.done, self.of)
        self.done += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a head. `plot`: columns of numbers to draw, the first along x."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    plot: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # curves by name

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "title": self.title,
            "head": list(self.head),
            "rows": [list(row) for row in self.rows],
            "note": self.note,
            "plot": {name: [list(point) for point in curve] for name, curve in self.plot.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Something that should come out, and whether it did. `chief`: one of the few that a summary names."""

    what: str
    ours: str
    paper: str
    mark: Mark
    holds: bool
    chief: bool = False


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One paper rerun."""

    name: str
    title: str
    tables: tuple[Table, ...]
    expectations: tuple[Expectation, ...]
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return all(e.holds for e in self.expectations)

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "title": self.title,
            "holds": self.holds,
            "expectations": [
                {"what": e.what, "ours": e.ours, "paper": e.paper, "mark": e.mark, "holds": e.holds, "chief": e.chief}
                for e in self.expectations
            ],
            "tables": [table.record() for table in self.tables],
            "notes": list(self.notes),
        }


def close_to(
    what: str, ours: float, paper: float, *, within: float, mark: Mark, digits: int = 3, chief: bool = False
) -> Expectation:
    """A number that should be as near as this, relative."""
    holds = abs(ours - paper) <= within * abs(paper)
    return Expectation(
        what=f"{what}, within {within:.0%}",
        ours=f"{ours:.{digits}g}",
        paper=f"{paper:.{digits}g}",
        mark=mark,
        holds=holds,
        chief=chief,
    )


def at_least(
    what: str, ours: float, least: float, *, mark: Mark, digits: int = 3, unit: str = "", chief: bool = False
) -> Expectation:
    """A number that should not be smaller."""
    return Expectation(
        what=f"{what}, at least",
        ours=f"{ours:.{digits}g}{unit}",
        paper=f"{least:.{digits}g}{unit}",
        mark=mark,
        holds=ours >= least,
        chief=chief,
    )
