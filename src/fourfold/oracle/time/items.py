"""Pieces of a stage's work with their times: the words of estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Category = Literal["compute", "gradient_exchange", "layer_exchange", "halo", "pipeline", "update", "other"]
CATEGORIES: tuple[Category, ...] = ("compute", "gradient_exchange", "layer_exchange", "halo", "pipeline", "update", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A piece of work of all ranks of a stage: seconds of the slowest alone, and how much longer with all cores busy."""

    category: Category
    label: str
    seconds: float
    busy: float = 1.0
    mean_over_max: float = 1.0  # what an average rank has to do of it, against the slowest
    spread: float = 0.0  # seconds, one quartile to the other
    is_blocking: bool = False  # whether the ranks wait for each other in it
    source: str = "measured"
    host_seconds: float = 0.0  # seconds of the host that fills a device's queue with it
    pattern: str = ""  # of an exchange: its collective, the axes of its groups, and bytes as `cluster.Curve` counts them
    axes: tuple[str, ...] = ()
    size: float = 0.0
    starts: str = ""  # the message it puts on the wire, beside what follows
    awaits: str = ""  # the message it waits for


def total(items: Iterable[Item]) -> float:
    return sum(item.seconds for item in items)
