"""Files that are written for the caller: places checked before the work for them is done, plans with their graphs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.errors import InvalidInput

if TYPE_CHECKING:
    from fourfold.graph import Graph
    from fourfold.plans import Plan


def check_place(path: Path | None) -> None:
    """Refuse a file that cannot be written before the work for it is done."""
    if path is not None and not path.parent.is_dir():
        raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise InvalidInput(f"cannot write {path}: it is a folder; name a file in it")


def write_plan(plan: Plan, graph: Graph, path: Path, *, made_for: Mapping[str, str] | None) -> None:
    """Write a plan, and keep its graph where `explain` and `report` look for it."""
    from fourfold.plans import save_plan
    from fourfold.workload.graph_cache import cache_graph

    save_plan(plan, path, made_for=made_for)
    with suppress(InvalidInput):  # a cache that cannot be written to: they ask for the model then
        cache_graph(graph)
