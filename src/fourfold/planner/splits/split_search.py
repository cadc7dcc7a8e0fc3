"""Plans of one mesh: for every grid of the devices, the best splits by the surrogate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fourfold.errors import Infeasible
from fourfold.graph import Graph
from fourfold.planner.search_task import AUTO, Refusal, SearchTask
from fourfold.planner.splits.meshes import DATA, MODEL, SPACE, Grid, grids
from fourfold.planner.splits.solve import Solution, solve
from fourfold.planner.splits.split_groups import SplitGroup, split_groups
from fourfold.planner.splits.surrogate import Place, Surrogate
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lowering.dim_hints import domain_dims
from fourfold.plans.lowering.stages import cut
from fourfold.plans.spec.plan import Plan

HIDDEN = (1.0, 0.5, 0.0)
"""Parts of the gradient sums sent beside backward that the surrogate takes to vanish there: all, half, and none."""
ROOM = 0.9  # of a device's memory for what the surrogate counts: workspaces and short-lived tensors need the rest


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan and what it should take: `cost` seconds with gradient sums played beside backward, `bound` without those sums,
    less than it will take."""

    plan: Plan
    cost: float
    bound: float
    solution: Solution
    fits: bool


class Splitting:
    """The splits of one graph. `graph`: as micro-batches see it, where there are several."""

    def __init__(self, task: SearchTask, graph: Graph) -> None:
        self.task, self.graph = task, graph
        self._knots: dict[int, tuple[SplitGroup, ...]] = {}

    @cached_property
    def live(self) -> frozenset[str]:
        return cut(self.graph, [""]).live

    @cached_property
    def domains(self) -> int:
        concrete = self.graph.at(self.task.batch)
        return max((len(domain_dims(concrete, name)) for name in self.graph.inputs), default=0)

    def split_groups(self, size: int) -> tuple[SplitGroup, ...]:
        if size not in self._knots:
            self._knots[size] = split_groups(self.graph, size, self.live)
        return self._knots[size]

    def surrogate(self, grid: Grid, ranks: tuple[int, ...], size: int, microbatches: int = 1) -> Surrogate:
        """All choices of all knots priced on a grid."""
        place = Place(
            mesh=grid.mesh,
            ranks=ranks,
            splits=grid.splits,
            prices=self.task.setting.prices,
            optimizer=self.task.setting.optimizer,
            size=size,
            microbatches=microbatches,
        )
        return Surrogate(graph=self.graph, knots=self.split_groups(size), live=self.live, place=place, fixed=self.task.fixed)

    def grids(self) -> Iterator[Grid]:
        near = len(self.task.cluster.node_ranks(0))
        yield from grids(self.task.devices, self.task.batch, near=near, domains=self.domains)

    def solved(self, grid: Grid) -> Iterator[Found | Refusal]:
        """The best plans of a grid."""
        task = self.task
        ranks = tuple(range(task.devices))
        try:
            surrogate = self.surrogate(grid, ranks, task.batch)
            yield from self._solved(grid, surrogate)
        except Infeasible as reason:
            yield Refusal(strategy=f"{AUTO} {grid.mesh}", reason=str(reason))

    def _solved(self, grid: Grid, surrogate: Surrogate) -> Iterator[Found | Refusal]:
        task, seen = self.task, set()
        room = ROOM * min(task.cluster.memory(some[0]) for _, some in task.cluster.runs_in_use())
        for hidden in HIDDEN:
            problem = surrogate.problem(hidden)
            free, tight = solve(problem), None
            assert free is not None
            if free.memory > room:
                tight = solve(problem, room)
            for solution in filter(None, (free, tight)):
                rules = surrogate.rules(solution.choice)
                plain = not task.fixed and all(set(by.values()) == {"batch"} for _, by in rules)
                if solution.choice not in seen and not plain:  # that is data parallelism, tried anyway
                    seen.add(solution.choice)
                    plan = emitted(self.graph, task.batch, grid.mesh, rules)
                    bound = surrogate.problem(1.0).cost(solution.choice)
                    cost = surrogate.played(solution.choice)
                    yield Found(plan=plan, cost=cost, bound=bound, solution=solution, fits=solution.memory <= room)


def emitted(graph: Graph, batch: int, mesh: Mesh, rules: tuple[tuple[str, dict[str, str]], ...]) -> Plan:
    """The plan of some splits. An axis is called by what is split over it: data, space or model."""
    names = _names(mesh, rules)
    first = rules[0][1] if rules else {}
    inputs = {names[axis]: split for axis, split in first.items() if split.startswith(("batch", "domain"))}
    return Plan(
        graph=graph.hash,
        batch=batch,
        mesh=Mesh(tuple((names[axis], extent) for axis, extent in mesh.axes)),
        strategy=AUTO,
        inputs=inputs,
        splits=tuple((path, {names[axis]: split for axis, split in by.items()}) for path, by in rules),
    )


def _names(mesh: Mesh, rules: tuple[tuple[str, dict[str, str]], ...]) -> dict[str, str]:
    out: dict[str, str] = {}
    for axis in mesh.names:
        name = _name({by[axis] for _, by in rules if axis in by} - {"replicate"})
        taken = sum(other.rstrip("0123456789") == name for other in out.values())
        out[axis] = f"{name}{taken + 1}" if taken else name
    return out


def _name(splits: set[str]) -> str:
    if splits <= {"batch"}:
        return DATA
    return SPACE if all(split == "batch" or split.startswith("domain") for split in splits) else MODEL
