"""The command that says why a plan is as it is, what limits it, and what would change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.options import Cluster, Json, priced, setting, settle
from fourfold.cli.voice import Voice
from fourfold.errors import InvalidInput

if TYPE_CHECKING:
    from fourfold.plans import Plan

FILE = "A plan file, as `fourfold plan -o` writes it."


def explain(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help=FILE, show_default=False)],
    cluster: Cluster = None,
    precision: Annotated[str | None, typer.Option("--precision", help="By default the plan's.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="By default the plan's.")] = None,
    as_json: Json = False,
) -> None:
    """Why this plan: against what it was chosen, layer by layer, what limits it, and what would change it."""
    voice = Voice(json=as_json)
    with voice.working(f"reading {file}") as say:
        from fourfold.cli.sketch import sketch
        from fourfold.planner import Task, search
        from fourfold.planner.explain import explained
        from fourfold.planner.search import replayed
        from fourfold.plans import load_plan
        from fourfold.report.explain import explanation_record, explanation_text

        plan = load_plan(file)
        made = judged_for(file, plan, cluster, precision, optimizer)
        say(f"capturing {plan.model}")
        seen = sketch(plan.model, batch=plan.batch)
        plan.check(seen.graph)
        asked_for = setting(made["cluster"], plan.size, made["precision"], made["optimizer"], "fourfold")
        settle()
        task = Task(graph=priced(seen.graph, asked_for), batch=plan.batch, setting=asked_for)
        told = explained(search(task, say), replayed(task, plan), say)
    voice.answer(explanation_record(told, model=plan.model), lambda: explanation_text(told, model=plan.model))


def judged_for(file: Path, plan: Plan, cluster: str | None, precision: str | None, optimizer: str | None) -> dict[str, Any]:
    """What the plan is judged for: as it was made, unless something else is asked."""
    if not plan.model:
        raise InvalidInput(f"{file} names no model; write it with `fourfold plan -o`")
    known = json.loads(file.read_text()).get("made_for") or {}
    asked = {"cluster": cluster, "precision": precision, "optimizer": optimizer}
    given = {key: value for key, value in asked.items() if value is not None}
    out = {"precision": "fp32", "optimizer": "sgd", **known, **given}
    if "cluster" not in out:
        raise InvalidInput(f"{file} does not say for which cluster it was made; name a --cluster")
    return out
