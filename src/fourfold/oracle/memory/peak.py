"""Peak bytes of a training step on every rank of a lowered plan: each rank's action list replayed with sizes alone.

What counts is what `runs.measured_memory` measures: memory of torch's allocator, and a rank's share of memory that ranks of a
host have in common. Ranks whose shards have the same sizes are replayed once.

Left out, because they are small or not the allocator's: single numbers, buffers of gloo and of the interpreter, the counting
of samples that some losses divide by, and sums over tied parameters. Assumed: cuDNN's workspaces (`gpu`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.oracle.memory.device_rules import CPU, CUDA, DeviceRules
from fourfold.oracle.memory.forward import OpMemoryCache
from fourfold.oracle.memory.rank import Peak, RankReplay
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.plans.spec.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks of all ranks, those with equal shards together."""

    peaks: tuple[Peak, ...]

    @property
    def heaviest(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.bytes)

    def of(self, rank: int) -> Peak:
        return next(peak for peak in self.peaks if rank in peak.ranks)


def memory(
    lowered: LoweredPlan, placement: Placement, *, optimizer: str = "sgd", machine: DeviceRules = CPU, precision: str = "fp32"
) -> Memory:
    """The predicted peak of each rank in one training step."""
    cache, peaks = OpMemoryCache(), []
    for ranks in _rank_classes(lowered):
        replay = RankReplay(
            lowered, ranks[0], placement=placement, machine=machine, optimizer=optimizer, precision=precision, cache=cache
        )
        peaks.append(replay.peak(ranks))
    return Memory(peaks=tuple(peaks))


def _rank_classes(lowered: LoweredPlan) -> Iterator[tuple[int, ...]]:
    """Sets of ranks whose shards have the same sizes in all their stages."""
    for place in lowered.places:
        parts = [part for part in lowered.parts if part.stage.ranks == place]
        programs = [program for part in parts for program in part.programs.values()]
        for members in rank_classes(parts[0].stage.mesh, programs):
            yield tuple(place[member] for member in members)


__all__ = ["CPU", "CUDA", "DeviceRules", "Memory", "Peak", "memory"]
