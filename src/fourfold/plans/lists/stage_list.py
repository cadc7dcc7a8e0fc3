"""The lists of a stage: what each of its ranks does in a forward, in a backward and at the end of a step, in order.

There are two levels. A rank's schedule (`rank_schedule`) consists of forwards and backwards of its stages, messages between
stages, sums of gradients and the update. Each of these refers to a list of a `StageList`: one per stage and size of
micro-batch, made when it is first asked for. What depends on a rank's own sizes (buckets) is asked for by its coordinates.

Backward is autograd's: its engine takes the steps of forward in reverse, and the backward list says so. Divided weights
(ZeRO-3) are gathered for forward in bunches, `prefetch` of them ahead of use; for backward in other bunches, launched as the
backward of an op begins: its own, and those of the `prefetch` ops before it that need any. In segments that run again, weights
are gathered one by one. Gradients leave when their bunch is complete. Through shared memory there are no bunches: a weight is
copied when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists.actions import (
    Action,
    Await,
    Back,
    Barrier,
    Bunch,
    Complete,
    Fetch,
    Free,
    Give,
    Launch,
    Limit,
    Opening,
    Release,
    Rerun,
    RunPasses,
    RunSegment,
    Update,
)
from fourfold.plans.lists.comm_batches import Bucket
from fourfold.plans.lists.messages import StageMessages
from fourfold.plans.lists.paths import Paths
from fourfold.plans.lowering.lifetimes import frees, order_of_use, reads, writes
from fourfold.plans.lowering.program import Compute, Move, Program, Repeat, inside


@dataclass(frozen=True)
class StageList:
    """The lists of one stage for one size of micro-batch."""

    messages: StageMessages
    _last: dict[tuple[Bucket, ...], tuple[Action, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def program(self) -> Program:
        return self.messages.program

    @property
    def paths(self) -> Paths:
        return self.messages.paths

    @cached_property
    def frees(self) -> list[tuple[str, ...]]:
        """After each step, the slots that nobody reads any more."""
        return frees(self.program)

    @cached_property
    def in_place(self) -> frozenset[int]:
        """The identities of the ops done in place."""
        return frozenset(id(self.program.steps[k]) for k in self.messages.overwriting)

    @cached_property
    def begin(self) -> tuple[Action, ...]:
        """Before the first forward: weights in shared memory are read when all ranks have updated theirs."""
        return (Barrier(),) if self.messages.weights_shared else ()

    # --- forward ---

    @cached_property
    def forward(self) -> tuple[Action, ...]:
        walk, at = _Forward(self), 0
        out: list[Action] = [*walk.begin()]
        for low, high in self.program.segments:
            out += [*walk.steps(at, low), self._segment(low, high, walk)]
            at = high
        return (*out, *walk.steps(at, len(self.program.steps)))

    def _segment(self, low: int, high: int, walk: _Forward) -> RunSegment:
        steps = self.program.steps
        made = {slot for step in steps[low:high] for slot in writes(step)}
        given = {slot for step in steps[low:high] for slot in reads(step)} - made
        later = {slot for step in steps[high:] for slot in reads(step)} | set(self.program.slots.values())
        buffers = given & {p.name for p in self.messages.graph.parameters if p.buffer}
        return RunSegment(
            actions=tuple(walk.steps(low, high)),
            again=tuple(_ForwardAgain(self).steps(low, high)),
            given=tuple(sorted(given)),
            results=tuple(sorted(made & later)),
            buffers=tuple(sorted(buffers)),
            spent=tuple(slot for k in range(low, high) for slot in self.frees[k] if slot in given),
        )

    # --- backward ---

    @cached_property
    def backward(self) -> tuple[Action, ...]:
        """That of a micro-batch after which more follow."""
        return tuple(action for _, actions in self._backward for action in actions)

    def last(self, coords: Coords) -> tuple[Action, ...]:
        """That of the last micro-batch, with the sums of the gradients that it completes: each bucket leaves when its last
        gradient has come and those before it have left."""
        found = self.messages.buckets(coords)
        if found not in self._last:
            sent = self._sent(found)
            self._last[found] = tuple(
                action for number, actions in self._backward for action in (*actions, *map(Launch, sent.get(number, ())))
            )
        return self._last[found]

    def _sent(self, found: tuple[Bucket, ...]) -> dict[int, list[Bucket]]:
        """Buckets by the number of the step after whose backward they leave."""
        first = order_of_use(self.program)
        out: dict[int, list[Bucket]] = {}
        at = len(self.program.steps) - 1
        for bucket in found:
            at = min(at, *(first.get(name, 0) for name in bucket.names))
            out.setdefault(at, []).append(bucket)
        return out

    @cached_property
    def _backward(self) -> tuple[tuple[int, tuple[Action, ...]], ...]:
        """By the number of a step of the program, from the last: what is done for its backward."""
        runs = [action for action in self.forward if isinstance(action, RunSegment)]
        segments = {high - 1: run for (_, high), run in zip(self.program.segments, runs, strict=True)}
        again = {k for low, high in self.program.segments for k in range(low, high)}
        walk, out = _Backward(self.messages), []
        for number in reversed(range(len(self.program.steps))):
            actions: list[Action] = [Rerun(segments[number])] if number in segments else []
            for step in reversed(inside(self.program.steps[number])):
                actions += walk.step(step, again=number in again)
            out.append((number, tuple(actions)))
        return (*out, (-1, tuple(walk.end())))

    # --- the end of a step ---

    def finish(self, coords: Coords) -> tuple[Action, ...]:
        """After the last backward: what is left of the sums of gradients."""
        messages = self.messages
        reached = {move for move in messages.moves if id(move) in messages.backwards}
        left = [bunch for bunch in messages.returns if not reached.issuperset(bunch.moves)]
        out: list[Action] = [Launch(bunch) for bunch in left if not reached.isdisjoint(bunch.moves)]
        out += [Limit(0)] if messages.moves else []
        out += [Barrier()] if messages.weights_shared else []
        found = messages.buckets(coords)
        out += [Complete(found)] if found else []
        return (*out, *messages.sums)

    @cached_property
    def update(self) -> tuple[Action, ...]:
        """The optimizer's step and, where ranks update slices (ZeRO-1), the gathering of those."""
        return (Update(tuple(self.program.updates)), *self.messages.slices)


class _Forward:
    """The actions of forward's steps."""

    def __init__(self, lists: StageList) -> None:
        self.lists, self.messages = lists, lists.messages
        self.prefetch = lists.paths.policy.prefetch
        self.gathers = self.messages.gathers if self.messages.moves else ()
        self.home = {move: k for k, bunch in enumerate(self.gathers) for move in bunch.moves}
        self.moves = frozenset(move.target for move in self.messages.moves)
        self.sent, self.awaited = 0, set[int]()

    def begin(self) -> Iterator[Action]:
        return self._send(self.prefetch)

    def _send(self, count: int) -> Iterator[Action]:
        """Launch the first so many bunches, but for those that were launched before."""
        while self.sent < min(count, len(self.gathers)):
            yield Launch(self.gathers[self.sent])
            self.sent += 1

    def steps(self, low: int, high: int) -> Iterator[Action]:
        for number in range(low, high):
            step = self.lists.program.steps[number]
            if isinstance(step, Repeat):
                yield _passes(step)
            elif isinstance(step, Move) and step.target in self.moves:
                yield from self._fetch(step)
            else:
                yield step
            if self.lists.frees[number]:
                yield Free(self.lists.frees[number])

    def _fetch(self, move: Move) -> Iterator[Action]:
        if self.messages.weights_shared:
            yield Fetch(move)
            return
        k = self.home[move]
        yield from self._send(k + 1 + self.prefetch)
        if k not in self.awaited:
            self.awaited.add(k)
            yield Await(self.gathers[k])
        yield Fetch(move, self.gathers[k])


class _ForwardAgain(_Forward):
    """The actions of a segment's second run: weights one by one."""

    def _fetch(self, move: Move) -> Iterator[Action]:
        if self.messages.weights_shared:
            yield Fetch(move)
            return
        bunch = Bunch(f"alone {move.target}", (move,), (move.exchange.steps[0],))
        yield from (Launch(bunch), Await(bunch), Fetch(move, bunch))


def _passes(step: Repeat) -> RunPasses:
    """Passes; where the exchange that brings a pass its examples can overlap, it is launched before the pass ahead of it."""
    openings = [_opening(step, k) for k in range(len(step.bodies))]
    bodies = []
    for k, (body, opening) in enumerate(zip(step.bodies, openings, strict=True)):
        launched = [Launch(message) for message in openings[k + (k > 0) : k + 2] if message is not None]
        opened = [Await(opening)] if opening is not None else []
        rest = (s for s in body if opening is None or s is not opening.move)
        bodies.append((*launched, *opened, *rest))
    return RunPasses(step, tuple(bodies))


def _opening(step: Repeat, number: int) -> Opening | None:
    entry = step.entries[0][0]
    first = next((s for s in step.bodies[number] if isinstance(s, Move) and s.source == entry), None)
    return Opening(f"pass {number}", first, number) if first is not None and first.exchange.overlaps else None


class _Backward:
    """The actions of the backward of each step, from the last to the first."""

    def __init__(self, messages: StageMessages) -> None:
        self.messages, self.policy, self.backwards = messages, messages.paths.policy, messages.backwards
        divided = bool(messages.moves)
        self.users = messages.users if divided else ()
        self.number = {id(user): k for k, user in enumerate(self.users)}
        self.first = {
            move: k for k, user in reversed(list(enumerate(self.users))) for move in messages.backward_weights[id(user)]
        }
        self.home = {move: bunch for bunch in messages.refills for move in bunch.moves} if divided else {}
        self.target = {move: bunch for bunch in messages.returns for move in bunch.moves} if divided else {}
        self.gathered = frozenset(move.target for move in messages.moves)
        self.sent, self.awaited = set[Bunch](), set[Bunch]()
        self.here: dict[Move, None] = {}
        self.given: dict[Bunch, set[Move]] = {}

    def step(self, step: Compute | Move, *, again: bool) -> Iterator[Action]:
        """`again`: it is in a segment, whose second run has its weights at hand."""
        if id(step) not in self.backwards:
            return
        if isinstance(step, Compute):
            yield Back(step) if again or id(step) not in self.number else Back(step, tuple(self._refill(step)))
        else:
            yield Back(step, (), tuple(self._give(step)) if step.target in self.gathered else ())

    def end(self) -> Iterator[Action]:
        """What is still here: weights that are not trained, so that no gradient of theirs ends their use."""
        return map(Release, list(self.here))

    def _refill(self, step: Compute) -> Iterator[Action]:
        """What an op's backward reads, and what those of the ops before it will."""
        number = self.number[id(step)]
        yield from self._release_spent(number)
        for user in reversed(self.users[max(number - self.policy.prefetch, 0) : number + 1]):
            for bunch in dict.fromkeys(
                self.home[move] for move in self.messages.backward_weights[id(user)] if move in self.home
            ):
                if bunch not in self.sent:
                    self.sent.add(bunch)
                    yield Launch(bunch)
        for move in self.messages.backward_weights[id(step)]:
            source = self.home.get(move)
            if source is not None and source not in self.awaited:
                self.awaited.add(source)
                yield Await(source)
            if move not in self.here:
                self.here[move] = None
                yield Fetch(move, source)

    def _release_spent(self, number: int) -> Iterator[Action]:
        """Of the weights that are not trained, those that no op up to this one reads."""
        for move in [m for m in self.here if m.value not in self.messages.trained and self.first[m] > number]:
            del self.here[move]
            yield Release(move)

    def _give(self, move: Move) -> Iterator[Action]:
        bunch = self.target.get(move)
        if move in self.here:
            del self.here[move]
            yield Release(move)
        yield Give(move, bunch)
        if bunch is not None:
            given = self.given.setdefault(bunch, set())
            given.add(move)
            if len(given) == len(bunch.moves):
                yield from (Launch(bunch), Limit(self.policy.sums_in_flight))
