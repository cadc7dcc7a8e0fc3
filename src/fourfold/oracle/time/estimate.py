"""Time of a lowered plan on a cluster: its stages priced, its action lists replayed, the step broken down by category.

Every instant of the lane that ends last belongs to one category; waiting belongs to what it waits for. The interval is the
drift between whole runs of the machine plus half the spread of the items: in quadrature where they were measured, added up
where they come from curves or formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fourfold.cluster import Device
from fourfold.errors import Infeasible
from fourfold.graph.spec import item_bytes
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.prices.traffic import pair_kind
from fourfold.oracle.time.items import CATEGORIES, Category, Item, total
from fourfold.oracle.time.overlap import Overlap, overlap
from fourfold.oracle.time.replay import Lane, Machine, Replay, Work
from fourfold.oracle.time.stage import StagePrices
from fourfold.plans.lists.actions import GatherSlices
from fourfold.plans.lists.lowered_plan import LoweredPlan, LoweredStage
from fourfold.plans.lists.rank_schedule import UNTIMED
from fourfold.plans.lists.stage_transfer import sizes
from fourfold.plans.spec.schedule import FUSED
from fourfold.timeline import Event, Timeline

DRIFT = 0.05
"""How far the median step of one run may lie from another's, relative: assumed where no calibration has measured it."""
SHARED_DRIFT = 0.12
"""The least of it on processors: calibrations take a minute, shared machines stray over many. The same work taken for four
seconds at a time, again and again, strayed by 8.5, 8.5, 8.7 and 21 % by its kind (benchmarks/results/2026-11-15-drift.txt):
this is their mean."""
LAST = "L"
"""The kind under which the items of a stage's last backward are kept: the one that completes gradients."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted time of one step."""

    step_seconds: float
    interval: tuple[float, float]
    breakdown: Mapping[Category, float]
    timeline: Timeline
    measured_share: float  # of the compute seconds, how much rests on measured kernels
    stages: tuple[Mapping[str, float], ...]  # per stage: forward and backward of the first micro-batch, sums, update
    items: Mapping[tuple[int, str], tuple[Item, ...]]  # by stage: "F" and "B" of the first micro-batch, "sums" after the last


def estimate(lowered: LoweredPlan, prices: Prices, *, optimizer: str = "sgd") -> Estimate:
    """The predicted step of a plan on a cluster."""
    plan, cluster = lowered.plan, prices.cluster
    if plan.size > cluster.size:
        raise Infeasible(
            f"the plan needs {plan.size} devices, cluster {cluster.name!r} has {cluster.size} in use; "
            "plan for fewer or ask for more"
        )
    if plan.schedule in FUSED:
        raise Infeasible(
            f"schedule {plan.schedule} runs a forward and a backward at once, which is not predicted yet; choose 1f1b-as"
        )
    return _StepEstimate(lowered, prices, optimizer).run()


class _StepEstimate:
    def __init__(self, lowered: LoweredPlan, prices: Prices, optimizer: str) -> None:
        self.lowered, self.prices, self.optimizer = lowered, prices, optimizer
        self.plan, self.cluster = lowered.plan, prices.cluster
        lists = lowered.lists(prices.placement, prices.precision)
        siblings = {part.index: self._sibling_ranks(part) for part in lowered.parts}
        self.stages = {key: StagePrices(found, prices, siblings[key[0]]) for key, found in lists.items()}
        self.items: dict[tuple[int, str, int], list[Item]] = {}
        for (index, size), stage in self.stages.items():
            self.items[index, "F", size], self.items[index, "B", size] = stage.forward(), stage.backward(last=False)
        last = self.plan.sizes[-1]
        self.items.update({(p.index, LAST, last): self.stages[p.index, last].backward() for p in lowered.parts})
        self.streams = {key: overlap(items) for key, items in self.items.items()}
        self.sums = {part.index: self._stage(part.index).reductions() for part in lowered.parts}

    def _sibling_ranks(self, part: LoweredStage) -> tuple[tuple[int, ...], ...]:
        """The ranks of the other stages with the same mesh."""
        mine = part.stage
        others = (other.stage for other in self.lowered.parts if other.stage.mesh == mine.mesh)
        return tuple(dict.fromkeys(stage.ranks for stage in others if stage.ranks != mine.ranks))

    def _key(self, stage: int, kind: str, microbatch: int) -> tuple[int, str, int]:
        """Under what an action's items are kept."""
        ends = kind == "B" and microbatch == self.plan.microbatches - 1
        return stage, LAST if ends else kind, self.plan.sizes[microbatch]

    def _stage(self, index: int) -> StagePrices:
        return self.stages[index, self.plan.sizes[0]]

    def run(self) -> Estimate:
        lanes = [self._lane(ranks) for ranks in self.lowered.places]
        machine = Machine(cores={self.cluster.node(r): self.cluster.device(r).cores for r in range(self.plan.size)})
        events = Replay(lanes, machine, self._work(lanes), self._messages()).run().events
        timeline = Timeline(tuple(event for event in events if event.kind != "update"))
        ends = {lane.first: 0.0 for lane in lanes} | {event.rank: event.end for event in events}
        launches = {lane.first: self._launch_seconds(lane.first) for lane in lanes}
        critical = max(ends, key=lambda first: max(ends[first], launches[first]))
        terms = self._terms([event for event in events if event.rank == critical], critical)
        step = max(ends[critical], launches[critical])
        terms["other"] += step - ends[critical]
        half = 0.5 * self._spread(critical) + _drift(self.cluster.device(critical)) * step
        every = [item for items in self.items.values() for item in items if item.category == "compute"]
        known = total(i for i in every if i.source == "measured") / (total(every) or 1.0)
        return Estimate(
            step_seconds=step,
            interval=(max(step - half, 0.0), step + half),
            breakdown=terms,
            timeline=timeline,
            measured_share=known,
            stages=tuple(self._stage_record(part.index) for part in self.lowered.parts),
            items=self._first_items(),
        )

    def _first_items(self) -> dict[tuple[int, str], tuple[Item, ...]]:
        first, last = self.plan.sizes[0], self.plan.sizes[-1]
        out: dict[tuple[int, str], tuple[Item, ...]] = {}
        for part in self.lowered.parts:
            out |= {(part.index, kind): tuple(self.items[part.index, kind, first]) for kind in ("F", "B")}
            sent = [item for item in self.items[part.index, LAST, last] if item.starts.startswith("bucket")]
            out[part.index, "sums"] = (*sent, *self.sums[part.index])
        return out

    def _stage_record(self, index: int) -> dict[str, float]:
        size = self.plan.sizes[0]
        rank = self.lowered.parts[index].stage.ranks[0]
        return {
            "forward": total(self.items[index, "F", size]),
            "backward": total(self.items[index, "B", size]),
            "gradient_exchange": total(self.sums[index]),
            "update": self.prices.update(self.optimizer, self._stage(index).updated_bytes(), rank),
        }

    def _lane(self, ranks: tuple[int, ...]) -> Lane:
        nodes = Counter(map(self.cluster.node, ranks))
        part = self._parts(ranks[0])[0]
        beside = sum(self.cluster.node(r) in nodes for others in self._sibling_ranks(part) for r in others)
        tasks = tuple(task for task in self.lowered.rank_schedule(ranks[0]) if task.kind not in UNTIMED)
        return Lane(first=ranks[0], tasks=tasks, nodes=tuple(nodes.items()), beside=beside)

    def _parts(self, rank: int) -> list[LoweredStage]:
        return [part for part in self.lowered.parts if rank in part.stage.ranks]

    def _work(self, lanes: Iterable[Lane]) -> dict[tuple[int, str, int], Work]:
        out = {(self._parts(lane.first)[0].index, "update", 0): self._update_work(lane.first)[0] for lane in lanes}
        for part in self.lowered.parts:
            for m in range(self.plan.microbatches):
                for kind in ("F", "B"):
                    out[part.index, kind, m] = _work_of(self.streams[self._key(part.index, kind, m)])
            left = self.streams[self._key(part.index, "B", self.plan.microbatches - 1)].remaining
            sums = _work_of(overlap(self.sums[part.index]))
            out[part.index, "reduce", 0] = replace(sums, blocked=sums.blocked + left)
        return {**out, (0, "tie", 0): Work(seconds=0.0, blocked=self._tie_seconds())}

    def _messages(self) -> dict[tuple[int, int, str], float]:
        """Seconds of what one stage sends another for one micro-batch, the ranks of both in parallel; what one rank gives to
        several, or takes from several, goes through its link one after the other."""
        out: dict[tuple[int, int, str], float] = {}
        size = self.plan.sizes[0]
        for crossing in self.lowered.crossings:
            ends = [(crossing.source, crossing.target, "F")]
            ends += [(crossing.target, crossing.source, "B")] if crossing.gradient else []
            for source, target, way in ends:
                seconds = self._message(source, target, crossing.value, size)
                out[source, target, way] = out.get((source, target, way), 0.0) + seconds
        return out

    def _message(self, source: int, target: int, value: str, size: int) -> float:
        here, there = (self.lowered.stage_tensor(stage, value, size) for stage in (source, target))
        item = item_bytes(self.lowered.loss.graph.values[value].dtype, self.prices.precision)
        moved: dict[tuple[object, ...], int] = {}  # by kind of pair: what each gives, and what each takes
        pairs: dict[tuple[object, ...], tuple[int, int]] = {}
        for giver, taker, numel in sizes(here, there):
            if giver != taker:
                kind = pair_kind(self.cluster, giver, taker)
                pairs[kind] = giver, taker
                for end in ((kind, "gives", giver), (kind, "takes", taker)):
                    moved[end] = moved.get(end, 0) + numel
        largest = {kind: max(numel for (other, _, _), numel in moved.items() if other == kind) for kind in pairs}
        costs = (self.prices.collective("send", (pairs[kind],), float(numel * item)) for kind, numel in largest.items())
        return max((cost.seconds for cost in costs), default=0.0)

    def _tie_seconds(self) -> float:
        """Seconds to add up the gradients of tied parameters, one message between two stages after the other."""
        seconds = 0.0
        for tie in self.lowered.ties:
            spec = self.lowered.loss.graph.values[tie.name]
            size = float(spec.numel * item_bytes(spec.dtype, self.prices.precision))
            here, there = (self.lowered.parts[stage].stage.ranks for stage in (tie.giver, tie.taker))
            if here[0] != there[0]:
                part = size / max(min(len(here), len(there)), 1)
                pair = (there[0], here[0]) if tie.add else (here[0], there[0])
                seconds += self.prices.collective("send", (pair,), part).seconds
        return seconds

    def _launch_seconds(self, lane: int) -> float:
        """Seconds the host needs to launch all kernels of a step. It runs ahead of its device and waits for nothing, from step
        to step, so that the slower of the two decides. Left out: what it does for the update and for exchanges."""
        parts = [part.index for part in self._parts(lane)]
        each = {(p, size): times for p in parts for size, times in Counter(self.plan.sizes).items()}
        return sum(
            times * sum(item.host_seconds for kind in ("F", "B") for item in self.items[p, kind, size])
            for (p, size), times in each.items()
        )

    def _update_work(self, first: int) -> tuple[Work, float]:
        """What comes after the sums: a rank's update, and getting what others have updated (ZeRO-1); and the seconds of the
        update alone."""
        stages = [self._stage(part.index) for part in self._parts(first)]
        update = sum(self.prices.update(self.optimizer, stage.updated_bytes(), first) for stage in stages)
        copied, gathered = 0.0, 0.0
        for stage in stages:
            for slices in stage.messages.slices:
                copied += self.prices.copying(2 * stage.gathered_bytes(slices), first)
                gathered += self._gather_seconds(stage, slices)
        return Work(seconds=update + copied, blocked=gathered), update

    def _gather_seconds(self, stage: StagePrices, slices: GatherSlices) -> float:
        """Seconds of gathering slices of parameters, a chunk at a time; through shared memory, of waiting for each other."""
        groups, size = stage.comm.groups(slices.axes), float(slices.elements * stage.messages.item(slices.names[0]))
        if slices.path == "shared":
            return slices.rounds * self.prices.collective("shared_gather", groups, 8.0).seconds
        return slices.rounds * self.prices.collective("all_gather", groups, size).seconds

    def _terms(self, events: Sequence[Event], lane: int) -> dict[Category, float]:
        out: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        for event in events:
            if event.kind in ("F", "B"):
                stream = self.streams[self._key(*_parse_action(event.action, event.kind))]
                slower = (event.seconds - stream.blocked) / (stream.work or 1.0)  # on shared or busy cores
                for category, seconds in stream.waits.items():
                    out[category] += seconds
                for category, seconds in stream.terms.items():
                    out[category] += slower * seconds
            elif event.kind == "update":
                after, update = self._update_work(lane)
                spent = (event.seconds - after.blocked) * (update / (after.seconds or 1.0))
                out["update"] += spent
                out["gradient_exchange"] += event.seconds - spent
            else:
                out["pipeline" if event.kind in ("wait", "send", "receive") else "gradient_exchange"] += event.seconds
        out["other"] += max((event.end for event in events), default=0.0) - sum(out.values())
        return out

    def _spread(self, lane: int) -> float:
        """Seconds by which the lane's items together may be off: measured times stray one by one, so that much evens out;
        formulas are wrong for all items alike."""
        parts = [part.index for part in self._parts(lane)]
        keys = [self._key(p, kind, m) for p in parts for kind in ("F", "B") for m in range(self.plan.microbatches)]
        items = [item for found in (*(self.items[key] for key in keys), *(self.sums[p] for p in parts)) for item in found]
        chance = math.hypot(*(item.spread for item in items if item.source == "measured"))
        return chance + sum(item.spread for item in items if item.source != "measured")


def _drift(device: Device) -> float:
    return max(device.drift or DRIFT, SHARED_DRIFT if device.cores else 0.0)


def _work_of(stream: Overlap) -> Work:
    if not stream.work:
        return Work(seconds=0.0, blocked=stream.blocked)
    busy, even = stream.busy_work / stream.work, stream.mean_work / stream.work
    return Work(seconds=stream.work, busy=max(busy, 1.0), mean_over_max=even, blocked=stream.blocked)


def _parse_action(action: str, kind: str) -> tuple[int, str, int]:
    stage, _, microbatch = action.partition(kind)
    return int(stage), kind, int(microbatch)
