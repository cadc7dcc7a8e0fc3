"""What weights that are stored divided cost: gathered for the op that reads them, again for its backward, and their gradients
dealt out to the owners (ZeRO-3).

Where the ranks share a host, a weight is copied from common memory and a gradient goes through it: as measured or, where
nothing was, n bytes moved there twice for a copy, and for a gradient 2 n plus three times the p-1 p-ths that others add.
Between hosts they travel in bunches of a few megabytes beside the computing, one bunch ahead of it, sums of gradients two at
a time (`runtime.wired`). For backward, bunches hold what backwards need and no more: that of an embedding needs no weight.
In segments that run again, weights are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from fourfold.cluster import Collective
from fourfold.oracle.items import Item
from fourfold.oracle.meeting import Meeting
from fourfold.plans import buckets
from fourfold.plans.exchange import Step
from fourfold.plans.program import Compute, Move, Program, inside


def _homes(bunches: list[list[Move]]) -> dict[Move, int]:
    return {move: k for k, bunch in enumerate(bunches) for move in bunch}


class Gathers:
    """The items of one stage's gathered weights, asked for in the order of its forward and then of its backward."""

    def __init__(self, program: Program, meeting: Meeting, wanted: Callable[[Compute], list[Move]]) -> None:
        """`wanted`: the gathered weights that an op's backward needs."""
        moves = buckets.gathered(program)
        self.meeting, self.moves, self.wanted = meeting, frozenset(moves), wanted
        self.near = {m for m in moves if meeting.prices.together(meeting.groups(m.exchange.steps[0].axes))}
        far = [m for m in moves if m not in self.near]
        self.there = self._bunched(far, [m.exchange.steps[0] for m in far])
        self.back = self._bunched(far, [m.exchange.adjoint.steps[0] for m in far])
        self.homes, self.returns = _homes(self.there), _homes(self.back)
        self.again, self.users = self._refills(program, far) if far else ([], {})
        self.homes_again = _homes(self.again)
        self.begin()

    def _refills(self, program: Program, far: list[Move]) -> tuple[list[list[Move]], dict[int, list[int]]]:
        """Bunches for backward and, by the identity of an op, those to be sent for as its backward begins: its own and those of
        the op before it that needs any."""
        rerun = {number for low, high in program.segments for number in range(low, high)}
        ops = [i for n, step in enumerate(program.steps) if n not in rerun for i in inside(step) if isinstance(i, Compute)]
        wants = {id(op): [m for m in self.wanted(op) if m in self.homes] for op in ops}
        wants = {op: found for op, found in wants.items() if found}
        last = {move: n for n, found in enumerate(wants.values()) for move in found}
        place = {move: n for n, move in enumerate(far)}
        order = sorted(last, key=lambda move: (last[move], place[move]))
        bunches = self._bunched(order, [m.exchange.steps[0] for m in order])
        homes, before, users = _homes(bunches), list[int](), dict[int, list[int]]()
        for op, found in wants.items():
            own = list(dict.fromkeys(homes[move] for move in found))
            users[op] = list(dict.fromkeys((*own, *before)))
            before = own
        return bunches, users

    def begin(self) -> None:
        """Before a forward, and before a backward: nothing is on its way."""
        self.came: dict[int, set[Move]] = {}
        self.sent: list[str] = []
        self.there_again: set[Move] = set()

    def _bunched(self, moves: list[Move], steps: list[Step]) -> list[list[Move]]:
        items = [self.meeting.item(m.value) for m in moves]
        return [[moves[k] for k in group] for group in buckets.bunched(steps, items, items)]

    def fetch(self, move: Move) -> list[Item]:
        """Before the first op that reads the weight: its bunch awaited, and with it the next one sent for."""
        if move in self.near:
            return [self._copied(move, "shared_fetch", 2.0)]
        k = self.homes[move]
        sent = [item for number in (k, k + 1) for item in self._once("gather", number, self.there)]
        return [*sent, self._awaited(move, f"gather {k}")]

    def rerun(self, move: Move) -> list[Item]:
        """By itself: in a segment that runs again, where its backward then finds the weight."""
        self.there_again.add(move)
        if move in self.near:
            return [self._copied(move, "shared_fetch", 2.0)]
        key = f"alone {move.target}"
        return [self._launched(key, {move: move.exchange.steps[0]}), self._awaited(move, key)]

    def refill(self, step: Compute) -> list[Item]:
        """Before the backward of an op: the gathered weights it needs."""
        out = [item for number in self.users.get(id(step), ()) for item in self._once("refill", number, self.again)]
        for move in self.wanted(step):
            if move in self.homes_again:
                out.append(self._awaited(move, f"refill {self.homes_again[move]}"))
            elif move not in self.there_again:
                out += self.rerun(move)
        return out

    def _once(self, word: str, number: int, bunches: list[list[Move]]) -> list[Item]:
        """A bunch put on the wire, unless there is none or it was."""
        key = f"{word} {number}"
        if number >= len(bunches) or key in self.sent:
            return []
        return [self._launched(key, {m: m.exchange.steps[0] for m in bunches[number]})]

    def give(self, move: Move) -> list[Item]:
        """The weight's gradient."""
        if move in self.near:
            count = len(self.meeting.groups(move.exchange.steps[0].axes)[0])
            return [self._copied(move, "shared_give", 2 + 3 * (count - 1) / count)]
        k = self.returns[move]
        came = self.came.setdefault(k, set())
        came.add(move)
        if came != set(self.back[k]):
            return []
        before = [key for key in self.sent if key.startswith("sum ")]
        out = [self._launched(f"sum {k}", {m: m.exchange.adjoint.steps[0] for m in self.back[k]})]
        if len(before) >= buckets.SUMS_AHEAD:
            out.append(self._awaited(move, before[-buckets.SUMS_AHEAD]))
        return out

    def _copied(self, move: Move, kind: Collective, times: float) -> Item:
        step = move.exchange.steps[0]
        size = self.meeting.numel(step.target) * self.meeting.item(move.value)
        cost = self.meeting.prices.measured(kind, self.meeting.groups(step.axes), size)
        if cost is None:
            return self.meeting.copied("gradient_exchange", move.value, times * size)
        return Item(category="gradient_exchange", label=move.value, seconds=cost.seconds, spread=cost.spread or 0.0,
                    source="measured", size=size)  # fmt: skip

    def _launched(self, key: str, steps: dict[Move, Step]) -> Item:
        """A bunch put on the wire."""
        self.sent.append(key)
        size = sum(self.meeting.given(step, self.meeting.item(move.value)) for move, step in steps.items())
        axes = next(iter(steps.values())).axes
        return self.meeting.met("gradient_exchange", key, "all_to_all", axes, size, starts=key)

    def _awaited(self, move: Move, key: str) -> Item:
        return Item(category="gradient_exchange", label=move.value, seconds=0.0, awaits=key)
