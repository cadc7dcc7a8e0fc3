"""The planner's input and output: a search task, and a ranking of predicted plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fourfold.cluster import Cluster
from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.predict import Prediction
from fourfold.oracle.prices.prices import Prices
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.spec.plan import SPLITS
from fourfold.units import bytes_text

AUTO = "auto"

Measure = Callable[[Sequence[LoweredPlan]], Prices]
"""Times the kernels of some lowered plans that no table has, and gives prices that know them."""


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """A model, a batch and a cluster to plan for, and restrictions.

    `strategies`: only these named ones (``auto``: what the planner finds); none: all. `fixed`: patterns of ops and the split
    they shall have on some axis. `limit`: seconds after which the best so far is the answer.
    """

    graph: Graph
    batch: int
    setting: Setting
    strategies: tuple[str, ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()
    limit: float = float("inf")
    measure: Measure | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidInput(f"the batch is {self.batch}; it must be at least 1")
        if self.graph.batch is not None and self.graph.batch != self.batch:
            raise InvalidInput(
                f"the model fixes its batch at {self.graph.batch}, {self.batch} is asked for; use {self.graph.batch}"
            )
        if self.limit <= 0:
            raise InvalidInput(f"--time-limit {self.limit:g}; give it more than 0 seconds")
        for pattern, split in self.fixed:
            if split not in SPLITS and not split.startswith("domain:"):
                raise InvalidInput(f"--fix {pattern}={split}: unknown split; use one of {', '.join(SPLITS)} or domain:<i>")

    @property
    def cluster(self) -> Cluster:
        return self.setting.cluster

    @property
    def devices(self) -> int:
        return self.cluster.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A strategy that cannot be used, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Plans, the best first, then the others by their steps, whether they fit or not; strategies that cannot be; notes."""

    task: SearchTask
    candidates: tuple[Prediction, ...]
    refusals: tuple[Refusal, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction | None:
        """The fastest that fits; within 1 %, the plan with less machinery."""
        return self.candidates[0] if self.candidates and self.candidates[0].feasible else None

    def nearest(self) -> str:
        """Where nothing fits, what comes nearest to it, and what would help, in a line."""
        if not self.candidates:
            first = self.refusals[0] if self.refusals else None
            return f"{first.strategy}: {first.reason}" if first is not None else "nothing was tried"
        closest = min(self.candidates, key=lambda c: c.excess_bytes)
        limit = next(finding for finding in closest.findings if finding.name == "memory-capacity")
        name = f"{closest.plan.strategy} on {closest.plan.mesh}"
        return f"{name} comes nearest, {bytes_text(closest.excess_bytes)} over: {limit.text}"
