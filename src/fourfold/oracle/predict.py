"""Everything the oracle says of one lowered plan on one cluster: time, memory, whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from fourfold.cluster import Cluster
from fourfold.oracle.findings.limits import Finding, findings
from fourfold.oracle.memory.peak import CPU, CUDA, Memory, memory
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import Estimate, estimate
from fourfold.plans.lists.lowered_plan import LoweredPlan


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's step on a cluster. `capacity`: bytes of the rank that comes nearest to its device's memory, or past it."""

    cluster: Cluster
    estimate: Estimate
    memory: Memory
    tightest: int  # a rank
    capacity: float
    lowered: LoweredPlan = field(repr=False)
    prices: Prices = field(repr=False)
    optimizer: str = "sgd"

    @property
    def peak_bytes(self) -> int:
        """The most bytes any rank has alive."""
        return self.memory.heaviest.bytes

    @property
    def feasible(self) -> bool:
        return self.memory.of(self.tightest).bytes <= self.capacity

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Limits and bottlenecks, worked out when first asked for."""
        return findings(self.lowered, self.prices, self.estimate, self.memory, optimizer=self.optimizer)


def predict(lowered: LoweredPlan, prices: Prices, *, optimizer: str = "sgd") -> Prediction:
    """The predicted step of a plan: how long, how many bytes."""
    return sized(lowered, prices, estimate(lowered, prices, optimizer=optimizer), optimizer=optimizer)


def sized(lowered: LoweredPlan, prices: Prices, timed: Estimate, *, optimizer: str) -> Prediction:
    """A plan whose step was estimated, with its memory."""
    cluster = prices.cluster
    machine = CPU if cluster.device(0).kind == "cpu" else CUDA
    found = memory(lowered, prices.placement, optimizer=optimizer, machine=machine, precision=prices.precision)
    smallest = [min(peak.ranks, key=cluster.memory) for peak in found.peaks]  # of ranks alike, the one with least memory
    tightest = max(smallest, key=lambda rank: found.of(rank).bytes / cluster.memory(rank))
    return Prediction(
        cluster=cluster,
        estimate=timed,
        memory=found,
        tightest=tightest,
        capacity=cluster.memory(tightest),
        lowered=lowered,
        prices=prices,
        optimizer=optimizer,
    )
