"""What a rank's lists say that it will send, fetch, free and update in one step: one `Record` each, in order. The runtime
writes down the same of what it does, so that the two can be compared.

Left out: gathers of outputs and state that a caller asks for after a step, and what sets a run up before the first step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fourfold.graph.spec import item_bytes
from fourfold.plans.layout.exchange import Exchange, ExchangeStep
from fourfold.plans.lists.actions import (
    Action,
    Await,
    Back,
    Barrier,
    Bunch,
    Complete,
    Fetch,
    GatherSlices,
    Give,
    Launch,
    Limit,
    Opening,
    Release,
    Sum,
    Update,
    flat,
)
from fourfold.plans.lists.comm_batches import Bucket
from fourfold.plans.lists.kernel_collectives import collectives_inside
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.rank_schedule import StageAction
from fourfold.plans.lists.saved_tensors import Share
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lists.stage_transfer import StageTensor, incoming, outgoing
from fourfold.plans.lowering.program import Compute, Move
from fourfold.plans.spec.placement import Placement


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that a rank did. `kind`: a collective, send, receive, await, fetch, release, give, sum, barrier or update;
    `path` and `ranks`: of a message, its way and its group in mesh order; `size`: bytes of this rank's part."""

    kind: str
    path: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0
    name: str = ""


NORM_BYTES = 8
"""Squared norms of gradients are added up in float64."""


def records(
    lowered: LoweredPlan, placement: Placement, rank: int, *, precision: str = "fp32", clips: bool = False
) -> list[Record]:
    """One step of a rank, from its lists."""
    walk = _Rank(lowered, placement, rank, precision)
    return [record for task in lowered.rank_schedule(rank, clips=clips) for record in walk.task(task)]


class _Rank:
    def __init__(self, lowered: LoweredPlan, placement: Placement, rank: int, precision: str) -> None:
        self.lowered, self.plan, self.rank, self.precision = lowered, lowered.plan, rank, precision
        self.placement = placement
        lists = lowered.lists(placement, precision)
        flying: dict[int, deque[str]] = {part.index: deque() for part in lowered.parts}
        self.stages = {key: _Stage(found, rank, flying[key[0]]) for key, found in lists.items() if rank in found.paths.ranks}

    def task(self, task: StageAction) -> Iterator[Record]:
        size, first = self.plan.sizes[task.microbatch], self.plan.sizes[0]
        if task.kind == "begin":
            stage = self.stages[task.stage, first]
            yield from stage.records(stage.lists.begin)
            yield from self._counts(task.stage)
        elif task.kind == "F":
            stage = self.stages[task.stage, size]
            yield from stage.records(stage.lists.forward)
        elif task.kind == "B":
            stage = self.stages[task.stage, size]
            yield from stage.records(stage.lists.last(stage.coords) if task.last else stage.lists.backward)
        elif task.kind == "reduce":
            stage = self.stages[task.stage, first]
            yield from stage.records(stage.lists.finish(stage.coords))
        elif task.kind in ("receive", "send"):
            yield from self._mail(task)
        elif task.kind == "tie":
            yield from self._ties()
        elif task.kind in ("listen", "loss"):
            yield from self._loss(task)
        elif task.kind == "clip":
            if self.plan.size > 1:
                yield Record("all_reduce", "collective", tuple(range(self.plan.size)), NORM_BYTES, "clip")
        else:
            for index in (p.index for p in self.lowered.parts if self.rank in p.stage.ranks):
                stage = self.stages[index, first]
                yield from stage.records(stage.lists.update)

    def _counts(self, index: int) -> Iterator[Record]:
        """The programs that count what the loss divides by, one micro-batch after the other."""
        for size in self.plan.sizes if index in self.lowered.counts else ():
            lists = self.lowered.counters(self.placement, self.precision)[index, size]
            stage = _Stage(lists, self.rank, deque())
            yield from stage.records(lists.forward)
            for name in lists.program.outputs:
                axes = lists.program.mesh.ordered(lists.program.layouts[name].partial)
                yield from stage.summed(axes, lists.messages.item(name) * lists.program.graph.values[name].numel)

    def _mail(self, task: StageAction) -> Iterator[Record]:
        size, out = self.plan.sizes[task.microbatch], task.kind == "send"
        ends = (task.stage, task.peer) if out else (task.peer, task.stage)
        for crossing in self.lowered.tensors_between(*ends, task.way):
            source, target = (self.lowered.stage_tensor(end, crossing.value, size) for end in ends)
            yield from self._passed(source, target, crossing.value, give=out)

    def _passed(self, source: StageTensor, target: StageTensor, value: str, *, give: bool) -> Iterator[Record]:
        """The messages with a tensor that this rank sends, or receives."""
        item = item_bytes(self.lowered.loss.graph.values[value].dtype, self.precision)
        for each in (outgoing if give else incoming)(source, target, self.rank):
            if each.peer != self.rank:
                ends = (self.rank, each.peer) if give else (each.peer, self.rank)
                yield Record("send" if give else "receive", "collective", ends, item * each.numel, value)

    def _ties(self) -> Iterator[Record]:
        for tie in self.lowered.ties:
            source, target = (self.lowered.stored_tensor(stage, tie.name) for stage in (tie.giver, tie.taker))
            if self.rank in target.ranks:
                yield from self._passed(source, target, tie.name, give=False)
            if self.rank in source.ranks:
                yield from self._passed(source, target, tie.name, give=True)

    def _loss(self, task: StageAction) -> Iterator[Record]:
        """The sum over the ranks that have shares of the loss; the first of them tells the stages that have none."""
        part, ranks = self.lowered.last, self.lowered.last.stage.ranks
        item = item_bytes(part.graph.values[part.graph.loss].dtype, self.precision)
        if self.rank not in ranks:
            yield from [Record("receive", "collective", (ranks[0], self.rank), item, "loss")] if task.kind == "listen" else []
            return
        stage = self.stages[part.index, self.plan.sizes[0]]
        yield from stage.summed(part.program.loss_axes, item)
        for other in self.lowered.without_loss if self.rank == ranks[0] else ():
            yield Record("send", "collective", (self.rank, other), item, "loss")


class _Stage:
    """One rank's share of a stage. `flying`: the messages with gradients of divided weights, those of all micro-batches."""

    def __init__(self, lists: StageList, rank: int, flying: deque[str]) -> None:
        self.lists, self.messages, self.paths = lists, lists.messages, lists.paths
        self.member = self.paths.ranks.index(rank)
        self.coords = self.paths.mesh.coords(self.member)
        self.gathered = frozenset(move.target for move in self.messages.moves)
        self.flying = flying

    def records(self, actions: Iterable[Action]) -> Iterator[Record]:
        for action in flat(actions):
            yield from self._of(action)

    def _of(self, action: Action) -> Iterator[Record]:
        if isinstance(action, Compute):
            yield from self._inside(action, backward=False)
        elif isinstance(action, Move):
            yield from self._exchange(action.exchange, action.value)
        elif isinstance(action, Back):
            if isinstance(action.step, Compute):
                yield from self._inside(action.step, backward=True)
            elif action.step.target not in self.gathered:
                yield from self._exchange(action.step.exchange.adjoint, action.step.value)
        elif isinstance(action, Launch):
            yield from self._launched(action.message)
        elif isinstance(action, Await):
            yield Record("await", name=action.message.key)
        elif isinstance(action, Fetch):
            yield Record("fetch", size=self._whole(action.move), name=action.move.target)
        elif isinstance(action, Release):
            yield Record("release", name=action.move.target)
        elif isinstance(action, Give):
            yield Record("give", size=self._whole(action.move), name=action.move.target)
        elif isinstance(action, Limit):
            while len(self.flying) > action.most:
                yield Record("await", name=self.flying.popleft())
        elif isinstance(action, Complete):
            yield from (Record("await", name=bucket.key) for bucket in action.buckets if bucket.bytes)
        elif isinstance(action, Sum):
            yield Record("sum", "shared", self._ranks(action.axes), self._stored(action.names))
        elif isinstance(action, Barrier):
            yield Record("barrier", "shared", self._ranks(self.paths.wide))
        elif isinstance(action, GatherSlices):
            size = action.elements * self.messages.item(action.names[0])
            yield from [Record("all_gather", action.path, self._ranks(action.axes), size, "slices")] * action.rounds
        elif isinstance(action, Update):
            yield Record("update", size=self._updated(action.names))

    def _inside(self, step: Compute, *, backward: bool) -> Iterator[Record]:
        items = (tuple(map(self.messages.item, names)) for names in (step.op.operands, step.op.results))
        for inside in collectives_inside(Share(step, self.coords, *items), backward=backward):
            path = "shared" if self.paths.small(inside.axes, inside.size) else "collective"
            yield Record(inside.kind, path, self._ranks(inside.axes), inside.size)

    def summed(self, axes: tuple[str, ...], size: int) -> Iterator[Record]:
        """A number of its own, summed over some axes."""
        if self.paths.extent(axes) > 1:
            path = "shared" if self.paths.small(axes, size) else "collective"
            yield Record("all_reduce", path, self._ranks(axes), size)

    def _exchange(self, exchange: Exchange, value: str) -> Iterator[Record]:
        item = self.messages.item(value)
        for step in exchange.steps:
            size = step.size(self.member, item)
            if step.axes and not self._skipped(step, size):
                yield Record(step.pattern, self.paths.of(step, self.member, item), self._ranks(step.axes), size, value)

    def _skipped(self, step: ExchangeStep, size: int) -> bool:
        """Whether nothing travels: in an all-to-all because nobody needs anything, else because there are no elements."""
        if step.pattern == "all_to_all":
            return step.is_silent(self.member)
        return math.prod(step.target.local_shape(self.coords)) == 0

    def _launched(self, message: Bunch | Bucket | Opening) -> Iterator[Record]:
        if isinstance(message, Opening):
            yield from self._exchange(message.move.exchange, message.move.value)
        elif isinstance(message, Bucket):
            if message.bytes:
                yield Record("all_reduce", "collective", self._ranks(message.axes), message.bytes, message.key)
        else:
            pairs = zip(message.moves, message.steps, strict=True)
            size = sum(self.messages.item(move.value) * step.sent_elements(self.member) for move, step in pairs)
            path = self.paths.several(message.steps, message.axes, self.member)
            if message.gradients:
                self.flying.append(message.key)
            yield Record("all_to_all", path, self._ranks(message.axes), size, message.key)

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.paths.ranks[m] for m in self.paths.mesh.group(self.member, axes))

    def _whole(self, move: Move) -> int:
        """Bytes of a gathered weight on this rank."""
        return self.messages.item(move.value) * math.prod(move.exchange.target.local_shape(self.coords))

    def _stored(self, names: Iterable[str]) -> int:
        stored = self.lists.program.stored
        return sum(self.messages.item(name) * math.prod(stored[name].local_shape(self.coords)) for name in names)

    def _updated(self, names: Iterable[str]) -> int:
        updates = self.lists.program.updates
        return sum(self.messages.item(name) * math.prod(updates[name].local_shape(self.coords)) for name in names)
