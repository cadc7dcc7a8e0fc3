"""The surrogate as a plain problem: one choice for each group, costs of groups and of pairs of groups.

minimise   sum_k cost_k[x_k]   + sum_(j,k) cost_jk[x_j, x_k]
subject to sum_k memory_k[x_k] + sum_(j,k) memory_jk[x_j, x_k] <= capacity
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Costs in seconds, memory in bytes; of groups by choice, of pairs by the choices of both."""

    costs: tuple[np.ndarray, ...]
    memory: tuple[np.ndarray, ...]
    pairs: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)
    pair_memory: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def cost(self, choice: tuple[int, ...]) -> float:
        return _valued(self.costs, self.pairs, choice)

    def bytes(self, choice: tuple[int, ...]) -> float:
        return _valued(self.memory, self.pair_memory, choice)

    def kept(self, choices: Mapping[int, list[int]]) -> Problem:
        """With only some choices of some groups."""

        def rows(k: int) -> np.ndarray:
            return np.array(choices.get(k, range(len(self.costs[k]))), dtype=int)

        def cut(some: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
            return {(j, k): table[np.ix_(rows(j), rows(k))] for (j, k), table in some.items()}

        return Problem(
            costs=tuple(table[rows(k)] for k, table in enumerate(self.costs)),
            memory=tuple(table[rows(k)] for k, table in enumerate(self.memory)),
            pairs=cut(self.pairs),
            pair_memory=cut(self.pair_memory),
        )


def _valued(singles: tuple[np.ndarray, ...], pairs: Mapping[tuple[int, int], np.ndarray], choice: tuple[int, ...]) -> float:
    return float(
        sum(table[choice[k]] for k, table in enumerate(singles))
        + sum(table[choice[j], choice[k]] for (j, k), table in pairs.items())
    )


def elimination_order(sizes: list[int], pairs: list[tuple[int, int]], limit: int) -> tuple[list[int], set[int]]:
    """Groups in an order of small tables: next the one whose table is smallest. And, where that is over the limit, the
    neighbours that make it so."""
    neighbours: dict[int, set[int]] = {k: set() for k in range(len(sizes))}
    for j, k in pairs:
        neighbours[j].add(k)
        neighbours[k].add(j)
    left, order = set(neighbours), list[int]()
    while left:
        entries = {k: float(np.prod([float(sizes[n]) for n in (k, *neighbours[k])])) for k in left}
        group = min(left, key=lambda k: (entries[k], k))
        if entries[group] > limit:
            most = max(sizes[n] for n in (group, *neighbours[group]))
            return order, {n for n in (group, *neighbours[group]) if sizes[n] == most}
        for n in neighbours[group]:
            neighbours[n] |= neighbours[group] - {n}
            neighbours[n].discard(group)
        left.discard(group)
        order.append(group)
    return order, set()
