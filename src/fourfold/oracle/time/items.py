"""The categories that a step's time is divided into, and the timed pieces of a stage's work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Category = Literal["compute", "gradient_exchange", "layer_exchange", "halo", "pipeline", "update", "other"]
CATEGORY_LABELS: dict[Category, str] = {
    "compute": "compute",
    "gradient_exchange": "gradient exchange",  # sums of gradients, and weights gathered under ZeRO-3
    "layer_exchange": "activation exchange",  # activations, and statistics of norms, between ranks of a stage
    "halo": "halo exchange",
    "pipeline": "waiting for other stages",
    "update": "weight update",
    "other": "other",
}
"""What reports call each category: the one list of them."""
CATEGORIES: tuple[Category, ...] = tuple(CATEGORY_LABELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One kernel, copy or collective of a stage, timed for all its ranks at once."""

    category: Category
    label: str
    seconds: float  # of the slowest rank, alone on its node
    busy: float = 1.0  # how many times longer it takes with all cores of the node busy
    mean_over_max: float = 1.0  # the mean rank's seconds over the slowest rank's
    spread: float = 0.0  # seconds between the quartiles
    is_blocking: bool = False  # whether the ranks wait for each other in it
    source: str = "measured"
    host_seconds: float = 0.0  # of the host, to launch it on a device
    pattern: str = ""  # of an exchange: its collective, the axes of its groups, and bytes as `cluster.Curve` counts them
    axes: tuple[str, ...] = ()
    size: float = 0.0
    starts: str = ""  # the message it sends, which travels while later items run
    awaits: str = ""  # the message it waits for


def total(items: Iterable[Item]) -> float:
    return sum(item.seconds for item in items)
