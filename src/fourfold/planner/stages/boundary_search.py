"""Boundaries of stages moved while that makes the replayed step shorter.

The partition charges a boundary with all that crosses it and knows no schedule; the replay does. So the fastest plan of stages
is tried with each boundary one place earlier and later, and the best of these again, until none is faster. Of many stages
only the boundaries of the slowest are moved: each try is a replay in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from fourfold.errors import Error
from fourfold.graph import Graph
from fourfold.oracle.predict import Prediction
from fourfold.planner.search_task import AUTO
from fourfold.plans.spec.plan import Plan
from fourfold.plans.strategies.balance import stage_openings

ROUNDS = 8
FEW = 8  # stages up to which every boundary is tried


def hill_climb(
    candidate: Prediction, graph: Graph, replay: Callable[[Plan], Prediction], out_of_time: Callable[[], bool] = lambda: False
) -> Prediction:
    """The best plan that is reached, or the candidate itself. One that fits is not left for one that does not. `out_of_time`:
    whether the search must stop."""
    best = candidate
    for _ in range(ROUNDS):
        moved = []
        for plan in shifted(graph, best.plan, _movable(best)):
            if out_of_time():
                return best
            with suppress(Error):  # a stage that cannot begin there
                moved.append(replay(replace(plan, strategy=AUTO)))
        better = min(moved, key=lambda c: c.step_seconds, default=best)
        if better.step_seconds >= best.step_seconds or (best.feasible and not better.feasible):
            break
        best = better
    return best


def _movable(candidate: Prediction) -> range:
    """The boundaries to try, by the stage behind them."""
    stages = candidate.estimate.stages
    if len(stages) <= FEW:
        return range(1, len(stages))
    slowest = max(range(len(stages)), key=lambda k: stages[k]["forward"] + stages[k]["backward"])
    return range(max(slowest, 1), min(slowest + 2, len(stages)))


def shifted(graph: Graph, plan: Plan, boundaries: Iterable[int]) -> Iterator[Plan]:
    """A plan with one of the boundaries one place earlier or later."""
    order = {op.path: k for k, op in enumerate(graph.ops)}
    places = sorted(order[path] for path in stage_openings(graph, plan.batch, len(plan.stages)))
    firsts = [order[stage.first] for stage in plan.stages]
    paths = [op.path for op in graph.ops]
    for k in boundaries:
        end = firsts[k + 1] if k + 1 < len(firsts) else len(paths)
        earlier = [place for place in places if firsts[k - 1] < place < firsts[k]][-1:]
        later = [place for place in places if firsts[k] < place < end][:1]
        for place in (*earlier, *later):
            stages = (*plan.stages[:k], replace(plan.stages[k], first=paths[place]), *plan.stages[k + 1 :])
            yield replace(plan, stages=stages)
