"""The surrogate's optimum: elimination, brute force and a mixed-integer program agree, whatever the graph and the memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fourfold.planner.splits.problem import Problem
from fourfold.planner.splits.solve import solve
from milp import solve_milp

CASES = 200


def random_problem(seed: int) -> Problem:
    """A few groups in a row with skips and branches between them; some pairs cannot be together."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(2, 7))
    sizes = draw.integers(1, 5, count)
    ends = {(k, k + 1) for k in range(count - 1) if draw.random() < 0.9}
    ends |= {(j, k) for j, k in itertools.combinations(range(count), 2) if draw.random() < 0.25}
    pairs = {(j, k): draw.integers(0, 50, (sizes[j], sizes[k])).astype(float) for j, k in sorted(ends)}
    return Problem(
        costs=tuple(draw.integers(0, 100, n).astype(float) for n in sizes),
        memory=tuple(draw.integers(0, 20, n).astype(float) for n in sizes),
        pairs=pairs,
        pair_memory={pair: draw.integers(0, 5, table.shape).astype(float) for pair, table in pairs.items()},
    )


def brute(problem: Problem, capacity: float) -> float | None:
    every = itertools.product(*(range(len(table)) for table in problem.costs))
    return min((problem.cost(choice) for choice in every if problem.bytes(choice) <= capacity), default=None)


@pytest.mark.parametrize("part", range(4))
def test_elimination_finds_what_trying_everything_finds(part: int) -> None:
    for seed in range(part, CASES, 4):
        problem = random_problem(seed)
        found = solve(problem)
        assert found is not None and found.exact
        assert found.cost == pytest.approx(brute(problem, float("inf"))), seed


@pytest.mark.parametrize("part", range(4))
def test_under_a_limit_of_memory_it_finds_what_trying_everything_finds(part: int) -> None:
    fitted = refused = 0
    for seed in range(part, CASES, 4):
        problem = random_problem(seed)
        sizes = [problem.bytes(c) for c in itertools.product(*(range(len(t)) for t in problem.costs))]
        for share in (0.0, 0.1, 0.4):
            capacity = min(sizes) - 1 + share * (max(sizes) - min(sizes) + 2)
            found, best = solve(problem, capacity), brute(problem, capacity)
            assert (found.cost if found is not None else None) == (pytest.approx(best) if best is not None else None), seed
            assert found is None or (found.exact and found.memory <= capacity)
            fitted, refused = fitted + (found is not None), refused + (found is None)
    assert fitted > 30 and refused > 20, "both happen"


def test_a_mixed_integer_program_agrees() -> None:
    for seed in range(0, CASES, 4):
        problem = random_problem(seed)
        for capacity in (float("inf"), problem.bytes((0,) * len(problem.costs))):
            found, other = solve(problem, capacity), solve_milp(problem, capacity)
            assert (found is None) == (other is None)
            if found is not None and other is not None:
                assert found.cost == pytest.approx(other[1]), seed


def test_tables_too_large_give_a_solution_with_its_distance_from_the_best() -> None:
    gaps = 0
    for seed in range(40):
        problem = random_problem(seed)
        found = solve(problem, table=8)
        best = brute(problem, float("inf"))
        assert found is not None and best is not None
        assert found.bound <= best <= found.cost + 1e-9
        gaps += not found.exact
    assert gaps > 5, "some were cut"
