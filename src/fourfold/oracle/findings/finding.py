"""What a finding is, what it is derived from, and the thresholds above which it is reported.

A limit bounds what the plan can hold or how far its splits go; a bottleneck is where its step goes. The names are those of
ParaDL's list (arXiv 2104.09075, section on limitations and bottlenecks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fourfold.oracle.memory.peak import Memory
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import Estimate
from fourfold.oracle.time.items import Category, Item
from fourfold.plans.lists.lowered_plan import LoweredPlan, LoweredStage

EXCHANGE_SHARE = 0.1
"""Of the step: gradient exchange, layer exchange, halos and waiting for other stages are named from here on. Chosen, not
measured: less than a tenth of a step gains little when it is gone. So are all thresholds below."""
CONGESTION_SHARE = 0.05
"""Of the step: what groups lose because others use the same links at the same time. Chosen."""
UPDATE_SHARE = 0.1
"""Weight update over compute. Chosen, just under the 11 to 13 % that ParaDL found worth naming."""
IMBALANCE = 1.1
"""The slowest stage over the mean of all. Chosen."""
SHRINKING = 1.2
"""Seconds of all ranks in split kernels over those of the whole kernels. Chosen: what launches and small shapes cost always
stays below."""
REPLICATED_SHARE = 0.05
"""Of the compute: what ranks do that others do too. Chosen."""
MEMORY_SHARE = 0.25
"""Of a rank's peak: bytes that other ranks hold too. Chosen."""
FRAGMENTED_SHARE = 0.05
"""Of a rank's peak: bytes lost to an allocator's rounding. Chosen."""
HEADROOM = 2
"""A split is at its limit when an axis so many times as long would leave a rank without work. Chosen: ranks are mostly
doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One limit or bottleneck of a plan: a stable name, the layer, stage, axis or rank, a line for people, its numbers (SI)."""

    name: str
    kind: Literal["limit", "bottleneck"]
    where: str
    text: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class FindingContext:
    """A lowered plan with its estimate and memory."""

    lowered: LoweredPlan
    prices: Prices
    estimate: Estimate
    memory: Memory
    optimizer: str = "sgd"

    @property
    def step(self) -> float:
        return self.estimate.step_seconds

    @property
    def parts(self) -> tuple[LoweredStage, ...]:
        return self.lowered.parts

    @property
    def microbatches(self) -> int:
        return self.lowered.plan.microbatches

    def items(self, part: LoweredStage) -> list[tuple[Item, int]]:
        """The items of a stage, and how often a step does each."""
        often = {"F": self.microbatches, "B": self.microbatches, "sums": 1}
        return [(item, times) for kind, times in often.items() for item in self.estimate.items[part.index, kind]]

    def exposed_share(self, category: Category) -> float:
        """The share of an exchange category that the step waits for; the rest overlaps with compute."""
        sent = sum(item.seconds * times for part in self.parts for item, times in self.items(part) if item.category == category)
        return min(self.estimate.breakdown[category] / sent, 1.0) if sent else 0.0

    def stage(self, part: LoweredStage) -> str:
        return f"stage {part.index}" if len(self.parts) > 1 else "each rank"


def layer_of(part: LoweredStage, label: str) -> str:
    """The layer an item's label means: a parameter's name in the module, or the op that makes the value."""
    for parameter in part.graph.parameters:
        if parameter.name == label:
            return parameter.key
    maker = part.graph.producer.get(label)
    return maker.path if maker is not None else label
