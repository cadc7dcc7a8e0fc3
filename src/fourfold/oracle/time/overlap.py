"""Work in line and messages beside it: when a list of items is through, if some of them travel while the others run.

An item that `starts` something takes no time of the list itself: it is put on the wire, where messages go one after the
other. An item that `awaits` it waits until it is there. Left out: what messages under way cost the cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fourfold.oracle.time.items import Category, Item


@dataclass
class Streamed:
    """A list of items played through. All in seconds."""

    still: float = 0.0  # waiting and communicating, which no core of ours speeds up
    work: float = 0.0
    crowded: float = 0.0  # the work with all cores busy
    shared: float = 0.0  # the work of an average rank
    wire: float = 0.0  # when the last message is through
    terms: dict[Category, float] = field(default_factory=dict)  # of the work
    waits: dict[Category, float] = field(default_factory=dict)  # of what is still
    arrivals: dict[str, tuple[float, Category]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.work + self.still

    @property
    def left(self) -> float:
        """How long messages are still under way when the list is through."""
        return max(self.wire - self.now, 0.0)

    def _wait(self, category: Category, seconds: float) -> None:
        self.still += seconds
        self.waits[category] = self.waits.get(category, 0.0) + seconds

    def take(self, item: Item) -> None:
        if item.starts:
            self.wire = max(self.wire, self.now) + item.seconds
            self.arrivals[item.starts] = (self.wire, item.category)
            return
        if item.awaits:
            then, category = self.arrivals.get(item.awaits, (0.0, item.category))
            self._wait(category, max(then - self.now, 0.0))
        elif item.is_blocking:
            self._wait(item.category, item.seconds)
        else:
            self.work += item.seconds
            self.crowded += item.seconds * item.busy
            self.shared += item.seconds * item.mean_over_max
            self.terms[item.category] = self.terms.get(item.category, 0.0) + item.seconds


def streamed(items: Iterable[Item]) -> Streamed:
    """The items in order."""
    out = Streamed()
    for item in items:
        out.take(item)
    return out
