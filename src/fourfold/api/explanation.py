"""Why a plan is as it is, what limits it, and what would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.api.settings import priced_graph, setting_of
from fourfold.cluster import Cluster
from fourfold.errors import InvalidInput
from fourfold.planner import SearchTask, search
from fourfold.planner.explain import Explanation, explained
from fourfold.planner.search import replay_plan
from fourfold.plans import Plan
from fourfold.plans.spec.other_graph import transferred
from fourfold.plans.spec.plan_file import read_plan
from fourfold.workload.graph_cache import graph_of_plan

if TYPE_CHECKING:
    from fourfold.workload.workload import Workload

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan and what it is priced for. `place`: what messages call it."""

    plan: Plan
    place: Path
    cluster: str | Cluster
    precision: str
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan with its model's name and the search it is compared with. `plan`: as one of the graph that is priced."""

    request: PlanRequest
    plan: Plan
    model: str
    task: SearchTask


@dataclass(frozen=True, kw_only=True)
class PlanExplanation:
    """An explanation and the name of the model; printed, its text."""

    model: str
    explanation: Explanation

    def __str__(self) -> str:
        from fourfold.report.explain import explanation_text
        from fourfold.report.text import console

        with (page := console()).capture() as text:
            page.print(explanation_text(self.explanation, model=self.model))
        return text.get()


def explain(
    plan: Plan | Path | str,
    *,
    model: str | Workload | None = None,
    cluster: str | Cluster | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
) -> PlanExplanation:
    """Compare a plan with its rivals and search again with one thing changed. `plan` is a plan file or a `Plan`; cluster,
    precision and optimizer are by default those the file was made for, and the model's graph is by default looked up in the
    cache."""
    return explain_priced(price_plan(request_plan(plan, cluster=cluster, precision=precision, optimizer=optimizer), model))


def request_plan(
    plan: Plan | Path | str,
    *,
    cluster: str | Cluster | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
) -> PlanRequest:
    """A plan and what it is priced for: what its file says, unless an argument says otherwise."""
    place = Path("the plan") if isinstance(plan, Plan) else Path(plan)
    loaded, made_for = (plan, {}) if isinstance(plan, Plan) else read_plan(place)
    where = cluster if cluster is not None else made_for.get("cluster")
    if where is None:
        raise InvalidInput(f"{place} does not say for which cluster it was made; name a --cluster")
    return PlanRequest(
        plan=loaded,
        place=place,
        cluster=where,
        precision=precision if precision is not None else made_for.get("precision", "fp32"),
        optimizer=optimizer if optimizer is not None else made_for.get("optimizer", "sgd"),
    )


def price_plan(request: PlanRequest, model: str | Workload | None) -> PricedPlan:
    """The plan on its model's graph: of a MODEL text, of a workload, or from the cache."""
    plan = request.plan
    if model is None or isinstance(model, str):
        graph, name = graph_of_plan(request.place, plan, model)
    else:
        graph, name = model.graph, model.text or plan.model or f"graph {plan.graph}"
        plan.check(graph)
    setting = setting_of(request.cluster, plan.size, precision=request.precision, optimizer=request.optimizer)
    task = SearchTask(graph=priced_graph(graph, setting), batch=plan.batch, setting=setting)
    return PricedPlan(request=request, plan=transferred(plan, graph, task.graph), model=name, task=task)


def explain_priced(priced: PricedPlan, say: Say = lambda text: None) -> PlanExplanation:
    """The explanation of a plan whose graph is at hand."""
    ranking = search(priced.task, say)
    explanation = explained(ranking, replay_plan(priced.task, priced.plan), say)
    return PlanExplanation(model=priced.model, explanation=explanation)
