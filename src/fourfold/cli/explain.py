"""The command that says why a plan is as it is, what limits it, and what would change it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import Cluster, Json, Planned, freeze_gc, priced, setting
from fourfold.errors import InvalidInput

FILE = "A plan file, as `fourfold plan -o` writes it."


def explain(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help=FILE, show_default=False)],
    model: Planned = None,
    cluster: Cluster = None,
    precision: Annotated[str | None, typer.Option("--precision", help="By default the plan's.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="By default the plan's.")] = None,
    as_json: Json = False,
) -> None:
    """Why this plan: against what it was chosen, layer by layer, what limits it, and what would change it."""
    voice = Console(json=as_json)
    with voice.working(f"reading {file}") as say:
        from fourfold.planner import SearchTask, search
        from fourfold.planner.explain import explained
        from fourfold.planner.search import replay_plan
        from fourfold.plans.spec.plan_file import read_plan
        from fourfold.report.explain import explanation_record, explanation_text
        from fourfold.workload.graph_cache import graph_of_plan

        plan, made_for = read_plan(file)
        made = judged_for(file, made_for, cluster, precision, optimizer)
        graph, name = graph_of_plan(file, plan, model)
        asked_for = setting(made["cluster"], plan.size, made["precision"], made["optimizer"], "fourfold")
        freeze_gc()
        task = SearchTask(graph=priced(graph, asked_for), batch=plan.batch, setting=asked_for)
        told = explained(search(task, say), replay_plan(task, plan), say)
    voice.answer(explanation_record(told, model=name), lambda: explanation_text(told, model=name))


def judged_for(
    file: Path, made_for: Mapping[str, str], cluster: str | None, precision: str | None, optimizer: str | None
) -> dict[str, str]:
    """What the plan is judged for: as it was made, unless something else is asked."""
    asked = {"cluster": cluster, "precision": precision, "optimizer": optimizer}
    given = {key: value for key, value in asked.items() if value is not None}
    out = {"precision": "fp32", "optimizer": "sgd", **made_for, **given}
    if "cluster" not in out:
        raise InvalidInput(f"{file} does not say for which cluster it was made; name a --cluster")
    return out
