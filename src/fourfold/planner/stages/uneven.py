"""Stages of different sizes: where to cut and how many ranks each stage has, found together, as PipeDream does."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fourfold.planner.search_task import SearchTask
from fourfold.planner.splits.meshes import DATA, Grid
from fourfold.planner.splits.solve import solve
from fourfold.planner.splits.split_search import SURROGATE_MEMORY_SHARE, SplitSearch, plan_of_splits
from fourfold.planner.stages.partition import SYNCHRONOUS, StagedPlan, boundaries, layers, load
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.spec.plan import Stage
from fourfold.plans.spec.schedule import schedule_named
from fourfold.plans.strategies.balance import balanced_cuts_and_ranks


def uneven(task: SearchTask, splitting: SplitSearch, count: int, micro: int) -> Iterator[StagedPlan]:
    """The best stages of different numbers of ranks, each of which takes its share of the examples."""
    size, known = -(-task.batch // micro), {op.path for op in task.graph.ops}
    kinds = {}
    for ranks in range(1, min(task.devices - count + 1, size) + 1):
        grid = Grid(mesh=Mesh.of(data=ranks), splits={DATA: ("batch",)})
        surrogate = splitting.surrogate(grid, tuple(range(ranks)), size, micro)
        solution = solve(surrogate.problem(0.0))
        assert solution is not None
        kinds[ranks] = layers(splitting.graph, surrogate, solution.choice, known), surrogate.rules(solution.choice)
    turns = schedule_named(SYNCHRONOUS[0], count, micro)
    inner, room = boundaries(kinds[1][0], count), SURROGATE_MEMORY_SHARE * task.cluster.memory(0)

    def loaded(ranks: int, stage: int) -> np.ndarray:
        def transfer(moved: float) -> float:
            return task.setting.prices.collective("send", ((0, ranks),), moved / ranks).seconds

        return load(kinds[ranks][0], inner, speed=1.0, flight=turns.in_flight(stage), room=room, transfer=transfer)

    loads = [{ranks: loaded(ranks, stage) for ranks in kinds} for stage in range(count)]
    found = balanced_cuts_and_ranks(loads, task.devices)
    if found is None or len(set(found[1])) == 1:  # equal ones were tried
        return
    cuts, sizes, slowest = found
    begins = [0, *(inner[k - 1] for k in cuts)]
    paths, ends = kinds[1][0].paths, [0, *itertools.accumulate(sizes)]
    homes = {path: bisect.bisect_right(begins, k) - 1 for k, path in enumerate(paths)}
    rules = tuple(rule for k, r in enumerate(sizes) for rule in kinds[r][1] if homes[rule[0]] == k)
    plan = plan_of_splits(task.graph, task.batch, Mesh.of(data=sizes[0]), rules)
    stages = tuple(
        Stage(first=paths[begin], ranks=tuple(range(*ends[k : k + 2])), mesh=Mesh.of(data=sizes[k]))
        for k, begin in enumerate(begins)
    )
    made = replace(plan, inputs={DATA: "batch"}, stages=stages, microbatches=micro, schedule=SYNCHRONOUS[0])
    yield StagedPlan(plan=made, cost=(micro + count - 1) * slowest)
