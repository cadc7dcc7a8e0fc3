"""Records of what a rank sends, fetches, frees and updates, written only while recording: tests compare them with its lists
(`plans.lists.records`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fourfold.plans.lists.records import Record


class Journal:
    """The records of one rank; none are written outside `recording`."""

    def __init__(self) -> None:
        self.records: list[Record] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Record]]:
        """Collect the records of what runs inside."""
        out: list[Record] = []
        self.records = out
        try:
            yield out
        finally:
            self.records = None

    def note(self, kind: str, *, path: str = "", ranks: tuple[int, ...] = (), size: int = 0, name: str = "") -> None:
        if self.records is not None:
            self.records.append(Record(kind, path, ranks, size, name))
