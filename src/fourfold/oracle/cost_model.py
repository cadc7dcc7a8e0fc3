"""Two cost models behind one function: `forecast` predicts a plan by Fourfold's replay or by ParaDL's formulas.

Reports read the same fields of either result. ParaDL's formulas know no interval, no timeline and no peaks of stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from fourfold.cluster import Cluster
from fourfold.oracle.paradl.formulas import FORMULAS, Projection
from fourfold.oracle.paradl.projection import projected
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.prices import Prices
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.strategies.named import STRATEGIES

CostModel = Literal["fourfold", "paradl"]
COST_MODELS: tuple[CostModel, ...] = get_args(CostModel)
Forecast = Prediction | Projection


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The cluster's prices, the optimizer and the cost model that a plan is predicted with."""

    prices: Prices
    optimizer: str = "sgd"
    model: CostModel = "fourfold"

    @property
    def cluster(self) -> Cluster:
        return self.prices.cluster

    def on(self, cluster: Cluster) -> Setting:
        """The same on another cluster."""
        return replace(self, prices=self.prices.on(cluster))


def strategies_of(model: CostModel) -> tuple[str, ...]:
    """The named strategies a cost model knows."""
    return tuple(name for name in STRATEGIES if model == "fourfold" or name in FORMULAS)


def forecast(lowered: LoweredPlan, setting: Setting) -> Forecast:
    """The step of a lowered plan by the setting's cost model."""
    if setting.model == "paradl":
        return projected(lowered.graph, lowered.plan, setting.prices, optimizer=setting.optimizer)
    return predict(lowered, setting.prices, optimizer=setting.optimizer)
