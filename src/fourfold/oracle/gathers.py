"""What weights that are stored divided cost: gathered for the op that reads them, again for its backward, and their gradients
dealt out to the owners (ZeRO-3).

Where the ranks share a host, a weight is copied from common memory and a gradient goes through it: n bytes moved there twice
for a copy, and for a gradient 2 n plus three times the p-1 p-ths that others add. Between hosts they travel in bunches of a
few megabytes beside the computing, one bunch ahead of it, sums of gradients two at a time (`runtime.wired`). Left out: which
ops' backwards need no weight.
"""

from __future__ import annotations

from fourfold.oracle.items import Item
from fourfold.oracle.meeting import Meeting
from fourfold.plans import buckets
from fourfold.plans.exchange import Step
from fourfold.plans.program import Move, Program


def _homes(bunches: list[list[Move]]) -> dict[Move, int]:
    return {move: k for k, bunch in enumerate(bunches) for move in bunch}


class Gathers:
    """The items of one stage's gathered weights, asked for in the order of its forward and then of its backward."""

    def __init__(self, program: Program, meeting: Meeting) -> None:
        moves = buckets.gathered(program)
        self.meeting, self.moves = meeting, frozenset(moves)
        self.near = {m for m in moves if meeting.prices.together(meeting.groups(m.exchange.steps[0].axes))}
        far = [m for m in moves if m not in self.near]
        self.there = self._bunched(far, [m.exchange.steps[0] for m in far])
        self.back = self._bunched(far, [m.exchange.adjoint.steps[0] for m in far])
        self.homes, self.returns = _homes(self.there), _homes(self.back)
        self.begin()

    def begin(self) -> None:
        """Before a forward, and before a backward: nothing is on its way."""
        self.came: dict[int, set[Move]] = {}
        self.sent: list[str] = []

    def _bunched(self, moves: list[Move], steps: list[Step]) -> list[list[Move]]:
        items = [self.meeting.item(m.value) for m in moves]
        return [[moves[k] for k in group] for group in buckets.bunched(steps, items, items)]

    def fetch(self, move: Move, *, again: bool = False) -> list[Item]:
        """Before the first op that reads the weight, with the next bunch; `again`: before its backward, with the one before."""
        if move in self.near:
            return [self._copied(move, 2.0)]
        k = self.homes[move]
        word, beside = ("refill", k - 1) if again else ("gather", k + 1)
        out: list[Item] = []
        for number in (k, beside):
            if 0 <= number < len(self.there) and f"{word} {number}" not in self.sent:
                steps = {m: m.exchange.steps[0] for m in self.there[number]}
                out.append(self._launched(f"{word} {number}", steps))
        return [*out, self._awaited(move, f"{word} {k}")]

    def give(self, move: Move) -> list[Item]:
        """The weight's gradient."""
        if move in self.near:
            count = len(self.meeting.groups(move.exchange.steps[0].axes)[0])
            return [self._copied(move, 2 + 3 * (count - 1) / count)]
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

    def _copied(self, move: Move, times: float) -> Item:
        size = self.meeting.numel(move.exchange.steps[0].target) * self.meeting.item(move.value)
        return self.meeting.copied("gradient_exchange", move.value, times * size)

    def _launched(self, key: str, steps: dict[Move, Step]) -> Item:
        """A bunch put on the wire."""
        self.sent.append(key)
        size = sum(self.meeting.given(step, self.meeting.item(move.value)) for move, step in steps.items())
        axes = next(iter(steps.values())).axes
        return self.meeting.met("gradient_exchange", key, "all_to_all", axes, size, starts=key)

    def _awaited(self, move: Move, key: str) -> Item:
        return Item(category="gradient_exchange", label=move.value, seconds=0.0, awaits=key)
