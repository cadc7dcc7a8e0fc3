"""The figures of one predicted step, without the program they were made from: what tables and scripts are given.

`predicted` is the door for whoever names a cluster, a precision, an optimizer and a cost model: Fourfold's own, which replays
the program, or ParaDL's formulas, which know no interval, no timeline and no stages' peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fourfold.cluster import Cluster
from fourfold.oracle.paradl.formulas import FORMULAS, Projection
from fourfold.oracle.paradl.projection import projected
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.prices import Prices, Source
from fourfold.oracle.time.items import Category
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.strategies.named import STRATEGIES
from fourfold.timeline import Timeline
from fourfold.units import bytes_text

CostModel = Literal["fourfold", "paradl"]
COST_MODELS: tuple[CostModel, ...] = get_args(CostModel)
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is predicted for, and by what."""

    prices: Prices
    optimizer: str = "sgd"
    model: CostModel = "fourfold"

    @property
    def cluster(self) -> Cluster:
        return self.prices.cluster

    def on(self, cluster: Cluster) -> Setting:
        """The same on another cluster."""
        return replace(self, prices=self.prices.on(cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSummary:
    """A plan's step. `capacity_bytes`: of the rank that comes nearest to its device's memory, or past it."""

    step_seconds: float
    breakdown: Mapping[Category, float]
    peak_bytes: int
    capacity_bytes: int
    feasible: bool
    limits: tuple[str, ...]  # what stops the plan first, then what holds it up
    interval: tuple[float, float] | None = None
    stage_peaks: tuple[int, ...] = ()  # of each stage, the heaviest rank's
    known_from: Mapping[Source, float] = field(default_factory=dict)  # shares of the compute seconds
    timeline: Timeline | None = None
    places: tuple[tuple[int, ...], ...] = ()  # ranks that share a lane of the timeline


def strategies_of(model: CostModel) -> tuple[str, ...]:
    """The named strategies a cost model knows."""
    return tuple(name for name in STRATEGIES if model == "fourfold" or name in FORMULAS)


def predicted(lowered: LoweredPlan, setting: Setting) -> CostSummary:
    """A lowered plan's step, limits and bottlenecks included."""
    if setting.model == "paradl":
        found = projected(lowered.graph, lowered.plan, setting.prices, optimizer=setting.optimizer)
        return _by_formulas(found, lowered.plan.notes)
    return summary_of(predict(lowered, setting.prices, optimizer=setting.optimizer))


def summary_of(prediction: Prediction) -> CostSummary:
    """A predicted step as figures, limits and bottlenecks included."""
    found, lowered = prediction.estimate, prediction.lowered
    return CostSummary(
        step_seconds=found.step_seconds,
        breakdown=found.breakdown,
        peak_bytes=prediction.peak_bytes,
        capacity_bytes=int(prediction.capacity),
        feasible=prediction.feasible,
        limits=(*(finding.text for finding in prediction.findings), *lowered.plan.notes),
        interval=found.interval,
        stage_peaks=_stage_peaks(prediction),
        known_from=_known_from(prediction),
        timeline=found.timeline,
        places=lowered.places,
    )


def _stage_peaks(prediction: Prediction) -> tuple[int, ...]:
    peaks = [(peak.bytes, frozenset(peak.ranks)) for peak in prediction.memory.peaks]
    return tuple(
        max(size for size, ranks in peaks if not ranks.isdisjoint(part.stage.ranks)) for part in prediction.lowered.parts
    )


def _known_from(prediction: Prediction) -> dict[Source, float]:
    """How much of the compute seconds comes from measured kernels, from fitted curves, from the roofline."""
    items = [item for parts in prediction.estimate.items.values() for item in parts if item.category == "compute"]
    every = sum(item.seconds for item in items) or 1.0
    return {source: sum(item.seconds for item in items if item.source == source) / every for source in SOURCES}


def _by_formulas(found: Projection, notes: tuple[str, ...]) -> CostSummary:
    return CostSummary(
        step_seconds=found.step_seconds,
        breakdown=found.breakdown,
        peak_bytes=int(found.memory_bytes),
        capacity_bytes=int(found.capacity_bytes),
        feasible=found.feasible,
        limits=(*_stops(found), *notes),
    )


def _stops(found: Projection) -> Iterator[str]:
    if found.memory_bytes > found.capacity_bytes:
        yield (
            f"by ParaDL's formulas a device needs {bytes_text(found.memory_bytes)}, it holds "
            f"{bytes_text(found.capacity_bytes)}; use more devices or a smaller batch"
        )
    if found.devices > found.limit:
        yield (
            f"by ParaDL's formulas {found.strategy} goes to {found.limit:g} devices ({found.limited_by}), {found.devices} "
            "are asked for; use fewer or another strategy"
        )
