"""Plans for a model on a cluster: found by the search, or that of a named strategy, both with their predicted step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.api.settings import LOCAL, priced_graph, setting_of
from fourfold.cluster import Cluster
from fourfold.errors import Infeasible, InvalidInput
from fourfold.oracle.cost_model import Forecast, Setting, forecast
from fourfold.oracle.predict import predict
from fourfold.planner import Ranking, SearchTask, search
from fourfold.planner.search_task import Measure
from fourfold.plans import LoweredPlan, Options, Plan, lower_plan, named
from fourfold.plans.spec.schedule import FUSED
from fourfold.plans.strategies.named import parse
from fourfold.workload.graph_cache import model_graph
from fourfold.workload.model_graph import ModelGraph

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fourfold.graph.capture import Inputs, Loss
    from fourfold.workload.workload import Workload

__all__ = [
    "Forecast",
    "PlanRanking",
    "Setting",
    "StrategyPlan",
    "graph_of",
    "parse",
    "plan",
    "plan_strategy",
    "search_plans",
]

SHOWN = 8  # plans of a ranking

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """The plan of a named strategy, lowered, and its cost; None where it is not priced: no setting, or a schedule that can
    only be planned. `ranking`: its replay, where it was replayed."""

    plan: Plan
    lowered: LoweredPlan
    setting: Setting | None
    cost: Forecast | None
    ranking: Ranking | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlanRanking:
    """Plans that fit, best first. `ranking`: all that were priced, with their predictions; printed, its table."""

    candidates: tuple[Plan, ...]
    ranking: Ranking | None = None

    @property
    def best(self) -> Plan:
        """The best plan; raises `Infeasible` where none fits."""
        if not self.candidates:
            raise Infeasible(f"no plan fits: {self.ranking.nearest() if self.ranking is not None else 'none was priced'}")
        return self.candidates[0]

    def __str__(self) -> str:
        from fourfold.report.ranking import ranking_text
        from fourfold.report.text import console

        if self.ranking is None:
            return "\n".join(f"{plan.strategy} on {plan.mesh}" for plan in self.candidates)
        with (page := console()).capture() as text:
            page.print(ranking_text(self.ranking, model="the model", top=SHOWN))
        return text.get()


def plan(
    model: str | nn.Module | Workload,
    inputs: Inputs | None = None,
    *,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    devices: int,
    batch: int | None = None,
    cluster: str | Cluster = LOCAL,
    precision: str = "fp32",
    optimizer: str = "sgd",
    strategy: str | None = None,
    options: Options | None = None,
    fixed: Mapping[str, str] | None = None,
    time_limit: float | None = None,
) -> PlanRanking:
    """The best plans for a model on a cluster (a preset, a TOML file, ``local`` or a `Cluster`) or, if `strategy` names one,
    the plan of that strategy; each with its predicted step.

    `model` is a module with its `inputs`, a MODEL text of the command line, or a `Workload`; module and tensors may be on
    meta. `fixed` maps patterns of ops to the split they shall have, `time_limit` ends the search: both belong to a search,
    `options` to a strategy.
    """
    _check_arguments(strategy, options=options, fixed=fixed, time_limit=time_limit)
    setting = setting_of(cluster, devices, precision=precision, optimizer=optimizer)
    if strategy is not None:
        parse(strategy)
    source = graph_of(model, inputs, targets=targets, loss=loss, batch=batch)
    if strategy is None:
        limit = time_limit if time_limit is not None else float("inf")
        found = search_plans(source, setting, fixed=tuple((fixed or {}).items()), limit=limit)
        fitting = [c.plan for c in found.candidates[:SHOWN] if c.feasible]
        return PlanRanking(candidates=tuple(source.adopted(each, found.task.graph) for each in fitting), ranking=found)
    made = plan_strategy(source, strategy, devices, setting=setting, options=options)
    fits = made.cost is None or made.cost.feasible
    return PlanRanking(candidates=(made.plan,) if fits else (), ranking=made.ranking)


def _check_arguments(
    strategy: str | None, *, options: Options | None, fixed: Mapping[str, str] | None, time_limit: float | None
) -> None:
    """Refuse arguments that would not act."""
    if strategy is None and options is not None:
        raise InvalidInput("options= belongs to a strategy; pass strategy=, or leave options to the search")
    for name, value in (("fixed", fixed), ("time_limit", time_limit)):
        if strategy is not None and value is not None:
            raise InvalidInput(f"{name}= is for the search; leave {name} or strategy out")


def graph_of(
    model: str | nn.Module | Workload,
    inputs: Inputs | None = None,
    *,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    batch: int | None = None,
) -> ModelGraph:
    """The graph of a MODEL text (cached for built-in models), of a workload, or of a module with its inputs."""
    if isinstance(model, str):
        if inputs is not None or targets or loss is not None:
            raise InvalidInput(f"'{model}' names its own inputs, targets and loss; leave them out, or pass a module")
        return model_graph(model, batch=batch)
    from fourfold.workload.workload import Workload

    if isinstance(model, Workload):
        if inputs is not None or targets or loss is not None:
            raise InvalidInput("a Workload holds its own inputs, targets and loss; leave them out, or pass a module")
        return model.model_graph.with_batch(batch)
    if inputs is None:
        raise InvalidInput("inputs= is missing; pass a tuple or dict of tensors with a module, or a MODEL text")
    return Workload.of(model, inputs, targets=targets, loss=loss).model_graph.with_batch(batch)


def search_plans(
    source: ModelGraph,
    setting: Setting,
    *,
    fixed: tuple[tuple[str, str], ...] = (),
    limit: float = float("inf"),
    measure: bool = False,
    say: Say = lambda text: None,
) -> Ranking:
    """All plans the search considers, best first. `measure`: time kernels of the best plans on as many local ranks, or on
    torchrun's, and search again."""
    with _kernel_timing(setting, measure) as timing:
        task = SearchTask(
            graph=priced_graph(source.graph, setting),
            batch=source.batch,
            setting=setting,
            fixed=fixed,
            limit=limit,
            measure=timing,
        )
        return search(task, say)


@contextmanager
def _kernel_timing(setting: Setting, measure: bool) -> Iterator[Measure | None]:
    """How the search times kernels; None if it does not."""
    if not measure:
        yield None
        return
    from fourfold.calibrate.measured_prices import timing
    from fourfold.runtime.rank_pool import rank_pool

    device = setting.cluster.device(0)
    kind, shared = ("auto", device.cores > 0) if device.kind == "gpu" else ("cpu", False)
    with rank_pool(setting.cluster.size, device=kind, share_gpu=shared) as ranks:
        yield timing(setting.cluster, ranks, setting.prices.precision)


def plan_strategy(
    source: ModelGraph, strategy: str, devices: int, *, setting: Setting | None, options: Options | None = None
) -> StrategyPlan:
    """The plan of a named strategy and its cost in a setting, where there is one."""
    begun = time.perf_counter()
    plan = source.plan(strategy, ranks=devices, options=options)
    lowered = lower_plan(source.graph, plan)
    cost: Forecast | None = None
    ranking: Ranking | None = None
    if setting is not None and plan.schedule not in FUSED:
        graph, priced = priced_graph(source.graph, setting), lowered
        if graph is not source.graph:
            priced = lower_plan(graph, named(strategy, graph, ranks=devices, batch=source.batch, options=options))
        if setting.model == "fourfold":
            ranking = _ranking_of_one(priced, setting, begun)
            cost = ranking.candidates[0]
        else:
            cost = forecast(priced, setting)
    seconds = time.perf_counter() - begun
    return StrategyPlan(plan=plan, lowered=lowered, setting=setting, cost=cost, ranking=ranking, seconds=seconds)


def _ranking_of_one(lowered: LoweredPlan, setting: Setting, begun: float) -> Ranking:
    """A lowered plan replayed, as a ranking of this plan alone."""
    plan = lowered.plan
    task = SearchTask(graph=lowered.graph, batch=plan.batch, setting=setting, strategies=(plan.strategy,))
    candidate = predict(lowered, setting.prices, optimizer=setting.optimizer)
    return Ranking(task=task, candidates=(candidate,), refusals=(), seconds=time.perf_counter() - begun)
