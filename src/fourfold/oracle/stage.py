"""What one stage does for one micro-batch, as a list of priced items: forward, backward, gradient sums, update.

Ranks of a stage whose shards have the same sizes do the same: one of each kind is looked at. They meet at every exchange,
so between two exchanges the slowest kind counts. Backward runs the list in reverse: each op's backward, each exchange's
adjoint. Left out: the order in which autograd takes branches, which changes no sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from fourfold.graph import Graph
from fourfold.oracle.alike import alike, share_of
from fourfold.oracle.fanout import gradient_sums
from fourfold.oracle.gathers import Gathers
from fourfold.oracle.items import Item
from fourfold.oracle.kernels import Kernel, kernel_of
from fourfold.oracle.meeting import Meeting
from fourfold.oracle.prices import SHARED_BYTES, UNKNOWN_SPREAD, KernelTime, Prices
from fourfold.oracle.saving import Share, saving
from fourfold.plans.buckets import Gradient, buckets, gathered
from fourfold.plans.exchange import Exchange
from fourfold.plans.layout import Layout
from fourfold.plans.lifetimes import order_of_use
from fourfold.plans.pipeline import Part
from fourfold.plans.program import Compute, Move, inside

BUCKET = "bucket"  # how messages with sums of gradients are called
STATISTICS = 2  # numbers per statistic that a norm exchanges: mean and variance, or their gradients


class StagePrices:
    """The items of one stage and size of micro-batch."""

    def __init__(
        self, part: Part, size: int, prices: Prices, live: frozenset[str], dtypes: Mapping[str, str],
        beside: tuple[tuple[int, ...], ...] = (),
    ) -> None:  # fmt: skip
        self.part, self.prices, self.live, self.dtypes = part, prices, live, dtypes
        self.program, self.mesh, self.ranks = part.programs[size], part.stage.mesh, part.stage.ranks
        self.graph: Graph = self.program.graph
        self.stands = {m: n for members in alike(self.mesh, [self.program]) for m, n in self._firsts(members)}
        self.members = list(self.stands)
        self.gradients = dict.fromkeys(live, True)
        self._known: dict[int, list[tuple[KernelTime, int]]] = {}  # by the identity of a step of the program
        self.meeting = Meeting(
            prices=prices, mesh=self.mesh, ranks=self.ranks, members=self.members, graph=self.graph, dtypes=dtypes,
            beside=beside,
        )  # fmt: skip
        self.gathering = {m.target: m for m in gathered(self.program)}
        self.gathers = Gathers(self.program, self.meeting, self._wanted)
        self.fanout = self._fanout()

    def _firsts(self, members: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Of members alike, the first on each kind of device, and for how many it stands."""
        found: dict[str, list[int]] = {}
        for member in members:
            found.setdefault(self._device(member), []).append(member)
        return ((some[0], len(some)) for some in found.values())

    def forward(self) -> list[Item]:
        self.gathers.begin()
        return self._waited(item for step in self.program.steps for inner in inside(step) for item in self._forward(inner))

    def _waited(self, items: Iterable[Item]) -> list[Item]:
        """The items, messages in which ranks meet as long as they are after what is computed before."""
        if not self.prices.cluster.measured.waits:
            return list(items)
        out, computing = [], 0.0
        for item in items:
            if not item.meets:
                computing += item.seconds * item.busy
            elif not item.starts:
                groups = self.meeting.groups(item.axes)
                common = item.pattern == "all_reduce" and item.size <= SHARED_BYTES and self.prices.together(groups)
                if item.source == "measured" and not common:
                    item = replace(item, seconds=item.seconds + self.prices.waiting(groups, computing))
                computing = 0.0
            out.append(item)
        return out

    def _forward(self, step: Compute | Move, *, again: bool = False) -> list[Item]:
        if isinstance(step, Compute):
            return self._compute(step, "forward")
        if step in self.gathers.moves:
            return self.gathers.rerun(step) if again else self.gathers.fetch(step)
        return self.meeting.exchange(step.exchange, step.value, step.kind)

    def backward(self, *, last: bool = True) -> list[Item]:
        """`last`: whether gradients are complete after it, so that their sums are sent on the way where they can be."""
        self.gathers.begin()
        out: list[Item] = []
        for low, high in self.program.segments:
            for step in self.program.steps[low:high]:
                out += [item for inner in inside(step) for item in self._forward(inner, again=True)]
        sums = self._sums() if last else {}
        for number, step in reversed(list(enumerate(self.program.steps))):
            for inner in reversed(inside(step)):
                out += self._backward(inner)
            out += sums.get(number, [])
        stored = (items for name, items in self.fanout.items() if name not in self.graph.producer)
        return self._waited([*out, *(item for items in stored for item in items)])

    def _backward(self, step: Compute | Move) -> list[Item]:
        if isinstance(step, Move):
            if step.value not in self.live:
                return []
            if step in self.gathers.moves:
                return self.gathers.give(step)
            return self.meeting.exchange(step.exchange.adjoint, step.value, step.kind)
        if not self._trained(step):
            return []
        summed = [item for name in step.op.results for item in self.fanout.get(name, ())]
        return [*self.gathers.refill(step), *summed, *self._compute(step, "backward")]

    def _trained(self, step: Compute) -> bool:
        """Whether an op has a backward."""
        return any(self.gradients.get(name) for name in step.op.operands)

    def _wanted(self, step: Compute) -> list[Move]:
        """The gathered weights that an op's backward needs."""
        weights = {k: self.gathering[slot] for k, slot in enumerate(step.inputs) if slot in self.gathering}
        kept = self._kept(step) if weights and self._trained(step) else ()
        return [move for k, move in weights.items() if k in kept]

    def _kept(self, step: Compute) -> Collection[int]:
        """Which operands an op's backward needs. Norms keep their small weights, of which rules say nothing."""
        if not step.nest.anchor:
            return range(len(step.inputs))
        items = [tuple(map(self.meeting.item, names)) for names in (step.op.operands, step.op.results)]
        share = Share(step, self.mesh.coords(self.members[0]), *items)
        return saving(share, [self.gradients.get(name, False) for name in step.op.operands]).tensors

    def _compute(self, step: Compute, way: Literal["forward", "backward"]) -> list[Item]:
        times = self._times(step)
        spent = [t.forward if way == "forward" else t.backward for t, _ in times]
        seconds = max(spent)
        slowest, _ = times[spent.index(seconds)]
        even = sum(n * s for (_, n), s in zip(times, spent, strict=True)) / seconds / self.mesh.size if seconds else 1.0
        spread = slowest.spread if slowest.spread is not None else UNKNOWN_SPREAD[slowest.source]
        out = [Item(category="compute", label=step.op.path, seconds=seconds, busy=slowest.busy, spread=seconds * spread,
                    even=even, source=slowest.source, asked=slowest.asked[0 if way == "forward" else 1])]  # fmt: skip
        joint = step.axes_of("joint")
        return [*out, self._joint(step, joint)] if joint else out

    def _fanout(self) -> dict[str, list[Item]]:
        """By value, the sums of the gradients that its readers give it. On processors they are left out: they are not among
        the kernels timed there, and what that costs was not measured."""
        out: dict[str, list[Item]] = {}
        member = self.members[0]
        if self.prices.cluster.device(self.ranks[member]).kind == "cpu":
            return out
        for name, kernel in gradient_sums(self.program, self.mesh.coords(member), self.live, self.dtypes):
            time = self.prices.kernel(kernel, self.ranks[member])
            spread = time.forward * (time.spread if time.spread is not None else UNKNOWN_SPREAD[time.source])
            out.setdefault(name, []).append(Item(category="compute", label=f"gradients of {name}", seconds=time.forward,
                                                 spread=spread, source=time.source, asked=time.asked[0]))  # fmt: skip
        return out

    def _times(self, step: Compute) -> list[tuple[KernelTime, int]]:
        """A step's times on each kind of member, and how many there are; worked out once for its forward and its backwards,
        and for members that differ elsewhere."""
        if id(step) not in self._known:
            kinds: dict[tuple[tuple[int, ...], str], list[int]] = {}
            for m in self.members:
                kinds.setdefault((share_of(step, self.mesh.coords(m)), self._device(m)), []).append(m)
            self._known[id(step)] = [
                (self.prices.kernel(self.kernel(step, some[0]), self.ranks[some[0]]), sum(self.stands[m] for m in some))
                for some in kinds.values()
            ]
        return self._known[id(step)]

    def _device(self, member: int) -> str:
        return self.prices.cluster.device(self.ranks[member]).name

    def kernel(self, step: Compute, member: int) -> Kernel:
        """A step as one member of the stage runs it."""
        return kernel_of(step, self.graph, self.mesh.coords(member), self.gradients, self.dtypes)

    def _joint(self, step: Compute, axes: tuple[str, ...]) -> Item:
        """The exchange of statistics inside a kernel that works over several ranks."""
        coords = self.mesh.coords(self.members[0])
        inside = math.prod(len(step.loops[name].at(coords)) for name in {step.choice[a] for a in axes} if name is not None)
        numel = math.prod(step.needs[0].local_shape(coords)) // max(inside, 1)
        if step.nest.kernel == "batch_norm":
            numel = step.needs[0].local_shape(coords)[1]
        size = STATISTICS * numel * self.meeting.item(step.op.operands[0])
        return self.meeting.met("layer_exchange", f"{step.op.path} statistics", "all_reduce", axes, size)

    # --- gradients and updates ---

    def _sums(self) -> dict[int, list[Item]]:
        """By step, the sums of gradients that are put on the wire when its backward is done: those of ranks that share no
        memory, in buckets, each when its last gradient has come and those before it are under way."""
        first, order = order_of_use(self.program), self._reduced(near=False)
        out: dict[int, list[Item]] = {}
        at = len(self.program.steps)
        for number, bucket in enumerate(buckets(order)):
            at = min(at, *(first.get(name, 0) for name in bucket.names))
            key = f"{BUCKET} {number}"
            packing = [self.meeting.copied("gradient_exchange", key, 2.0 * bucket.bytes)] if len(bucket.names) > 1 else []
            launch = self.meeting.met("gradient_exchange", key, "all_reduce", bucket.axes, bucket.bytes, starts=key)
            out.setdefault(at, []).extend([*packing, launch])
        return out

    def _reduced(self, *, near: bool) -> list[Gradient]:
        """The gradients to be summed over ranks of one host, or of several, in the order of their parameters' use."""
        first = order_of_use(self.program)
        found = []
        for name, axes in sorted(self.program.reductions.items(), key=lambda pair: first.get(pair[0], -1)):
            if self.prices.together(self.meeting.groups(axes)) == near:
                size = self.meeting.numel(self.program.stored[name]) * self.meeting.item(name)
                found.append(Gradient(name, size, axes, self.graph.values[name].dtype))
        return found

    def reductions(self) -> list[Item]:
        """The gradient sums left for after backward, by the axes they run over: those through common memory."""
        sizes: dict[tuple[str, ...], float] = {}
        for gradient in self._reduced(near=True):
            sizes[gradient.axes] = sizes.get(gradient.axes, 0.0) + gradient.bytes
        return [self.meeting.met("gradient_exchange", "gradients", "gradients", axes, size) for axes, size in sizes.items()]

    def updated_bytes(self) -> float:
        """Bytes of parameters the optimizer of one rank updates."""
        return float(sum(self._sizes(self.program.updates).values()))

    def shared_bytes(self) -> dict[tuple[str, ...], float]:
        """Under ZeRO-1, by axes, bytes of the parameters of which each rank updates a part and gets the rest."""
        updated, stored = self._sizes(self.program.updates), self._sizes(self.program.stored)
        out: dict[tuple[str, ...], float] = {}
        for name in updated:
            if updated[name] < stored[name]:
                (step,) = Exchange(self.mesh, self.program.updates[name], self.program.stored[name]).steps
                out[step.axes] = out.get(step.axes, 0.0) + stored[name]
        return out

    def _sizes(self, layouts: Mapping[str, Layout]) -> dict[str, float]:
        trained = {p.name for p in self.graph.parameters if p.trainable}
        return {n: float(self.meeting.numel(at) * self.meeting.item(n)) for n, at in layouts.items() if n in trained}
