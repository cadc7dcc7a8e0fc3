"""Memory as blocks that somebody holds: taken, held again, dropped, and gone when nobody does."""

from __future__ import annotations

from dataclasses import dataclass, field

from fourfold.oracle.memory.device_rules import DeviceRules


@dataclass(eq=False, slots=True)
class Block:
    size: int
    kind: str
    holders: int = 1
    gathered: bool = False  # a weight of which autograd keeps a note: it is gathered again for backward


@dataclass(slots=True)
class Allocator:
    """Bytes alive by kind, and what they were when their sum was largest. Sizes are those a machine's allocator counts."""

    machine: DeviceRules
    alive: dict[str, int] = field(default_factory=dict)
    total: int = 0
    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    where: str = ""
    now: str = ""  # what is going on, to be remembered with the peak

    def take(self, size: int, kind: str) -> Block:
        size = self.machine.rounded(size)
        self.alive[kind] = self.alive.get(kind, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.parts, self.where = self.total, dict(self.alive), self.now
        return Block(size, kind)

    def hold(self, block: Block) -> Block:
        block.holders += 1
        return block

    def drop(self, block: Block) -> None:
        block.holders -= 1
        assert block.holders >= 0, f"a block of {block.size} bytes ({block.kind}) was dropped twice"
        if block.holders == 0:
            self.alive[block.kind] -= block.size
            self.total -= block.size

    def pass_through(self, size: int, kind: str) -> None:
        """Take and drop: alive for a moment."""
        if size > 0:
            self.drop(self.take(size, kind))
