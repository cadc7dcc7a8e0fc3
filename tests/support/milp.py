"""The same problem as a mixed-integer program for HiGHS: slow, and nothing like elimination, so that one checks the other.

x[k, c] = 1 if group k takes choice c; y[jk, c, d] >= 0 goes with both ends: its sums over d are x[j, c], over c x[k, d].
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from fourfold.planner.splits.problem import Problem


def solve_milp(problem: Problem, capacity: float = float("inf")) -> tuple[tuple[int, ...], float] | None:
    """The best choices and their cost, or None if nothing fits."""
    starts, count = [], 0
    for table in problem.costs:
        starts.append(count)
        count += len(table)
    pair_starts = {}
    for pair, table in problem.pairs.items():
        pair_starts[pair] = count
        count += table.size
    cost, size = np.zeros(count), np.zeros(count)
    for start, table, memory in zip(starts, problem.costs, problem.memory, strict=True):
        cost[start : start + len(table)], size[start : start + len(table)] = table, memory
    for pair, start in pair_starts.items():
        table = problem.pairs[pair]
        cost[start : start + table.size] = table.ravel()
        extra = problem.pair_memory.get(pair)
        size[start : start + table.size] = 0.0 if extra is None else extra.ravel()
    rows, columns, values, right = list[int](), list[int](), list[float](), list[float]()

    def equation(entries: list[tuple[int, float]], value: float) -> None:
        for column, factor in entries:
            rows.append(len(right))
            columns.append(column)
            values.append(factor)
        right.append(value)

    for start, table in zip(starts, problem.costs, strict=True):
        equation([(start + c, 1.0) for c in range(len(table))], 1.0)
    for (j, k), start in pair_starts.items():
        n, m = problem.pairs[j, k].shape
        for c in range(n):
            equation([*((start + c * m + d, 1.0) for d in range(m)), (starts[j] + c, -1.0)], 0.0)
        for d in range(m):
            equation([*((start + c * m + d, 1.0) for c in range(n)), (starts[k] + d, -1.0)], 0.0)
    limits = [LinearConstraint(coo_array((values, (rows, columns)), shape=(len(right), count)).tocsr(), right, right)]
    if np.isfinite(capacity):
        limits.append(LinearConstraint(size[None, :], -np.inf, capacity))
    whole = np.zeros(count)
    whole[: starts[-1] + len(problem.costs[-1])] = 1
    found = milp(cost, integrality=whole, bounds=Bounds(0, 1), constraints=limits)
    if found.x is None:
        return None
    choice = tuple(int(found.x[s : s + len(table)].argmax()) for s, table in zip(starts, problem.costs, strict=True))
    return choice, problem.cost(choice)
