"""The periodic part of a rank's action list.

In steady state the action list of a pipeline is periodic: each period does the same for later micro-batches. Once a replay's
state is that of a period ago, but for the numbers of the micro-batches, the remaining identical periods are skipped. The
actions of peers must be periodic too, as far as the list depends on them; periods at either end where they are not are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fourfold.plans.lists.rank_schedule import StageAction

Turns = Mapping[tuple[int, str, int], tuple[int, int]]
"""By stage, way and micro-batch: the place an action is done at, and at which of its turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """`times` periods of `period` tasks from task `begin` on, each `shift` micro-batches later than the one before."""

    begin: int
    period: int
    shift: int
    times: int
    since: Mapping[tuple[int, str], int] = field(default_factory=dict)  # by stage and way of others: the first micro-batch

    def number(self, at: int) -> int | None:
        """Which period begins at a task, if one does."""
        number, inside = divmod(at - self.begin, self.period)
        return number if not inside and 0 <= number < self.times else None


def steady_state(tasks: Sequence[StageAction], turns: Turns, sizes: Sequence[int], shifts: Sequence[int]) -> SteadyState | None:
    """The periodic part of a list, by the first of several shifts under which there is one; `sizes`: of micro-batches."""
    for shift in shifts:
        found = _periodic_run(tasks, sizes, shift)
        while found is not None and found.times > 2:
            since = _peer_microbatches(tasks, turns, found)
            if since is not None:
                return replace(found, since=since)
            found = replace(found, begin=found.begin + found.period, times=found.times - 2)
    return None


def _periodic_run(tasks: Sequence[StageAction], sizes: Sequence[int], shift: int) -> SteadyState | None:
    """The longest run around the middle of the list in which every task comes again, `shift` micro-batches later."""

    def follows(task: StageAction, other: StageAction) -> bool:
        same = task.kind == other.kind and task.stage == other.stage and task.peer == other.peer and task.way == other.way
        same = same and task.last == other.last
        later = task.microbatch + shift == other.microbatch
        return same and later and sizes[task.microbatch] == sizes[other.microbatch]

    middle = next((k for k, task in enumerate(tasks) if 2 * k >= len(tasks) and task.kind == "B"), len(tasks))
    again = next((k for k in range(middle + 1, len(tasks)) if follows(tasks[middle], tasks[k])), None)
    if again is None:
        return None
    period, begin, end = again - middle, middle, middle
    while begin > 0 and follows(tasks[begin - 1], tasks[begin - 1 + period]):
        begin -= 1
    while end + period < len(tasks) and follows(tasks[end], tasks[end + period]):
        end += 1
    return SteadyState(begin=begin, period=period, shift=shift, times=(end + period - begin) // period)


def _peer_microbatches(tasks: Sequence[StageAction], turns: Turns, found: SteadyState) -> dict[tuple[int, str], int] | None:
    """By peer, its first micro-batch in the periodic part; None where the turns of a peer are not evenly spaced in it."""
    spans: dict[tuple[int, str], tuple[int, int]] = {}
    for task in tasks[found.begin : found.begin + found.period]:
        if task.kind in ("receive", "send"):
            low, high = spans.get((task.peer, task.way), (task.microbatch, task.microbatch))
            last = task.microbatch + (found.times - 1) * found.shift
            spans[task.peer, task.way] = min(low, task.microbatch), max(high, last)
    spacing: dict[int, int] = {}
    for (stage, way), (low, high) in spans.items():
        for m in range(low, high - found.shift + 1):
            (place, turn), (_, then) = turns[stage, way, m], turns[stage, way, m + found.shift]
            if spacing.setdefault(place, then - turn) != then - turn:
                return None
    return {key: low for key, (low, _) in spans.items()}
