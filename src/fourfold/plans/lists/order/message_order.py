"""Whether the messages between stages meet: all ranks' lists are played under the rules of NCCL, which has no tags.

- A rank has a stream for what it computes and one for each communicator. What stands in a stream runs in order.
- A call starts when the one before it on its stream is done, and what the rank computed before it. It is done when each of its
  parts has met its partner: the k-th message from one rank to another on a communicator is the k-th received.
- A compute action starts when the one before it is done, and the calls it waits for; all ranks of its stage run it together.

With the partners fixed, these are one relation "waits for" between starts and ends. If it has no cycle, every step comes to an
end; in the order of time nothing is left out, however the streams progress. With `one_stream` all streams of a rank are one, as
on a device whose hardware queues are shared.

Not modelled: a send that is done before its receive is there, because NCCL buffered it. What passes without buffers passes
with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest

from fourfold.errors import Infeasible
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.order.stage_calls import (
    LOSS,
    Boundary,
    Call,
    Entry,
    Key,
    Message,
    Places,
    Ranks,
    boundaries,
    calls,
    numbers,
    tensors_of,
)
from fourfold.plans.lists.stage_transfer import differing_message
from fourfold.plans.spec.schedule import ASYNCHRONOUS


def check_messages(lowered: LoweredPlan) -> None:
    """Refuse a plan whose ranks would wait for each other for ever, or take one message for another."""
    if len(lowered.parts) == 1 or lowered.plan.schedule in ASYNCHRONOUS:  # those are not run
        return
    if fault := message_fault(lowered):
        raise Infeasible(
            f"schedule {lowered.plan.schedule} of {len(lowered.parts)} stages and {lowered.plan.microbatches} micro-batches: "
            f"{fault}; use 1f1b-so, 1f1b-sno, gpipe or interleaved"
        )


def message_fault(lowered: LoweredPlan, *, one_stream: bool = False) -> str:
    """The first message that does not meet its own, or what waits for ever; nothing where all is well.

    Sets of ranks are played first, which takes milliseconds however many ranks they have; ranks, if that finds a fault.
    """
    places = Places(lowered)
    lists = {k: calls(places, k) for k in range(len(lowered.places))}
    if not play(lists, one_stream=one_stream) and not _differing(lowered):
        return ""
    return play(rank_calls(lowered), one_stream=one_stream)


def passes_in_one_stream(lowered: LoweredPlan) -> bool:
    """Whether a step would end even if all that a rank computes, sends and receives ran one after the other."""
    return not message_fault(lowered, one_stream=True)


def rank_calls(lowered: LoweredPlan) -> dict[int, list[Entry]]:
    """What each rank does."""
    ranks = Ranks(lowered)
    return {rank: calls(ranks, rank) for rank in range(lowered.plan.size)}


def play(lists: Mapping[int, Sequence[Entry]], *, one_stream: bool = False) -> str:
    """Play what every rank does: the first fault found, or nothing."""
    game = _Game(lists, one_stream)
    return game.fault or game.matched() or game.deadlock()


def _differing(lowered: LoweredPlan) -> bool:
    """Whether one side sends other messages than the other takes."""
    for boundary in (b for b in boundaries(lowered) if b != LOSS):
        for number in numbers(lowered, boundary):
            if any(differing_message(source, target) for _, source, target in tensors_of(lowered, boundary, number)):
                return True
    return False


class _Game:
    """Starts and ends as numbered nodes, and which of them come before which."""

    def __init__(self, lists: Mapping[int, Sequence[Entry]], one_stream: bool) -> None:
        self.owner: list[tuple[int, str]] = []  # of each node: rank and action
        self.after: list[list[int]] = []
        self.before: list[int] = []  # how many nodes each waits for
        self.sides: dict[tuple[Boundary, int, int], tuple[list[_End], list[_End]]] = {}
        self.shared: dict[str, int] = {}
        self.fault = ""
        for rank, entries in lists.items():
            self._add(rank, entries, one_stream)

    def _add(self, rank: int, entries: Sequence[Entry], one_stream: bool) -> None:
        computed = -1
        tails: dict[Boundary, int] = {}
        ends: dict[Key, int] = {}
        for entry in entries:
            if isinstance(entry, Call):
                start, end = self._node(rank, entry.action), self._node(rank, entry.action)
                self._edge(computed, start)
                self._edge(tails.get(entry.boundary, -1), start)
                self._edge(start, end)
                tails[entry.boundary] = ends[entry.key] = end
                for part in entry.parts:
                    sender, receiver = (rank, part.peer) if part.sends else (part.peer, rank)
                    side = self.sides.setdefault((entry.boundary, sender, receiver), ([], []))
                    side[not part.sends].append((start, end, part.message))
                computed = end if one_stream else computed
                continue
            node = self.shared.get(entry.action, -1) if entry.meets else -1
            if node < 0:
                node = self._node(rank, entry.action)
                if entry.meets:
                    self.shared[entry.action] = node
            self._edge(computed, node)
            for key in entry.waits:
                if key not in ends and not self.fault:
                    self.fault = f"rank {rank} waits in {entry.action} for {key[0]} {key[1]}, which it never posts before"
                self._edge(ends.get(key, -1), node)
            computed = node

    def _node(self, rank: int, action: str) -> int:
        self.owner.append((rank, action))
        self.after.append([])
        self.before.append(0)
        return len(self.owner) - 1

    def _edge(self, first: int, then: int) -> None:
        if first >= 0:
            self.after[first].append(then)
            self.before[then] += 1

    def matched(self) -> str:
        """Let the k-th send meet the k-th receive; what is wrong with that."""
        alone = ""
        for (boundary, sender, receiver), (sends, receives) in self.sides.items():
            for sent, received in zip_longest(sends, receives):
                if sent is None or received is None:
                    rank, other, verb = (sender, receiver, "sends") if received is None else (receiver, sender, "receives")
                    end: _End = sent or received
                    word = "to" if received is None else "from"
                    alone = alone or (
                        f"rank {rank} in {self.owner[end[0]][1]} {verb} {end[2]} {word} rank {other}, which never "
                        f"{'receives' if received is None else 'sends'} it"
                    )
                    continue
                if sent[2] != received[2]:
                    return (
                        f"on communicator {boundary} rank {sender} in {self.owner[sent[0]][1]} sends {sent[2]}, which rank "
                        f"{receiver} in {self.owner[received[0]][1]} takes for {received[2]}"
                    )
                self._edge(sent[0], received[1])
                self._edge(received[0], sent[1])
        return alone

    def deadlock(self) -> str:
        """What waits for itself, after everything that can be done is done."""
        left, before = len(self.before), list(self.before)
        ready = [node for node, count in enumerate(before) if not count]
        while ready:
            left -= 1
            for then in self.after[ready.pop()]:
                before[then] -= 1
                if not before[then]:
                    ready.append(then)
        return self._cycle([node for node, count in enumerate(before) if count]) if left else ""

    def _cycle(self, waiting: list[int]) -> str:
        stuck = set(waiting)
        cause = {then: first for first in waiting for then in self.after[first] if then in stuck}
        seen: dict[int, int] = {}
        node = waiting[0]
        while node not in seen:
            seen[node] = len(seen)
            node = cause[node]
        cycle = [self.owner[n] for n, k in seen.items() if k >= seen[node]]
        first = cycle.index(min(cycle))
        steps = [*cycle[first:], *cycle[:first], cycle[first]]
        steps = [steps[0], *(b for a, b in pairwise(steps) if a != b)]
        (rank, action), *others = steps
        return f"rank {rank} in {action} waits for " + ", that for ".join(f"rank {r} in {a}" for r, a in others)


_End = tuple[int, int, Message]
"""One side of a message: the nodes at which its call starts and ends, and what it is."""
