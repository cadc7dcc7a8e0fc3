"""What the oracle predicts of one lowered plan on one cluster: time, memory, whether it fits, what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fourfold.oracle.findings.limits import Finding, findings
from fourfold.oracle.memory.peak import CPU, CUDA, Memory, memory
from fourfold.oracle.prices.prices import SOURCES, Prices, Source
from fourfold.oracle.time.estimate import Estimate, estimate
from fourfold.oracle.time.items import Category
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.spec.plan import Plan
from fourfold.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's step on a cluster. Memory and findings are computed on first use: a search compares most plans by time alone."""

    lowered: LoweredPlan = field(repr=False)
    prices: Prices = field(repr=False)
    optimizer: str
    estimate: Estimate = field(repr=False)

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    # --- time ---

    @property
    def step_seconds(self) -> float:
        return self.estimate.step_seconds

    @property
    def interval(self) -> tuple[float, float]:
        return self.estimate.interval

    @property
    def breakdown(self) -> Mapping[Category, float]:
        """Seconds of the step by category."""
        return self.estimate.breakdown

    @property
    def timeline(self) -> Timeline:
        return self.estimate.timeline

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share a lane of the timeline."""
        return self.lowered.places

    @property
    def known_from(self) -> dict[Source, float]:
        """Which share of the compute seconds comes from measured kernels, from fitted curves, from the roofline."""
        items = [item for parts in self.estimate.items.values() for item in parts if item.category == "compute"]
        every = sum(item.seconds for item in items) or 1.0
        return {source: sum(item.seconds for item in items if item.source == source) / every for source in SOURCES}

    # --- memory ---

    @cached_property
    def memory(self) -> Memory:
        device_rules = CPU if self.prices.cluster.device(0).kind == "cpu" else CUDA
        return memory(
            self.lowered,
            self.prices.placement,
            optimizer=self.optimizer,
            machine=device_rules,
            precision=self.prices.precision,
        )

    @cached_property
    def tightest(self) -> int:
        """The rank that comes nearest to its device's memory, or furthest past it."""
        cluster = self.prices.cluster
        smallest = [min(peak.ranks, key=cluster.memory) for peak in self.memory.peaks]  # of equal ranks, on the smallest device
        return max(smallest, key=lambda rank: self.memory.of(rank).bytes / cluster.memory(rank))

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once on any rank."""
        return self.memory.heaviest.bytes

    @property
    def stage_peaks(self) -> tuple[int, ...]:
        """Of each stage, the peak bytes of its heaviest rank."""
        peaks = [(peak.bytes, frozenset(peak.ranks)) for peak in self.memory.peaks]
        stages = (part.stage.ranks for part in self.lowered.parts)
        return tuple(max(size for size, ranks in peaks if not ranks.isdisjoint(stage)) for stage in stages)

    @property
    def capacity_bytes(self) -> float:
        """What the device of the tightest rank holds."""
        return self.prices.cluster.memory(self.tightest)

    @property
    def excess_bytes(self) -> float:
        """By how much the tightest rank is over its device's memory."""
        return max(self.memory.of(self.tightest).bytes - self.capacity_bytes, 0.0)

    @property
    def feasible(self) -> bool:
        return not self.excess_bytes

    # --- findings ---

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Limits first, then bottlenecks."""
        return findings(self.lowered, self.prices, self.estimate, self.memory, optimizer=self.optimizer)

    @property
    def limits(self) -> tuple[str, ...]:
        """The findings as text, and the plan's notes."""
        return (*(finding.text for finding in self.findings), *self.plan.notes)


def predict(lowered: LoweredPlan, prices: Prices, *, optimizer: str = "sgd") -> Prediction:
    """The predicted step of a plan."""
    timed = estimate(lowered, prices, optimizer=optimizer)
    return Prediction(lowered=lowered, prices=prices, optimizer=optimizer, estimate=timed)
