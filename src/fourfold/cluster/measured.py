"""What was measured on a cluster, as plain data: times of collectives by kind, group, level and message size.

A curve holds medians and spreads just as they were measured. Making it monotone, reading between its points and beyond
them is the oracle's business, and so is the table of op kernels, which lies in a file of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from fourfold.errors import InvalidInput

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "shared_gather",
    "shared_sum",
    "shared_fetch",
    "shared_give",
]
"""The last four go through memory that the ranks of one node share: small gathers, sums of gradients and, where weights are
stored divided, a weight copied together and a gradient dealt out, which wait for nobody: their times are a rank's own work."""
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
NON_WAITING: tuple[Collective, ...] = ("shared_fetch", "shared_give")
"""Those that are a rank's own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The times of one collective in groups of one size that reach up to one link level.

    A size is in bytes: of the tensor (`all_reduce`, `broadcast`, `send`, `shared_sum`, `shared_fetch`, `shared_give`), of one
    rank's part (`all_gather`, `reduce_scatter`, `shared_gather`), of all that a rank gives to others (`all_to_all`).
    """

    collective: Collective
    level: str  # the name of a link
    ranks: int  # in one group
    groups: int = 1  # that did the same at the same time
    sizes: tuple[float, ...]  # bytes, rising
    seconds: tuple[float, ...]  # medians
    spreads: tuple[float, ...] = ()  # seconds between the quartiles; none if not recorded
    source: str = ""

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise InvalidInput(f"a curve of {self.collective!r}; collectives are {', '.join(COLLECTIVES)}")
        if self.ranks < 2 or self.groups < 1:
            raise InvalidInput(f"{self.name} by {self.ranks} ranks in {self.groups} groups; at least 2 and 1 are needed")
        self._check_points()

    def _check_points(self) -> None:
        points, spreads = len(self.sizes), len(self.spreads)
        if not points or len(self.seconds) != points or spreads not in (0, points):
            found = f"{points} sizes, {len(self.seconds)} times and {spreads} spreads"
            raise InvalidInput(f"{self.name} has {found}; give as many of each")
        if not all(low < high for low, high in pairwise((0.0, *self.sizes, math.inf))):
            raise InvalidInput(f"{self.name}: sizes must be positive and rise")
        if not all(0 < s < math.inf for s in self.seconds) or not all(0 <= s < math.inf for s in self.spreads):
            raise InvalidInput(f"{self.name}: times must be positive and spreads not negative")

    @property
    def name(self) -> str:
        return f"measured {self.collective} over {self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The times of one small exchange by how long its ranks computed before it, where they take turns on cores: the longer, the
    further apart they come to it, and the less of it is in their caches. The first is what curves were measured with."""

    level: str  # the name of a link
    ranks: int  # in one group
    groups: int = 1  # that did the same at the same time
    computing: tuple[float, ...]  # seconds before the exchange, rising
    seconds: tuple[float, ...]
    source: str = ""

    def __post_init__(self) -> None:
        name = self.name
        if self.ranks < 2 or self.groups < 1:
            raise InvalidInput(f"{name}; at least 2 ranks and 1 group are needed")
        if not self.computing or len(self.seconds) != len(self.computing):
            raise InvalidInput(
                f"{name} have {len(self.computing)} computing times and {len(self.seconds)} times; give as many of each"
            )
        if not all(low < high for low, high in pairwise((0.0, *self.computing, math.inf))):
            raise InvalidInput(f"{name}: computing times must be positive and rise")
        if not all(0 < s < math.inf for s in self.seconds):
            raise InvalidInput(f"{name}: times must be positive")

    @property
    def name(self) -> str:
        return f"measured waits of {self.groups} groups of {self.ranks} ranks over {self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything measured on a cluster. Nothing, unless it was calibrated."""

    curves: tuple[Curve, ...] = ()
    waits: tuple[Waits, ...] = ()
    kernels: str = ""  # name of the table of op kernels in the cache

    def __post_init__(self) -> None:
        names = [f"{curve.name} by {curve.ranks} ranks in {curve.groups} groups" for curve in self.curves]
        for name, times in Counter([*names, *(waits.name for waits in self.waits)]).items():
            if times > 1:
                raise InvalidInput(f"{name} is given twice; keep one")

    def curves_of(self, collective: Collective, level: str) -> tuple[Curve, ...]:
        """The curves of one collective at one level, by group size and number of groups."""
        found = (c for c in self.curves if c.collective == collective and c.level == level)
        return tuple(sorted(found, key=lambda c: (c.ranks, c.groups)))
