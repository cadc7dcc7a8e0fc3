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
from fourfold.planner.splits.surrogate import MeshOnRanks, Surrogate
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lowering.dim_hints import domain_dims
from fourfold.plans.lowering.stages import cut
from fourfold.plans.spec.plan import Plan

HIDDEN_SHARES = (1.0, 0.5, 0.0)
"""Shares of the gradient sums sent beside backward that the surrogate assumes to be hidden by it: the two extremes and their
middle. Chosen: each gives an optimum of its own, and the replay decides between them."""
SURROGATE_MEMORY_SHARE = 0.9
"""Of a device's memory, for what the surrogate counts. Chosen: workspaces and short-lived tensors, which it leaves out, need
the rest; the replay counts them and decides whether a plan fits."""


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """A plan with its cost by the surrogate. Seconds of a step: `cost` with gradient sums beside backward, `bound` without
    these sums, a lower bound."""

    plan: Plan
    cost: float
    bound: float
    solution: Solution
    fits: bool


class SplitSearch:
    """Searches the splits of one graph. `graph`: that of a micro-batch, where there are several."""

    def __init__(self, task: SearchTask, graph: Graph) -> None:
        self.task, self.graph = task, graph
        self._groups: dict[int, tuple[SplitGroup, ...]] = {}

    @cached_property
    def live(self) -> frozenset[str]:
        return cut(self.graph, [""]).live

    @cached_property
    def domains(self) -> int:
        concrete = self.graph.at(self.task.batch)
        return max((len(domain_dims(concrete, name)) for name in self.graph.inputs), default=0)

    def split_groups(self, size: int) -> tuple[SplitGroup, ...]:
        if size not in self._groups:
            self._groups[size] = split_groups(self.graph, size, self.live)
        return self._groups[size]

    def surrogate(self, grid: Grid, ranks: tuple[int, ...], size: int, microbatches: int = 1) -> Surrogate:
        """All choices of all groups priced on a grid."""
        place = MeshOnRanks(
            mesh=grid.mesh,
            ranks=ranks,
            splits=grid.splits,
            prices=self.task.setting.prices,
            optimizer=self.task.setting.optimizer,
            size=size,
            microbatches=microbatches,
        )
        return Surrogate(graph=self.graph, groups=self.split_groups(size), live=self.live, place=place, fixed=self.task.fixed)

    def grids(self) -> Iterator[Grid]:
        node_size = len(self.task.cluster.node_ranks(0))
        yield from grids(self.task.devices, self.task.batch, node_size=node_size, domains=self.domains)

    def plans(self, grid: Grid) -> Iterator[SplitPlan | Refusal]:
        """The best plans of a grid."""
        task = self.task
        ranks = tuple(range(task.devices))
        try:
            surrogate = self.surrogate(grid, ranks, task.batch)
            yield from self._plans(grid, surrogate)
        except Infeasible as reason:
            yield Refusal(strategy=f"{AUTO} {grid.mesh}", reason=str(reason))

    def _plans(self, grid: Grid, surrogate: Surrogate) -> Iterator[SplitPlan | Refusal]:
        task, seen = self.task, set()
        room = SURROGATE_MEMORY_SHARE * min(task.cluster.memory(some[0]) for _, some in task.cluster.runs_in_use())
        for hidden in HIDDEN_SHARES:
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
                    plan = plan_of_splits(self.graph, task.batch, grid.mesh, rules)
                    bound = surrogate.problem(1.0).cost(solution.choice)
                    cost = surrogate.overlapped_seconds(solution.choice)
                    yield SplitPlan(plan=plan, cost=cost, bound=bound, solution=solution, fits=solution.memory <= room)


def plan_of_splits(graph: Graph, batch: int, mesh: Mesh, rules: tuple[tuple[str, dict[str, str]], ...]) -> Plan:
    """The plan with these splits. An axis is named for what is split over it: data, space or model."""
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
