"""The grouped calls by which ranks pass tensors between stages, in the order in which each rank makes them.

All tensors of one action, to or from all ranks of the other stage, are one call. Calls of one `Boundary` use one communicator,
and messages carry no tags: the k-th that a rank sends to another there is the k-th that the other receives. Where two stages
have the same ranks, each of these is source and target, and sends and receives together when the tensors are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.rank_schedule import StageAction
from fourfold.plans.lists.stage_transfer import StageTensor, incoming, outgoing, sizes


class Boundary(NamedTuple):
    """What one communicator is for: values (F) or gradients (B) from one stage to another, tied gradients, or the loss."""

    way: Literal["F", "B", "tie", "loss"]
    source: int = -1
    target: int = -1

    @staticmethod
    def of(task: StageAction) -> Boundary:
        """Of a send or receive."""
        ends = (task.stage, task.peer) if task.kind == "send" else (task.peer, task.stage)
        return Boundary(task.way, *ends)

    def __str__(self) -> str:
        return f"{self.source}>{self.target}{self.way}" if self.source >= 0 else self.way


TIE, LOSS = Boundary("tie"), Boundary("loss")
Key = tuple[Boundary, int]
"""Of a call: its boundary and micro-batch, of ties their number."""


class Message(NamedTuple):
    """One tensor, or the part of it that one rank sends to another."""

    value: str
    number: int  # the micro-batch, or which tie
    elements: int

    def __str__(self) -> str:
        return f"{self.value or 'a message'} of micro-batch {self.number} ({self.elements} elements)"


class Part(NamedTuple):
    """One message of a call: sent to `peer`, or received from it."""

    peer: int
    sends: bool
    message: Message


class Call(NamedTuple):
    """Messages of one boundary that are sent and received together."""

    action: str
    boundary: Boundary
    number: int
    parts: tuple[Part, ...]

    @property
    def key(self) -> Key:
        return self.boundary, self.number


class Compute(NamedTuple):
    """A stretch of work on the device, which begins when these calls are done. `meets`: all ranks of the stage take part."""

    action: str
    meets: bool = True
    waits: tuple[Key, ...] = ()


Entry = Call | Compute


class Members(Protocol):
    """Who calls: ranks, or sets of ranks that share a list."""

    lowered: LoweredPlan

    def schedule(self, member: int) -> tuple[StageAction, ...]: ...

    def parts(self, member: int, boundary: Boundary, number: int) -> tuple[Part, ...]: ...


def calls(members: Members, member: int) -> list[Entry]:
    """What a member does in a step, as far as messages between stages are concerned, in order."""
    out: list[Entry] = []
    coming: dict[tuple[int, str, int], list[Key]] = {}
    sent: list[Key] = []

    def call(action: str, boundary: Boundary, number: int) -> Key | None:
        parts = members.parts(member, boundary, number)
        if not parts and not within_place(members.lowered, boundary):
            return None
        out.append(Call(action, boundary, number, parts))
        sent.extend([(boundary, number)] * any(part.sends for part in parts))
        return boundary, number

    for task in members.schedule(member):
        here = task.stage, task.way if task.kind == "receive" else task.kind, task.microbatch
        if task.kind in ("receive", "send"):
            boundary = Boundary.of(task)
            within = within_place(members.lowered, boundary)
            key = call(str(task), boundary, task.microbatch) if within == (task.kind == "send") or not within else None
            if task.kind == "receive":
                coming.setdefault(here, []).extend([(boundary, task.microbatch)] if within or key else [])
        elif task.kind in ("F", "B", "begin", "reduce"):
            out.append(Compute(str(task), waits=tuple(coming.pop(here, ()))))
        elif task.kind == "tie":
            for number in range(len(members.lowered.ties)):
                key = call(f"T {number}", TIE, number)
                out += [Compute(f"T {number}", meets=False, waits=(key,))] if key else []
        elif task.kind == "loss":
            out.append(Compute("L", meets=False, waits=tuple(sent)))
            key = call("L", LOSS, 0)
            out += [Compute("L", meets=False, waits=(key,))] if key else []
    return out


def within_place(lowered: LoweredPlan, boundary: Boundary) -> bool:
    """Whether both stages of a boundary have the same ranks."""
    if boundary.source < 0:
        return False
    source, target = (lowered.plan.parts[stage].ranks for stage in (boundary.source, boundary.target))
    return source == target


def boundaries(lowered: LoweredPlan) -> list[Boundary]:
    """All boundaries of a plan, in one order on all ranks."""
    found = dict.fromkeys(Boundary("F", c.source, c.target) for c in lowered.crossings)
    back = dict.fromkeys(Boundary("B", c.target, c.source) for c in lowered.crossings if c.gradient)
    return [*sorted(found), *sorted(back), *([TIE] if lowered.ties else []), LOSS]


def tensors_of(lowered: LoweredPlan, boundary: Boundary, number: int) -> Iterator[tuple[str, StageTensor, StageTensor]]:
    """The tensors that pass a boundary in a micro-batch: value, how the source has it, how the target wants it."""
    if boundary == TIE:
        tie = lowered.ties[number]
        yield tie.name, lowered.stored_tensor(tie.giver, tie.name), lowered.stored_tensor(tie.taker, tie.name)
    elif boundary != LOSS:
        size = lowered.plan.sizes[number]
        for crossing in lowered.tensors_between(boundary.source, boundary.target, boundary.way):
            source, target = (lowered.stage_tensor(end, crossing.value, size) for end in (boundary.source, boundary.target))
            yield crossing.value, source, target


def numbers(lowered: LoweredPlan, boundary: Boundary) -> Sequence[int]:
    """One micro-batch of each size, or every tie: what passes a boundary in the others is the same."""
    if boundary == TIE:
        return range(len(lowered.ties))
    return [lowered.plan.sizes.index(size) for size in dict.fromkeys(lowered.plan.sizes)] if boundary != LOSS else [0]


def pairs(lowered: LoweredPlan, boundary: Boundary) -> list[tuple[int, int]]:
    """The ranks between which messages pass a boundary, in order: giver and taker."""
    if boundary == LOSS:
        return [(lowered.last.stage.ranks[0], other) for other in lowered.without_loss]
    tensors = (tensor for number in numbers(lowered, boundary) for tensor in tensors_of(lowered, boundary, number))
    found = {(a, b) for _, source, target in tensors for a, b, _ in sizes(source, target)}
    return sorted((a, b) for a, b in found if a != b)


class Ranks:
    """Every rank for itself, with the sizes of its own messages."""

    def __init__(self, lowered: LoweredPlan) -> None:
        self.lowered = lowered
        self._known: dict[tuple[int, Boundary, int], list[tuple[int, bool, str, int]]] = {}

    def schedule(self, member: int) -> tuple[StageAction, ...]:
        return self.lowered.rank_schedule(member)

    def parts(self, member: int, boundary: Boundary, number: int) -> tuple[Part, ...]:
        alike = self.lowered.plan.sizes[number] if boundary.source >= 0 else number
        key = member, boundary, alike
        if key not in self._known:
            self._known[key] = list(self._passed(member, boundary, number))
        return tuple(Part(peer, sends, Message(name, number, size)) for peer, sends, name, size in self._known[key])

    def _passed(self, rank: int, boundary: Boundary, number: int) -> Iterator[tuple[int, bool, str, int]]:
        if boundary == LOSS:
            yield from ((b if rank == a else a, rank == a, "loss", 1) for a, b in pairs(self.lowered, LOSS) if rank in (a, b))
        for value, source, target in tensors_of(self.lowered, boundary, number):
            takes = incoming(source, target, rank) if rank in target.place else []
            gives = outgoing(source, target, rank) if rank in source.place else []
            yield from ((t.peer, False, value, t.numel) for t in takes if t.peer != rank)
            yield from ((t.peer, True, value, t.numel) for t in gives if t.peer != rank)


class Places:
    """Sets of ranks that share a list, each as if it were one rank. Whatever a rank waits for, its set waits for: where no set
    waits for ever, no rank does."""

    def __init__(self, lowered: LoweredPlan) -> None:
        self.lowered = lowered
        self.place = [lowered.places.index(stage.ranks) for stage in lowered.plan.parts]
        self.message: Callable[[int], Message] = lambda number: Message("", number, 0)

    def schedule(self, member: int) -> tuple[StageAction, ...]:
        return self.lowered.rank_schedule(self.lowered.places[member][0])

    def parts(self, member: int, boundary: Boundary, number: int) -> tuple[Part, ...]:
        if boundary == LOSS:
            last, message = self.place[self.lowered.last.index], self.message(0)
            others = [k for k in range(len(self.lowered.places)) if k != last]
            return tuple(Part(k, True, message) for k in others) if member == last else (Part(last, False, message),)
        tie = self.lowered.ties[number] if boundary == TIE else None
        ends = (boundary.source, boundary.target) if tie is None else (tie.giver, tie.taker)
        source, target = (self.place[stage] for stage in ends)
        if source == target or member not in (source, target):
            return ()
        return (Part(target if member == source else source, member == source, self.message(number)),)
