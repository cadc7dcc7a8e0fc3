"""How long a list of items takes when messages overlap with work.

An item that `starts` a message takes no time itself; messages travel one after the other. An item that `awaits` a message waits
until it has arrived. Left out: what messages under way cost the cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fourfold.oracle.time.items import Category, Item


@dataclass
class Overlap:
    """The state of a rank that runs a list of items. All in seconds."""

    blocked: float = 0.0  # waiting and communicating, which more cores do not speed up
    work: float = 0.0
    busy_work: float = 0.0  # the work as long as it takes with all cores busy
    mean_work: float = 0.0  # the work of an average rank
    last_arrival: float = 0.0  # when the last message is through
    terms: dict[Category, float] = field(default_factory=dict)  # of the work
    waits: dict[Category, float] = field(default_factory=dict)  # of `blocked`
    arrivals: dict[str, tuple[float, Category]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.work + self.blocked

    @property
    def remaining(self) -> float:
        """How long messages still travel after the last item."""
        return max(self.last_arrival - self.now, 0.0)

    def _wait(self, category: Category, seconds: float) -> None:
        self.blocked += seconds
        self.waits[category] = self.waits.get(category, 0.0) + seconds

    def take(self, item: Item) -> None:
        if item.starts:
            self.last_arrival = max(self.last_arrival, self.now) + item.seconds
            self.arrivals[item.starts] = (self.last_arrival, item.category)
            return
        if item.awaits:
            then, category = self.arrivals.get(item.awaits, (0.0, item.category))
            self._wait(category, max(then - self.now, 0.0))
        elif item.is_blocking:
            self._wait(item.category, item.seconds)
        else:
            self.work += item.seconds
            self.busy_work += item.seconds * item.busy
            self.mean_work += item.seconds * item.mean_over_max
            self.terms[item.category] = self.terms.get(item.category, 0.0) + item.seconds


def overlap(items: Iterable[Item]) -> Overlap:
    """Run the items in order."""
    out = Overlap()
    for item in items:
        out.take(item)
    return out
