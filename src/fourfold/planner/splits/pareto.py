"""The constrained surrogate: elimination with Pareto sets of (cost, memory) instead of single costs.

Exact while no set has more than `LABELS` members; beyond that members are thinned out, evenly by memory, the cheapest and the
smallest kept. What is returned is then still a solution that fits, and the bound is the unconstrained one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from fourfold.planner.splits.problem import Problem, elimination_order

LABELS = 128
_Labels = tuple[np.ndarray, np.ndarray, list[tuple[tuple[int, int], ...]]]
"""Costs, memory, and for each the choices made: pairs of a group and its choice."""

_Table = tuple[tuple[int, ...], dict[tuple[int, ...], _Labels]]
"""Groups, and Pareto sets by their choices."""


def constrained(problem: Problem, capacity: float) -> tuple[tuple[int, ...], float] | None:
    """The cheapest choices within the capacity and a lower bound of their cost, or None."""
    sizes = [len(table) for table in problem.costs]
    order, _ = elimination_order(sizes, list(problem.pairs), 10**12)
    least = float(sum(table.min() for table in problem.memory))
    state = _State(problem, capacity)
    for group in order:
        least -= float(problem.memory[group].min())
        if not state.eliminate(group, max(least, 0.0)):
            return None
    costs, _, chosen = state.whole()
    if not len(costs):
        return None
    best = int(costs.argmin())
    choice = dict(chosen[best])
    return tuple(choice[k] for k in range(len(sizes))), float(costs[best]) if state.exact else 0.0


class _State:
    """Tables of Pareto sets over groups not yet eliminated."""

    def __init__(self, problem: Problem, capacity: float) -> None:
        self.problem, self.capacity, self.exact = problem, capacity, True
        self.done: set[tuple[int, int]] = set()  # pairs that a table knows
        self.tables: list[_Table] = []

    def eliminate(self, group: int, rest: float) -> bool:
        """Replace everything that knows a group by one table over its neighbours; `rest`: memory others take at least."""
        problem = self.problem
        mine = [table for table in self.tables if group in table[0]]
        self.tables = [table for table in self.tables if group not in table[0]]
        pairs = [pair for pair in problem.pairs if group in pair and pair not in self.done]
        self.done.update(pairs)
        neighbours = sorted({group, *(n for names, _ in mine for n in names), *(n for pair in pairs for n in pair)})
        neighbours.remove(group)
        out: dict[tuple[int, ...], _Labels] = {}
        for cell in itertools.product(*(range(len(problem.costs[n])) for n in neighbours)):
            at = dict(zip(neighbours, cell, strict=True))
            found = [
                labels
                for c in range(len(problem.costs[group]))
                if (labels := self._sum(group, c, {**at, group: c}, mine, pairs, rest)) is not None
            ]
            if found:
                out[cell] = self._thinned(_front(found))
        self.tables.append((tuple(neighbours), out))
        return bool(out)

    def _sum(
        self, group: int, c: int, at: dict[int, int], mine: list[_Table], pairs: list[tuple[int, int]], rest: float
    ) -> _Labels | None:
        """What a choice of a group comes to with its neighbours at theirs; None if nothing fits."""
        problem = self.problem
        cost, size = float(problem.costs[group][c]), float(problem.memory[group][c])
        for j, k in pairs:
            cost += float(problem.pairs[j, k][at[j], at[k]])
            size += float(problem.pair_memory[j, k][at[j], at[k]]) if (j, k) in problem.pair_memory else 0.0
        total: _Labels = (np.array([cost]), np.array([size]), [((group, c),)])
        for names, table in mine:
            found = table.get(tuple(at[n] for n in names))
            if found is None:
                return None
            total = _crossed(total, found)
        fits = total[1] <= self.capacity - rest + 1e-9 * self.capacity
        return _picked(total, np.flatnonzero(fits)) if fits.any() else None

    def _thinned(self, labels: _Labels) -> _Labels:
        if len(labels[0]) <= LABELS:
            return labels
        self.exact = False
        return _picked(labels, np.unique(np.linspace(0, len(labels[0]) - 1, LABELS).round().astype(int)))

    def whole(self) -> _Labels:
        """The sum of what is left, tables over no groups."""
        total: _Labels = (np.zeros(1), np.zeros(1), [()])
        for _, table in self.tables:
            total = _crossed(total, table[()])
        fits = np.flatnonzero(total[1] <= self.capacity * (1 + 1e-9))
        return _picked(total, fits)


def _crossed(a: _Labels, b: _Labels) -> _Labels:
    costs, sizes = (np.add.outer(a[i], b[i]).ravel() for i in (0, 1))
    return _front([(costs, sizes, [x + y for x in a[2] for y in b[2]])])


def _front(some: Iterable[_Labels]) -> _Labels:
    """The members none of which is both cheaper and smaller than another, by rising memory."""
    every = list(some)
    costs, sizes = (np.concatenate([labels[i] for labels in every]) for i in (0, 1))
    chosen = [choice for labels in every for choice in labels[2]]
    order = np.lexsort((costs, sizes))
    best = np.minimum.accumulate(costs[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    return _picked((costs, sizes, chosen), order[first])


def _picked(labels: _Labels, rows: np.ndarray) -> _Labels:
    return labels[0][rows], labels[1][rows], [labels[2][int(k)] for k in rows]
