"""The command that says why a plan is as it is, what limits it, and what would change it."""

from __future__ import annotations

from fourfold.cli.console import Console
from fourfold.cli.options import Cluster, Json, Planned, PlanOptimizer, PlanPath, PlanPrecision


def explain(
    file: PlanPath,
    model: Planned = None,
    cluster: Cluster = None,
    precision: PlanPrecision = None,
    optimizer: PlanOptimizer = None,
    as_json: Json = False,
) -> None:
    """Why this plan: against what it was chosen, layer by layer, what limits it, and what would change it."""
    console = Console(json=as_json)
    with console.working(f"reading {file}") as say:
        from fourfold.api.explanation import explain_priced, price_plan, request_plan
        from fourfold.api.settings import freeze_gc
        from fourfold.report.explain import explanation_record, explanation_text

        request = request_plan(file, cluster=cluster, precision=precision, optimizer=optimizer)
        priced = price_plan(request, model)
        freeze_gc()
        result = explain_priced(priced, say)
    name, explanation = result.model, result.explanation
    console.answer(explanation_record(explanation, model=name), lambda: explanation_text(explanation, model=name))
