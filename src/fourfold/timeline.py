"""What happened when: the actions of every rank with their times. Measured by the runtime, predicted by the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action of one rank, or its waiting for what an action needs; seconds since the step began."""

    rank: int
    action: str
    kind: str  # F, B, receive, send, reduce, tie, wait
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in the order each rank did them."""

    events: tuple[Event, ...]

    @staticmethod
    def of(parts: Iterable[Iterable[Event]]) -> Timeline:
        return Timeline(tuple(event for part in parts for event in part))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({event.rank for event in self.events}))

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        if not self.events:
            return 0.0
        return max(e.end for e in self.events) - min(e.start for e in self.events)

    def actions(self, rank: int) -> tuple[str, ...]:
        """What a rank did, waiting left out."""
        return tuple(e.action for e in self.events if e.rank == rank and e.kind != "wait")

    def spent(self, rank: int, *kinds: str) -> float:
        """Seconds a rank was at actions of these kinds."""
        return sum(e.seconds for e in self.events if e.rank == rank and e.kind in kinds)

    def waiting(self, rank: int) -> float:
        """The share of the whole time in which a rank did nothing: it waited for another, or had done its part."""
        busy = sum(e.seconds for e in self.events if e.rank == rank and e.kind != "wait")
        return max(1 - busy / self.seconds, 0.0) if self.seconds else 0.0
