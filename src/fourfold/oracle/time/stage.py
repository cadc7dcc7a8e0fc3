"""The time of one stage's lists: each action priced, in order. Nothing is decided here.

Ranks of a stage whose shards have the same sizes form a class; one of each class is priced. All wait for each other at every
exchange, so between two exchanges the slowest class counts. Left out: the order in which autograd takes branches, which
changes no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from fourfold.cluster import Collective
from fourfold.graph.spec import computed_as
from fourfold.oracle.prices.kernels import Kernel, kernel_of
from fourfold.oracle.prices.prices import UNKNOWN_SPREAD, KernelTime, Prices
from fourfold.oracle.time.gradient_fan_in import gradient_sums
from fourfold.oracle.time.items import Item
from fourfold.oracle.time.stage_comm import StageComm
from fourfold.plans.lists.actions import (
    Action,
    Await,
    Back,
    Barrier,
    Complete,
    Fetch,
    Free,
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
from fourfold.plans.lists.rank_classes import rank_classes, share_of
from fourfold.plans.lists.saved_tensors import Share
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lowering.program import Compute, Move

UNTIMED = (Barrier, Complete, Free, Release)
"""Actions without a time of their own: waits are part of what is waited for, memory is freed at once."""


class StagePrices:
    """The items of one stage and size of micro-batch: its lists, priced."""

    def __init__(self, lists: StageList, prices: Prices, siblings: tuple[tuple[int, ...], ...] = ()) -> None:
        self.lists, self.messages, self.prices, self.live = lists, lists.messages, prices, lists.messages.live
        self.program, self.mesh, self.ranks = lists.program, lists.paths.mesh, lists.paths.ranks
        self.graph, self.dtypes = self.program.graph, computed_as(self.messages.precision)
        self.class_sizes = {
            m: n for members in rank_classes(self.mesh, [self.program]) for m, n in self._representatives(members)
        }
        self.members = list(self.class_sizes)
        self.coords = self.mesh.coords(self.members[0])
        self.gradients = dict.fromkeys(self.live, True)
        self._known: dict[int, list[tuple[KernelTime, int]]] = {}  # by the identity of a step of the program
        self.comm = StageComm(prices=prices, paths=lists.paths, members=self.members, graph=self.graph, siblings=siblings)
        self.gradient_sums_of = self._gradient_sum_items()
        self._price: dict[type, Callable[[Any], Iterable[Item]]] = {
            Compute: partial(self._compute, way="forward"),
            Move: self._exchange,
            Back: self._back,
            Launch: self._launch,
            Await: self._await,
            Fetch: self._fetch,
            Give: self._give,
            Limit: self._limit,
            Sum: self._sum,
        }

    def _representatives(self, members: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Of the members of a class, the first on each kind of device, and how many of them have that kind."""
        found: dict[str, list[int]] = {}
        for member in members:
            found.setdefault(self._device(member), []).append(member)
        return ((some[0], len(some)) for some in found.values())

    def forward(self) -> list[Item]:
        return self._with_waits(self._items(self.lists.forward))

    def backward(self, *, last: bool = True) -> list[Item]:
        """`last`: whether gradients are complete after it, so that their sums are sent on the way where they can be."""
        actions = self.lists.last(self.coords) if last else self.lists.backward
        stored = (items for name, items in self.gradient_sums_of.items() if name not in self.graph.producer)
        return self._with_waits([*self._items(actions), *(item for items in stored for item in items)])

    def reductions(self) -> list[Item]:
        """The gradient sums left for after backward."""
        return list(self._items(self.lists.finish(self.coords)))

    def _items(self, actions: Iterable[Action]) -> Iterator[Item]:
        """The items of a list."""
        self.sent: list[str] = []  # messages with gradients of divided weights
        self.unpacking: dict[str, list[Item]] = {}  # by message: what follows its arrival
        for action in flat(actions):
            if type(action) not in UNTIMED:
                yield from self._price[type(action)](action)

    def _with_waits(self, items: Iterable[Item]) -> list[Item]:
        """The items, with blocking exchanges lengthened by what was measured after as much computing."""
        if not self.prices.cluster.measured.waits:
            return list(items)
        out, computing = [], 0.0
        for item in items:
            if not item.is_blocking:
                computing += item.seconds * item.busy
            elif not item.starts:
                if item.source == "measured" and item.pattern != "shared_gather":
                    groups = self.comm.groups(item.axes)
                    item = replace(item, seconds=item.seconds + self.prices.waiting(groups, computing))
                computing = 0.0
            out.append(item)
        return out

    # --- actions ---

    def _exchange(self, move: Move) -> list[Item]:
        return self.comm.exchange(move.exchange, move.value, move.kind)

    def _back(self, action: Back) -> Iterator[Item]:
        step = action.step
        if isinstance(step, Compute):
            yield from (item for name in step.op.results for item in self.gradient_sums_of.get(name, ()))
            yield from self._compute(step, way="backward")
        elif step.target not in self._gathered:
            yield from self.comm.exchange(step.exchange.adjoint, step.value, step.kind)

    @cached_property
    def _gathered(self) -> frozenset[str]:
        """Slots of divided weights: the actions around the exchange hold what it costs."""
        return frozenset(move.target for move in self.messages.moves)

    def _launch(self, action: Launch) -> Iterator[Item]:
        message = action.message
        if isinstance(message, Opening):
            items = self._exchange(message.move)
            last = max(k for k, item in enumerate(items) if item.is_blocking)
            self.unpacking[message.key] = items[last + 1 :]
            yield from (*items[:last], replace(items[last], starts=message.key))
        elif isinstance(message, Bucket):
            if len(message.names) > 1:
                yield self.comm.copy("gradient_exchange", message.key, 2.0 * message.bytes)
            yield self._send_item(message.key, "all_reduce", message.axes, float(message.bytes))
        else:
            self.sent += [message.key] if message.gradients else []
            given = zip(message.moves, message.steps, strict=True)
            size = sum(self.comm.sent_bytes(step, self.comm.item(move.value)) for move, step in given)
            yield self._send_item(message.key, "all_to_all", message.axes, size)

    def _send_item(self, key: str, kind: Collective, axes: tuple[str, ...], size: float) -> Item:
        return self.comm.collective("gradient_exchange", key, kind, axes, size, starts=key)

    def _await(self, action: Await) -> Iterator[Item]:
        yield self._await_item(action.message.key)
        yield from self.unpacking.pop(action.message.key, ())

    def _limit(self, action: Limit) -> Iterator[Item]:
        over = self.sent[: max(len(self.sent) - action.most, 0)]
        if over:
            yield self._await_item(over[-1])

    def _await_item(self, key: str) -> Item:
        return Item(category="gradient_exchange", label=key, seconds=0.0, awaits=key)

    def _fetch(self, action: Fetch) -> Iterator[Item]:
        """Through shared memory, n bytes are read and written."""
        if action.source is None:
            yield self._shared_copy(action.move, "shared_fetch", 2.0)

    def _give(self, action: Give) -> Iterator[Item]:
        """Through shared memory of p ranks: 2 n bytes to put a gradient there, and 3 n (p-1)/p to add those of others."""
        if action.target is None:
            count = self.lists.paths.extent(action.move.exchange.steps[0].axes)
            yield self._shared_copy(action.move, "shared_give", 2 + 3 * (count - 1) / count)

    def _shared_copy(self, move: Move, kind: Collective, times: float) -> Item:
        """A divided weight or its gradient through shared memory: as measured or, where nothing was, by the bytes moved."""
        step = move.exchange.steps[0]
        size = self.comm.numel(step.target) * self.comm.item(move.value)
        cost = self.prices.measured(kind, self.comm.groups(step.axes), size)
        if cost is None:
            return self.comm.copy("gradient_exchange", move.value, times * size)
        return Item(
            category="gradient_exchange",
            label=move.value,
            seconds=cost.seconds,
            spread=cost.spread or 0.0,
            source="measured",
            size=size,
        )

    def _sum(self, action: Sum) -> Iterator[Item]:
        size = sum(self.comm.numel(self.program.stored[n]) * self.comm.item(n) for n in action.names)
        yield self.comm.collective("gradient_exchange", "gradients", "shared_sum", action.axes, float(size))

    def _compute(self, step: Compute, *, way: Literal["forward", "backward"]) -> list[Item]:
        times = self._times(step)
        spent = [t.forward if way == "forward" else t.backward for t, _ in times]
        seconds = max(spent)
        slowest, _ = times[spent.index(seconds)]
        even = sum(n * s for (_, n), s in zip(times, spent, strict=True)) / seconds / self.mesh.size if seconds else 1.0
        spread = slowest.spread if slowest.spread is not None else UNKNOWN_SPREAD[slowest.source]
        out = [
            Item(
                category="compute",
                label=step.op.path,
                seconds=seconds,
                busy=slowest.busy,
                spread=seconds * spread,
                mean_over_max=even,
                source=slowest.source,
                host_seconds=slowest.host_seconds[0 if way == "forward" else 1],
            )
        ]
        return [*out, *self._kernel_collectives(step, backward=way == "backward")]

    def _gradient_sum_items(self) -> dict[str, list[Item]]:
        """By value, the sums of the gradients that its readers give it. On processors they are left out: they are not among
        the kernels timed there, and what that costs was not measured."""
        out: dict[str, list[Item]] = {}
        member = self.members[0]
        if self.prices.cluster.device(self.ranks[member]).kind == "cpu":
            return out
        for name, kernel in gradient_sums(self.program, self.mesh.coords(member), self.live, self.dtypes):
            time = self.prices.kernel(kernel, self.ranks[member])
            spread = time.forward * (time.spread if time.spread is not None else UNKNOWN_SPREAD[time.source])
            out.setdefault(name, []).append(
                Item(
                    category="compute",
                    label=f"gradients of {name}",
                    seconds=time.forward,
                    spread=spread,
                    source=time.source,
                    host_seconds=time.host_seconds[0],
                )
            )
        return out

    def _times(self, step: Compute) -> list[tuple[KernelTime, int]]:
        """A step's times on each kind of member, and how many there are; worked out once for its forward and its backwards,
        and for members that differ elsewhere."""
        if id(step) not in self._known:
            kinds: dict[tuple[tuple[int, ...], str], list[int]] = {}
            for m in self.members:
                kinds.setdefault((share_of(step, self.mesh.coords(m)), self._device(m)), []).append(m)
            self._known[id(step)] = [
                (self.prices.kernel(self.kernel(step, some[0]), self.ranks[some[0]]), sum(self.class_sizes[m] for m in some))
                for some in kinds.values()
            ]
        return self._known[id(step)]

    def _device(self, member: int) -> str:
        return self.prices.cluster.device(self.ranks[member]).name

    def kernel(self, step: Compute, member: int) -> Kernel:
        """A step as one member of the stage runs it."""
        return kernel_of(step, self.graph, self.mesh.coords(member), self.gradients, self.dtypes)

    def _kernel_collectives(self, step: Compute, *, backward: bool) -> Iterator[Item]:
        """The collectives inside a kernel that works over several ranks."""
        if step.axes_of("joint") or step.axes_of("sum"):
            items = (tuple(map(self.messages.item, names)) for names in (step.op.operands, step.op.results))
            for inside in collectives_inside(Share(step, self.coords, *items), backward=backward):
                kind: Collective = "shared_gather" if self.lists.paths.small(inside.axes, inside.size) else inside.kind
                label = f"{step.op.path} statistics"
                yield self.comm.collective("layer_exchange", label, kind, inside.axes, float(inside.size))

    # --- updates ---

    def updated_bytes(self) -> float:
        """Bytes of parameters the optimizer of one rank updates."""
        (update,) = (action for action in self.lists.update if isinstance(action, Update))
        updates = self.program.updates
        return float(sum(self.comm.numel(updates[name]) * self.comm.item(name) for name in update.names))

    def gathered_bytes(self, slices: GatherSlices) -> float:
        """Bytes of the parameters that the gathering of updated slices (ZeRO-1) completes."""
        return float(sum(self.comm.numel(self.program.stored[n]) * self.comm.item(n) for n in slices.names))
