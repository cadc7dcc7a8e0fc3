"""What one cell of the op matrix is: an op, the dim its input is divided on, and what it may exchange then.

Every op is wrapped in a module that first adds a parameter of the input's shape, so that the parameter's gradient is the
input's, and ends in ``sum(y * t)`` with random t, so that no gradient vanishes by symmetry. A cell is *ok* if outputs,
gradients and buffers equal eager float64, every op between ran on its own shard, and no rank received more than the bound
of its rule, forward or backward.
"""

from __future__ import annotations

import copy
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fourfold.errors import Error
from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.plans import Plan, lower
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lowering.program import Compute, Program
from fourfold.runs.compare import worst_error
from ranks import Job, Outcome, device_kind, joined, run_job, run_jobs

TOLERANCE = 1e-9
AXIS, SECOND = "ranks", "others"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A way to divide a case: the dim of the inputs that comes in divided, and the split asked of the op, if any.

    What a rank may receive forward (twice that backward): `halo` rows of the input, its `share` of the larger of input and
    result, all of the input (`gather`), `results` times the result. `expect`: ok, or whole (right, but not divided).
    """

    dim: int
    split: str = ""
    halo: int = 0
    share: bool = False
    gather: bool = False
    results: int = 0
    extra: int = 0
    expect: str = "ok"
    why: str = ""
    second: int | None = None  # dim divided along a second axis, of two ranks; the first then has half of them
    second_split: str = ""

    def limit(self, x: tuple[int, ...], y: int, ranks: int) -> int:
        numel = math.prod(x)
        row = numel // x[self.dim] if self.dim < len(x) else 0
        if self.second is not None:
            row += numel // x[self.second]
        share = -(-max(numel, y) // ranks) + row if self.share else 0
        return self.halo * row + share + (numel if self.gather else 0) + self.results * y + self.extra


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op with its arguments and sizes, and the columns it is tried in."""

    row: str
    name: str
    op: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    columns: Mapping[str, Column]
    ranks: tuple[int, ...] = (2, 3)
    train: bool = True
    high: int = 0  # inputs are whole numbers below this
    random: bool = False  # masks are Fourfold's own: the reference is its program on one rank
    family: str = ""


class Fn(nn.Module):
    """A function of itself and tensors, with named parameters (floating-point) and buffers (others)."""

    def __init__(self, function: Callable[..., Any], **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                setattr(self, name, nn.Parameter(tensor.double()))
            else:
                self.register_buffer(name, tensor)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(self, *tensors)


class Shifted(nn.Module):
    """An op whose input gradients are gradients of parameters."""

    def __init__(self, op: nn.Module, inputs: list[Tensor]) -> None:
        super().__init__()
        self.op = op
        floats = [t for t in inputs if t.is_floating_point()]
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn_like(t) / 4) for t in floats])

    def forward(self, *inputs: Tensor) -> Any:
        shifts = iter(self.shifts)
        return self.op(*(x + next(shifts) if x.is_floating_point() else x for x in inputs))


def weighted_sum(outputs: Any, *weights: Tensor) -> Tensor:
    leaves = [o for o in pytree.tree_leaves(outputs) if o.is_floating_point()]
    terms = [(leaf * weight).sum() for leaf, weight in zip(leaves, weights, strict=True)]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


@dataclass(kw_only=True)
class Cell:
    """One tried division. `status`: ok, whole, refused, wrong or failed; received and limit in elements."""

    case: str
    column: str
    ranks: int
    status: str
    error: float = 0.0
    forward: int = 0
    backward: int = 0
    limit: int = 0
    detail: str = ""

    @property
    def key(self) -> str:
        return f"{self.case} | {self.column} | {self.ranks}"


@dataclass
class Prepared:
    """A case captured once, with its eager reference."""

    case: Case

    def __post_init__(self) -> None:
        torch.manual_seed(zlib.crc32(self.case.name.encode()))
        self.inputs = [self._input(shape) for shape in self.case.shapes]
        self.module = Shifted(self.case.op().double(), self.inputs).train(self.case.train)
        reference = copy.deepcopy(self.module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on its own arguments
            outputs = pytree.tree_leaves(reference(*self.inputs))
        self.targets = [torch.randn_like(o) for o in outputs if o.is_floating_point()]
        weighted_sum(outputs, *self.targets).backward()
        self.outputs = [o.detach() for o in outputs]
        self.gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in reference.named_parameters()}
        self.buffers = dict(reference.named_buffers())

    def _input(self, shape: tuple[int, ...]) -> Tensor:
        if self.case.high:
            return torch.randint(0, self.case.high, shape)
        return torch.randn(shape, dtype=torch.float64)

    @cached_property
    def graph(self) -> Graph:
        return capture(self.module, tuple(self.inputs), tuple(self.targets), weighted_sum, train=self.case.train, fixed=True)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return {k: v.detach() for k, v in (*self.module.named_parameters(), *self.module.named_buffers())}

    def plan(self, column: Column, ranks: int) -> Plan:
        axes, inputs, split = ((AXIS, ranks),), {AXIS: f"dim:{column.dim}"}, {AXIS: column.split}
        if column.second is not None:
            axes = ((AXIS, ranks // 2), (SECOND, 2))
            inputs[SECOND], split[SECOND] = f"dim:{column.second}", column.second_split
        wanted = {axis: name for axis, name in split.items() if name}
        return Plan(
            graph=self.graph.hash,
            batch=self.case.shapes[0][0],
            mesh=Mesh(axes),
            inputs=inputs,
            splits=(("op*", wanted),) if wanted else (),
        )

    def job(self, column: str, ranks: int) -> Job:
        plan = self.plan(self.case.columns[column], ranks)
        return Job(
            name=f"{self.case.name} | {column} | {ranks}",
            graph=self.graph,
            plan=plan,
            state=self.state,
            inputs=[*self.inputs, *self.targets],
        )

    def cell(self, column: str, ranks: int, program: Program, outcome: Outcome) -> Cell:
        cell = Cell(case=self.case.name, column=column, ranks=ranks, status="ok")
        if outcome.error:
            cell.status, cell.detail = "failed", outcome.error
            return cell
        self._judge_values(cell, outcome)
        self._judge_exchange(cell, self.case.columns[column], program)
        return cell

    @cached_property
    def alone(self) -> Outcome:
        """The program on one rank."""
        plan = Plan(graph=self.graph.hash, batch=self.case.shapes[0][0], mesh=Mesh(((AXIS, 1),)))
        job = Job(name=self.case.name, graph=self.graph, plan=plan, state=self.state, inputs=[*self.inputs, *self.targets])
        return joined(plan.mesh, [run_job(job, device_kind())])

    def _judge_values(self, cell: Cell, outcome: Outcome) -> None:
        if self.case.random:
            self.outputs, self.gradients = list(self.alone.outputs.values()), self.alone.gradients
        pairs = (
            (outcome.outputs, dict(zip(self.graph.outputs, self.outputs, strict=True))),
            (outcome.gradients, {k: v for k, v in self.gradients.items() if k in outcome.gradients or bool(v.any())}),
            (outcome.state, {k: v for k, v in self.buffers.items() if k in outcome.state}),
        )
        for got, wanted in pairs:
            worst = worst_error(got, wanted)
            if worst.error > cell.error:
                cell.error = worst.error
                if worst.error > TOLERANCE:
                    cell.status, cell.detail = "wrong", f"{worst.tensor} is off by {worst.error:.1e}"

    def _judge_exchange(self, cell: Cell, column: Column, program: Program) -> None:
        moves = [m for m in program.moves() if m.value in _fed(program.graph)]
        mesh = program.mesh
        cell.forward = max(sum(s.received_elements(r) for m in moves for s in m.exchange.steps) for r in range(mesh.size))
        cell.backward = max(
            sum(s.received_elements(r) for m in moves for s in m.exchange.adjoint.steps) for r in range(mesh.size)
        )
        y = sum(o.numel() for o in self.outputs)
        cell.limit = column.limit(self.case.shapes[0], y, mesh.size)
        undivided = [c.op.target for c in program.computes() if c.op.module.startswith("op") and _gathers(program, c)]
        if cell.status != "ok":
            return
        if undivided:
            cell.status, cell.detail = "whole", f"ran whole: {', '.join(dict.fromkeys(undivided))}"
        elif cell.forward > cell.limit or cell.backward > 2 * cell.limit:
            cell.status = "whole"
            cell.detail = f"received {cell.forward} forward and {cell.backward} backward, the bound is {cell.limit}"


def _fed(graph: Graph) -> set[str]:
    """Values that depend on an input: the others are parameters, exchanged as such."""
    out = set(graph.inputs)
    for op in graph.ops:
        if out & set(op.operands):
            out.update(op.results)
    return out


def _gathers(program: Program, compute: Compute) -> bool:
    """Whether an op runs alike on every rank although an operand was divided."""
    fed = _fed(program.graph)
    divided = {axis for name in compute.op.operands if name in fed for axis in program.layouts[name].sharded}
    return any(compute.choice[axis] is None for axis in divided)


def every_pair(case: Case) -> list[tuple[str, int]]:
    """All columns of a case on all its rank counts."""
    return [(column, ranks) for ranks in case.ranks for column in case.columns]


def judged(cases: Sequence[Case], pairs: Callable[[Case], Sequence[tuple[str, int]]] = every_pair) -> list[Cell]:
    """The cells of the given cases, of each in the given columns and rank counts; one call of the workers per rank count."""
    prepared = [Prepared(case) for case in cases]
    cells: list[Cell] = []
    for ranks in sorted({n for case in cases for n in case.ranks}):
        jobs: dict[str, tuple[Prepared, str, Program, Job]] = {}
        for item in prepared:
            for column in [column for column, count in pairs(item.case) if count == ranks]:
                job = item.job(column, ranks)
                try:
                    jobs[job.name] = (item, column, lower(job.graph, job.plan), job)
                except Error as reason:
                    cells.append(Cell(case=item.case.name, column=column, ranks=ranks, status="refused", detail=str(reason)))
        outcomes = run_jobs([job for *_, job in jobs.values()], ranks)
        cells += [item.cell(column, ranks, program, outcomes[name]) for name, (item, column, program, _) in jobs.items()]
    return cells
