"""Plans of several stages: for each number of stages and micro-batches, splits by the surrogate and cuts by balance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fourfold.errors import Infeasible
from fourfold.planner.search_task import AUTO, Refusal, SearchTask
from fourfold.planner.splits.meshes import DATA, EVERY, MODEL, Grid
from fourfold.planner.splits.solve import solve
from fourfold.planner.splits.split_search import SURROGATE_MEMORY_SHARE, SplitSearch, plan_of_splits
from fourfold.planner.stages.partition import SYNCHRONOUS, Partition, StagedPlan, layers, partition
from fourfold.planner.stages.uneven import uneven
from fourfold.plans.layout.mesh import Mesh, divisors
from fourfold.plans.lowering.additive_loss import microbatch_loss
from fourfold.plans.spec.plan import Stage
from fourfold.plans.spec.schedule import schedule_named

TURNS = (4, 2)  # micro-batches per stage; of many stages, or many devices, the first alone
MANY = 16  # devices up to which stages of different sizes are tried
FEW = 4  # devices on which as many micro-batches as stages are tried too: larger ones, which small networks need
DEEPEST = 32  # stages


def staged_plans(task: SearchTask, compute: float, best: float, *, few: bool, mixed: bool) -> Iterator[StagedPlan | Refusal]:
    """Plans of two stages and more; `few`: not every number of stages and micro-batches; `mixed`: micro-batches change the
    numbers, so that the whole batch is tried as one. Those are passed over whose bubble alone makes them slower than `best`:
    `compute` is how long the devices together need without one, with kernels no smaller."""
    graphs: dict[int, SplitSearch] = {}
    whole = (1,) if mixed and not few else ()  # exact, where examples of a micro-batch depend on each other
    for count in (n for n in divisors(task.devices) if 1 < n <= (DEEPEST // 2 if few else DEEPEST)):
        ranks = task.devices // count
        for grid in _grids(task, ranks):
            examples = grid.mesh.extent(DATA) if DATA in grid.mesh.names else 1
            turns = TURNS[:1] if few or count >= 8 else (*TURNS, 1) if task.devices <= FEW else TURNS
            for micro in dict.fromkeys((*(min(turn * count, task.batch // examples) for turn in turns), *whole)):
                if micro < 1 or compute * (micro + count - 1) / micro > best:
                    continue
                try:
                    if micro not in graphs:
                        graphs[micro] = SplitSearch(task, microbatch_loss(task.graph, task.batch, micro).graph)
                    yield from _cut(task, graphs[micro], grid, count, micro)
                except Infeasible as reason:
                    yield Refusal(strategy=f"{AUTO} {count} stages", reason=str(reason))
    for count in () if few or mixed else _unequal(task):
        micro = min(TURNS[0] * count, task.batch)
        if compute * (micro + count - 1) / micro <= best:
            try:
                graphs.setdefault(micro, SplitSearch(task, microbatch_loss(task.graph, task.batch, micro).graph))
                yield from uneven(task, graphs[micro], count, micro)
            except Infeasible as reason:
                yield Refusal(strategy=f"{AUTO} {count} unequal stages", reason=str(reason))


def _unequal(task: SearchTask) -> range:
    """Numbers of stages of different sizes worth a look: on few devices, all of one kind."""
    alike = len({kind.name for kind, _ in task.cluster.runs_in_use()}) == 1
    return range(2, 4 if task.devices <= FEW else 3) if alike and 2 < task.devices <= MANY else range(0)


def _grids(task: SearchTask, ranks: int) -> Iterator[Grid]:
    """Inside a stage: examples over all ranks, or weights within a node and examples across."""
    yield Grid(mesh=Mesh.of(data=ranks), splits={DATA: ("batch",)})
    node_size = len(task.cluster.node_ranks(0))
    inner = max((d for d in divisors(ranks) if d <= node_size and d > 1), default=1)
    if inner > 1:
        axes = Mesh.of(data=ranks // inner, model=inner) if inner < ranks else Mesh.of(model=inner)
        yield Grid(mesh=axes, splits={DATA: ("batch",), MODEL: EVERY})


def _cut(task: SearchTask, splitting: SplitSearch, grid: Grid, count: int, micro: int) -> Iterator[StagedPlan | Refusal]:
    ranks, size = grid.mesh.size, -(-task.batch // micro)
    surrogate = splitting.surrogate(grid, tuple(range(ranks)), size, micro)
    solution = solve(surrogate.problem(0.0))
    assert solution is not None
    some = layers(splitting.graph, surrogate, solution.choice, {op.path for op in task.graph.ops})
    prices, cluster = task.setting.prices, task.cluster
    firsts = [k * ranks for k in range(count)]
    speeds = [cluster.device(rank).rate(prices.precision) / cluster.device(0).rate(prices.precision) for rank in firsts]

    def transfer(size: float) -> float:
        return prices.collective("send", ((0, ranks),), size / ranks).seconds

    best: tuple[str, Partition] | None = None
    for schedule in SYNCHRONOUS:
        turns = schedule_named(schedule, count, micro)
        flights = [turns.in_flight(stage) for stage in range(count)]
        rooms = [SURROGATE_MEMORY_SHARE * cluster.memory(rank) for rank in firsts]
        found = partition(some, speeds=speeds, flights=flights, rooms=rooms, transfer=transfer)
        if found is not None:
            best = (schedule, found)
            break
    if best is None:
        yield Refusal(strategy=f"{AUTO} {count} stages of {grid.mesh}", reason="no cut fits the devices' memory")
        return
    schedule, found = best
    cost = (micro + count - 1) * found.slowest
    plan = plan_of_splits(task.graph, task.batch, grid.mesh, surrogate.rules(solution.choice))
    stages = tuple(
        Stage(first=first, ranks=tuple(range(k * ranks, (k + 1) * ranks)), mesh=plan.mesh)
        for k, first in enumerate(found.firsts)
    )
    notes = microbatch_loss(task.graph, task.batch, micro).notes
    yield StagedPlan(plan=replace(plan, stages=stages, microbatches=micro, schedule=schedule, notes=notes), cost=cost)
