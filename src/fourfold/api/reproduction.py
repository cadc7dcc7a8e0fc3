"""The papers' experiments, rerun."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.reproduce.study import Reproduction

Progress = Callable[[str, int, int], None]


def rerun(paper: str, *, runs: bool = True, progress: Progress = lambda words, done, total: None) -> Reproduction:
    """A paper's experiment beside its figures. `runs`: also what needs ranks, some minutes, and root for slow links."""
    study: Reproduction = import_module(f"fourfold.reproduce.{paper}").reproduce(progress, runs=runs)
    return study
