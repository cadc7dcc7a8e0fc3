"""What a rank sends, fetches, frees and updates, written down while somebody asks for it: to be compared with its lists
(`plans.lists.records`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fourfold.plans.lists.records import Record


class Journal:
    """The records of one rank; none are kept unless `recording` is entered."""

    def __init__(self) -> None:
        self.records: list[Record] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Record]]:
        """Collect what happens inside."""
        out: list[Record] = []
        self.records = out
        try:
            yield out
        finally:
            self.records = None

    def note(self, kind: str, *, path: str = "", ranks: tuple[int, ...] = (), size: int = 0, name: str = "") -> None:
        if self.records is not None:
            self.records.append(Record(kind, path, ranks, size, name))
