"""What autograd really keeps of an op, seen by its hooks, against what rules and kernels say it keeps: byte for byte.

Cases are those of the op matrix, in float32 as models train, on one rank and divided over two. Memory of operands and
results is told from other memory by its storage. Stored tensors are there anyway and their bytes do not count, but which of
them are kept does: where weights are divided, these are gathered for backward. Single numbers do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fourfold.plans import Plan, lower
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.saved_tensors import Share, saving
from fourfold.plans.lowering.program import Compute, Program
from fourfold.runs.initial_tensors import cut
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution import executor as execute
from fourfold.runtime.execution.executor import Executor
from fourfold.runtime.kernels import Randomness, build
from matrix import AXIS, Case, Prepared
from op_matrix_page import CASES
from ranks import Job, lists_of, pool, world_of

FLOAT32 = {"float64": torch.float32}
HIGH = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Biased high: what they keep depends on the library's version and is bounded by the rule."""
HIGH_DIVIDED = {f"adaptive_{kind}_pool{d}d" for kind in ("avg", "max") for d in (1, 2, 3)}
"""And divided: windows of several widths."""


@dataclass(frozen=True)
class Seen:
    """One op of a case: bytes kept, as seen and as said, of operands and results and of other tensors."""

    op: str
    divided: bool
    tensors: int
    buffers: int
    said_tensors: int
    said_buffers: int
    weights: tuple[int, ...] = ()  # the operands that are parameters and are kept
    said_weights: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        if self.weights != self.said_weights:
            return False
        if self.op in HIGH or (self.divided and self.op in HIGH_DIVIDED):
            return self.tensors + self.buffers <= self.said_tensors + self.said_buffers
        return (self.tensors, self.buffers) == (self.said_tensors, self.said_buffers)


def _bytes(storages: dict[int, int]) -> int:
    return sum(size for size in storages.values() if size > 8)


def _places(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _inside(run: Callable[..., Any]) -> list[Tensor]:
    """The tensors a kernel made when it was bound."""
    cells = pytree.tree_leaves([cell.cell_contents for cell in getattr(run, "__closure__", None) or ()])
    inner = [tensor for leaf in cells if isinstance(leaf, FunctionType) for tensor in _inside(leaf)]
    return [leaf for leaf in cells if isinstance(leaf, Tensor)] + inner


def watched(step: Compute, run: Callable[..., Any], coords: Any, program: Program, seen: list[Seen]) -> Callable[..., Any]:
    stored, weights = set(program.stored), {p.name for p in program.graph.parameters if not p.buffer}

    def known(*tensors: Tensor) -> Any:
        kept: dict[int, int] = {}
        keep: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.update(_places([tensor]))
            keep.append(tensor)  # or its memory is used again before we are done
            return tensor

        given = _places(tensors)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(*tensors)
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        known_memory = given | _places(results)
        for place in _places(_inside(run)):
            kept.pop(place, None)
        there = _places(t for slot, t in zip(step.inputs, tensors, strict=True) if slot in stored)
        sizes = (tuple(t.element_size() for t in some) for some in (tensors, results))
        share = Share(step, coords, *sizes)
        said = saving(share, [t.requires_grad for t in tensors])
        places = _places([tensors[k] if k >= 0 else results[-1 - k] for k in said.tensors])
        mine = [k for k, slot in enumerate(step.inputs) if slot in weights]
        seen.append(
            Seen(
                op=step.op.target.split(".")[1].rstrip("_"),
                divided=bool(step.split_axes),
                tensors=_bytes({p: n for p, n in kept.items() if p in known_memory and p not in there}),
                buffers=_bytes({p: n for p, n in kept.items() if p not in known_memory}),
                said_tensors=_bytes({p: n for p, n in places.items() if p not in there}),
                said_buffers=sum(size for size in said.buffers if size > 8),
                weights=tuple(k for k in mine if set(_places([tensors[k]])) & set(kept)),
                said_weights=tuple(k for k in mine if k in said.tensors),
            )
        )
        return out

    return known


def observed(jobs: list[Job]) -> dict[str, list[Seen]]:
    """What this rank keeps of every op of the jobs."""
    return {job.name: _observed(job) for job in jobs}


def _observed(job: Job) -> list[Seen]:
    seen: list[Seen] = []
    one = job.plan.mesh.size == 1
    world = World(job.plan.mesh, rank=0, device=torch.device("cpu")) if one else world_of(job.plan.mesh)

    class Watching(Executor):
        def _bind(self, size: int, action: Any) -> Any:
            if isinstance(action, Compute):
                run = build(action, self.local)
                return execute._compute(action, watched(action, run, world.coords, self.program, seen))
            return super()._bind(size, action)

    def load(key: str, layout: Any) -> Tensor:
        part = cut(job.state[key], layout, world).clone()
        return part.float() if part.is_floating_point() else part

    lists = lists_of(lower(job.graph, job.plan), world)
    executor = Watching(lists, world, load, dtypes=FLOAT32, randomness=Randomness())
    names = (*job.graph.inputs, *job.graph.targets)
    executor.forward({n: executor.cut(n, t) for n, t in zip(names, job.inputs, strict=True)}, next(iter(executor.programs)))
    return seen


def alone(case: Case) -> Job:
    item = Prepared(case)
    plan = Plan(graph=item.graph.hash, batch=case.shapes[0][0], mesh=Mesh(((AXIS, 1),)))
    return Job(name=case.name, graph=item.graph, plan=plan, state=item.state, inputs=[*item.inputs, *item.targets])


def chosen(family: str) -> list[Case]:
    """One case of each row of the matrix, the first."""
    rows: dict[str, Case] = {}
    for case in CASES:
        if case.family == family:
            rows.setdefault(case.row, case)
    return list(rows.values())


FAMILIES = tuple(dict.fromkeys(case.family for case in CASES if case.family != "axes"))


def wrong(found: dict[str, list[Seen]]) -> list[str]:
    return [f"{name}: {seen}" for name, every in found.items() for seen in every if not seen.fits]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_op_keeps_what_its_rule_says(family: str) -> None:
    found = observed([alone(case) for case in chosen(family)])
    assert any(found.values())
    assert not wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_keeps_what_its_rule_says(family: str) -> None:
    assert not wrong(observed([alone(case) for case in CASES if case.family == family]))


@pytest.mark.parametrize("family", ("conv", "pool", "norm", "loss", "lookup", "attention", "softmax", "product"))
def test_a_divided_op_keeps_what_its_kernel_says(family: str) -> None:
    jobs = []
    for case in chosen(family):
        if 2 in case.ranks:
            item = Prepared(case)
            jobs += [item.job(column, 2) for column in case.columns]
    by_rank = pool(2)(observed, jobs)
    assert not [line for found in by_rank for line in wrong(found)]


def test_nothing_is_kept_where_no_gradient_is_asked_for() -> None:
    job = alone(next(case for case in CASES if case.name.startswith("conv 3 pad 1")))
    program = lower(job.graph, job.plan)
    for step in program.computes():
        share = Share(step, {AXIS: 0}, (4,) * len(step.needs), (4,) * len(step.gives))
        assert not saving(share, [False] * len(step.needs)).tensors


def test_memory_kept_beside_tensors_follows_the_division() -> None:
    """Max pool's places are as many as its results, wherever they are cut."""
    case = next(case for case in CASES if case.name.startswith("max pool 2 on 4x4x8x9"))
    item = Prepared(case)
    for column in ("batch", "filter"):
        program = lower(item.graph, item.job(column, 2).plan)
        step = next(c for c in program.computes() if c.nest.kernel == "max_pool")
        shares = [Share(step, {AXIS: rank}, (4,), (4,)) for rank in range(2)]
        assert sum(s.kept_bytes(step.nest.saved_extra[0]) for s in shares) == 8 * math.prod(step.gives[0].shape)
