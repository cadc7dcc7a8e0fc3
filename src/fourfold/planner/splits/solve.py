"""The optimum of a `Problem`: groups eliminated one after the other.

That is dynamic programming over the frontier of the graph: what is left of an eliminated group is a table over its neighbours.
Exact, branches and skips included, as long as no table has more than `TABLE` entries; beyond that only the best few choices of
the widest neighbours are kept, and `Solution.bound` says how much better a solution could be at most. Memory is first left
out: if the optimum fits, it is the optimum. Else entries become Pareto sets of (cost, memory), in `pareto`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.planner.splits.pareto import constrained
from fourfold.planner.splits.problem import Problem, elimination_order

TABLE = 2_000_000  # entries


@dataclass(frozen=True, kw_only=True)
class Solution:
    """One choice for each group. `bound`: no solution costs less; `exact`: this one is the best."""

    choice: tuple[int, ...]
    cost: float
    memory: float
    bound: float

    @property
    def exact(self) -> bool:
        return self.bound >= self.cost * (1 - 1e-12)


def solve(problem: Problem, capacity: float = float("inf"), table: int = TABLE) -> Solution | None:
    """The best choices that fit, None if none do."""
    choice, bound = _unconstrained(problem, table)
    if problem.bytes(choice) > capacity:
        found = constrained(problem, capacity)
        if found is None:
            return None
        choice, lower = found
        bound = max(bound, lower)
    cost = problem.cost(choice)
    return Solution(choice=choice, cost=cost, memory=problem.bytes(choice), bound=min(bound, cost))


_Factor = tuple[tuple[int, ...], np.ndarray]
"""Groups, in order, and a table with a dim for each."""


def _unconstrained(problem: Problem, limit: int) -> tuple[tuple[int, ...], float]:
    """The cheapest choices, and a bound: their cost, unless tables had to be cut."""
    sizes = [len(table) for table in problem.costs]
    single = {k for k, size in enumerate(sizes) if size == 1}
    if len(single) == len(sizes):
        return (0,) * len(sizes), problem.cost((0,) * len(sizes))
    if single:
        return _without(problem, single, limit)
    order, wide = elimination_order(sizes, list(problem.pairs), limit)
    if not wide:
        choice = _eliminated(problem, order)
        return choice, problem.cost(choice)
    few = {k: _best_few(problem, k, max(1, sizes[k] // 2)) for k in wide}
    smaller, lower = problem.kept(few), _relaxed(problem)
    inner, _ = _unconstrained(smaller, limit)
    return tuple(few[k][c] if k in few else c for k, c in enumerate(inner)), lower


def _without(problem: Problem, single: set[int], limit: int) -> tuple[tuple[int, ...], float]:
    """As before, groups without a choice put into their neighbours' costs: tables need no dim for them."""
    left = [k for k in range(len(problem.costs)) if k not in single]
    at = {k: i for i, k in enumerate(left)}
    costs = [problem.costs[k].copy() for k in left]
    pairs, fixed = {}, sum(float(problem.costs[k][0]) for k in single)
    for (j, k), table in problem.pairs.items():
        if j in at and k in at:
            pairs[at[j], at[k]] = table
        elif j in at:
            costs[at[j]] += table[:, 0]
        elif k in at:
            costs[at[k]] += table[0]
        else:
            fixed += float(table[0, 0])
    inner, bound = _unconstrained(Problem(costs=tuple(costs), memory=tuple(map(np.zeros_like, costs)), pairs=pairs), limit)
    return tuple(inner[at[k]] if k in at else 0 for k in range(len(problem.costs))), bound + fixed


def _eliminated(problem: Problem, order: list[int]) -> tuple[int, ...]:
    factors: list[_Factor] = [((k,), table) for k, table in enumerate(problem.costs)]
    factors += [((j, k), table) if j < k else ((k, j), table.T) for (j, k), table in problem.pairs.items()]
    steps: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for group in order:
        mine = [factor for factor in factors if group in factor[0]]
        factors = [factor for factor in factors if group not in factor[0]]
        names, table = _joined(mine)
        axis = names.index(group)
        rest = names[:axis] + names[axis + 1 :]
        steps.append((group, rest, table.argmin(axis)))
        factors.append((rest, table.min(axis)))
    chosen: dict[int, int] = {}
    for group, rest, best in reversed(steps):
        chosen[group] = int(best[tuple(chosen[n] for n in rest)])
    return tuple(chosen[k] for k in range(len(problem.costs)))


def _joined(factors: list[_Factor]) -> _Factor:
    """The sum of tables over all their groups."""
    names = tuple(sorted({name for some, _ in factors for name in some}))
    total: np.ndarray = np.zeros(())
    for some, table in factors:
        total = total + table.reshape([table.shape[some.index(n)] if n in some else 1 for n in names])
    return names, np.asarray(total)


def _best_few(problem: Problem, group: int, count: int) -> list[int]:
    """The choices of a group that are cheapest if all others suit it."""
    cost = problem.costs[group].copy()
    for (j, k), table in problem.pairs.items():
        if group in (j, k):
            cost += table.min(1 if group == j else 0)
    return sorted(np.argsort(cost, kind="stable")[:count].tolist())


def _relaxed(problem: Problem) -> float:
    """Less than any solution costs: every group may choose anew for each of its pairs."""
    return float(sum(table.min() for table in problem.costs) + sum(table.min() for table in problem.pairs.values()))
