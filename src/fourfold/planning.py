"""`ff.plan`: from a module and a cluster to plans, best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fourfold.calibrate.kernel_table import known_prices
from fourfold.cluster import LOCAL, Cluster, Precision, cluster_named
from fourfold.errors import Infeasible
from fourfold.graph.autocast import as_computed
from fourfold.graph.capture import Inputs, Loss, batch_of, capture
from fourfold.oracle.cost_model import Setting
from fourfold.planner import Ranking, SearchTask, search
from fourfold.plans import Options, Plan, named
from fourfold.report.ranking import ranking_text
from fourfold.report.text import console
from fourfold.workload.plan_inputs import signed

SHOWN = 8  # plans of a ranking


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Plans in order of preference. `found`: what the planner says of them, where it was asked; printed, its table."""

    candidates: tuple[Plan, ...]
    found: Ranking | None = None

    @property
    def best(self) -> Plan:
        if not self.candidates:
            raise Infeasible(f"no plan fits: {self.found.nearest() if self.found is not None else 'none was made'}")
        return self.candidates[0]

    def __str__(self) -> str:
        if self.found is None:
            return "\n".join(f"{plan.strategy} on {plan.mesh}" for plan in self.candidates)
        with (page := console()).capture() as text:
            page.print(ranking_text(self.found, model="the model", top=SHOWN))
        return text.get()


def plan(
    model: nn.Module,
    inputs: Inputs,
    *,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    strategy: str | None = None,
    devices: int,
    batch: int | None = None,
    options: Options | None = None,
    cluster: str | Cluster = LOCAL,
    precision: Precision = "fp32",
    optimizer: str = "sgd",
    fixed: Mapping[str, str] | None = None,
    time_limit: float | None = None,
) -> Plans:
    """The best plans for a model on a cluster (a preset, a TOML file, ``local`` or a `Cluster`) or, if one is named, the plan
    of a strategy. `fixed`: patterns of ops and the split they shall have. Module and tensors may be on meta."""
    graph = capture(model, inputs, targets, loss)
    size = batch or batch_of(inputs)
    if strategy is not None:
        chosen = named(strategy, graph, ranks=devices, batch=size, options=options)
        return Plans(candidates=(signed(chosen, inputs, targets),))
    where = cluster.sized(devices) if isinstance(cluster, Cluster) else cluster_named(cluster, devices=devices)
    setting = Setting(prices=known_prices(where, precision), optimizer=optimizer)
    told = as_computed(graph, precision, where.device(0).kind)
    task = SearchTask(
        graph=told, batch=size, setting=setting, fixed=tuple((fixed or {}).items()), limit=time_limit or float("inf")
    )
    found = search(task)
    fitting = [c.plan for c in found.candidates[:SHOWN] if c.feasible]
    return Plans(candidates=tuple(signed(replace(p, graph=graph.hash), inputs, targets) for p in fitting), found=found)
