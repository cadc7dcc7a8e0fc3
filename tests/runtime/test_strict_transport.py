"""Stages under NCCL's rules, on processors: no tags, grouped calls in order, sends that wait for their receives. Numbers are
those of the default transport, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import agreement
from agreement import Case, recorded
from awkward import NETS, net
from fourfold.errors import WorkerFailed
from fourfold.plans import Mesh, Options, Plan, lower_plan, named
from fourfold.plans.lists.order.stage_calls import Boundary, boundaries, pairs
from fourfold.plans.lists.records import Record, records
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.plan import Stage
from fourfold.runs import comparison_run
from fourfold.runs.comparison_run import ComparisonRun, execute_run, load_result
from fourfold.runtime.comm.stage_messages import Communicator, Piece
from fourfold.runtime.comm.strict_gloo import StrictGloo
from fourfold.runtime.comm.world import TIMEOUT
from fourfold.runtime.execution import runner as runner_module
from fourfold.runtime.execution.runner import Runner
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.workload import stored_tensors
from ranks import pool
from small import Subject, batch_of, built_in, graph_of, subject


class StrictRunner(Runner):
    """A runner under NCCL's rules that also warms its stages up, as on GPUs."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, transport="strict-gloo", **settings)
        self.needs_warm_up = True


STRICT = StrictRunner


def run_strictly(task: ComparisonRun) -> dict[str, Any]:
    with patch.object(comparison_run, "Runner", STRICT):
        return execute_run(task)


def recorded_strictly(task: ComparisonRun, elements: int | None) -> tuple[Placement, list[Record]]:
    with patch.object(comparison_run, "Runner", STRICT):
        return recorded(task, elements)


def flat(result: comparison_run.RunResult) -> Iterator[tuple[str, Tensor]]:
    for kind in ("outputs", "gradients", "first_state", "state"):
        yield from ((f"{kind} {key}", tensor) for key, tensor in getattr(result, kind).items())


def assert_alike(seen: Subject, plan: Plan, folder: Path) -> None:
    """The same plan on both transports gives the same bits, and other work on the ranks goes on."""
    found = []
    for run in (execute_run, run_strictly):
        task = replace(seen.task, plan=plan, result=str(folder / run.__name__))
        pool(plan.size)(run, task)
        found.append(load_result(task.result))
    usual, strict = found
    assert strict.losses == usual.losses
    assert all(loss == loss for loss in usual.losses)
    other = dict(flat(strict))
    assert set(other) == {key for key, _ in flat(usual)}
    assert not [key for key, tensor in flat(usual) if not torch.equal(tensor, other[key])]


CELLS = [
    *(("vgg16-cifar", "pipeline", 3, schedule, 6) for schedule in ("gpipe", "1f1b-sno", "1f1b-so", "interleaved")),
    ("vgg16-cifar", "pipeline", 4, "1f1b-so", 3),  # a batch of 8 in 3, 3, 2
    ("vgg16-cifar", "data+pipeline", 3, "1f1b-so", 3),  # stages of two ranks and of one
    ("unet3d", "pipeline", 3, "1f1b-so", 4),  # skips over a stage
    ("unet3d", "spatial+pipeline", 3, "1f1b-sno", 2),
    ("gpt2", "pipeline", 3, "1f1b-sno", 3),  # a tied weight; a batch of 4 in 2, 1, 1
    ("gpt2", "filter+pipeline", 4, "1f1b-so", 2),
]
MORE = [
    ("vgg16-cifar", "data+pipeline", 4, "interleaved", 4),
    ("unet3d", "pipeline", 4, "gpipe", 4),
    ("unet3d", "pipeline", 2, "interleaved", 2),
    ("gpt2", "pipeline", 2, "interleaved", 4),
    ("gnmt", "pipeline", 3, "interleaved", 3),
]
CELLS += [pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE]


@pytest.mark.parametrize(("name", "strategy", "ranks", "schedule", "microbatches"), CELLS)
def test_ordered_messages_give_the_numbers_of_tagged_ones(
    name: str, strategy: str, ranks: int, schedule: str, microbatches: int, tmp_path: Path
) -> None:
    options = Options(schedule=schedule, microbatches=microbatches)
    plan = named(strategy, graph_of(name), ranks=ranks, batch=batch_of(name), options=options)
    assert_alike(built_in(name), plan, tmp_path)


def awkward(name: str) -> Subject:
    example, graph = net(name).workload.example, net(name).workload.graph
    state = {key: tensor.detach().clone() for key, tensor in stored_tensors(example).items()}
    return subject(graph, state, [*example.inputs, *example.targets], net(name).workload.batch)


@pytest.mark.parametrize("name", sorted(NETS))
def test_awkward_nets_in_turn_on_two_sets_of_ranks(name: str, tmp_path: Path) -> None:
    judge = net(name)
    places = [k for k, op in enumerate(judge.workload.graph.ops) if op.name in judge.workload.graph.dependent]
    firsts = ["", *(judge.paths[places[k * len(places) // 4]] for k in (1, 2, 3))]
    assert_alike(awkward(name), judge.plan(firsts, places=2, microbatches=2, schedule="interleaved"), tmp_path)


def test_stages_on_the_same_ranks_that_lay_a_tensor_differently_exchange_it(tmp_path: Path) -> None:
    judge, meshes = net("Fork"), (Mesh.of(data=2), Mesh.of(model=2), Mesh.of(data=2))
    linear = [op.path for op in judge.workload.graph.ops if "linear" in op.target]
    firsts = ("", linear[1], linear[2])
    stages = tuple(Stage(first=first, ranks=(0, 1), mesh=mesh) for first, mesh in zip(firsts, meshes, strict=True))
    plan = judge.plan(["", linear[1]], places=1, microbatches=2, schedule="interleaved")
    plan = replace(plan, mesh=meshes[0], stages=stages, splits=((linear[1], {"model": "filter"}),))
    made = lower_plan(judge.workload.graph, plan)
    assert {pair for boundary in boundaries(made) for pair in pairs(made, boundary)} == {(0, 1), (1, 0)}
    assert_alike(awkward("Fork"), plan, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        Case(model="vgg16-cifar", strategy="data+pipeline", ranks=4, options="--zero 1"),
        Case(model="gpt2", strategy="pipeline", ranks=3, options="--schedule gpipe --microbatches 4"),
        Case(model="gpt2", strategy="filter+pipeline", ranks=4, options="--microbatches 2"),
        Case(model="unet3d", strategy="pipeline", ranks=3, options="--microbatches 2"),
    ],
    ids=lambda case: case.name,
)
def test_ordered_messages_are_written_down_as_the_list_says(case: Case) -> None:
    task = replace(agreement.subject_named(case.model).task, plan=case.plan(), result="")
    made = lower_plan(task.graph, task.plan)
    for rank, (placement, seen) in enumerate(pool(case.ranks)(recorded_strictly, task, None)):
        assert seen == records(made, placement, rank, precision="fp64", clips=True)


# --- what it punishes ---


def passed(sent: tuple[int, str], expected: tuple[int, str], behind: bool) -> str:
    """Rank 0 sends so many bytes by a name to rank 1, which expects others; what this rank says of it."""
    rank, boundary = dist.get_rank(), Boundary("F", 0, 1)
    strict = StrictGloo({boundary: Communicator(dist.new_group([0, 1], timeout=TIMEOUT))})
    size, name = sent if rank == 0 else expected
    pieces = [Piece(1 - rank, rank == 0, torch.ones(size, dtype=torch.uint8), 0, name)]
    works = [strict.post(boundary, pieces), strict.post(boundary, pieces) if behind else []]
    try:
        for work in (w for some in works for w in some):
            work.wait()
    except WorkerFailed as error:
        return str(error)
    return ""


def test_a_message_of_another_size_or_name_is_an_error_that_names_both_sides() -> None:
    with LocalRanks(2, timeout=60) as ranks:
        assert ranks(passed, (4, "x of 0"), (4, "x of 0"), True) == ["", ""]
        sender, receiver = ranks(passed, (4, "x of 0"), (8, "x of 0"), True)
        assert "rank 1 expects 8 bytes of x of 0 on 0>1F; rank 0 sends 4 bytes of x of 0" in receiver
        assert "rank 0 sends 4 bytes of x of 0 on 0>1F; rank 1 expects another" in sender
    with LocalRanks(2, timeout=60) as ranks:
        _, receiver = ranks(passed, (4, "x of 0"), (4, "x of 1"), False)
        assert "rank 1 expects 4 bytes of x of 1 on 0>1F; rank 0 sends 4 bytes of x of 0" in receiver


def sent_unheard() -> str:
    """Rank 0 sends what nobody receives for now."""
    rank, boundary = dist.get_rank(), Boundary("F", 0, 1)
    strict = StrictGloo({boundary: Communicator(dist.new_group([0, 1], timeout=TIMEOUT))})
    pieces = [Piece(1 - rank, rank == 0, torch.ones(4), 0, "x")]
    early = strict.post(boundary, pieces)[0] if rank == 0 else None
    done = early is not None and early.future.done()  # type: ignore[attr-defined]
    dist.barrier()
    done = done or (early is not None and early.future.done())  # type: ignore[attr-defined]
    dist.barrier()
    (early or strict.post(boundary, pieces)[0]).wait()
    return "early" if done else "met"


def test_a_send_is_done_only_when_its_receive_is_there() -> None:
    assert pool(2)(sent_unheard) == ["met", "met"]


def test_a_plan_of_one_process_needs_no_communicator() -> None:
    judge = net("Shared")
    with patch.object(runner_module, "check_runnable", lambda plan: None):
        seen = awkward("Shared")
        plan = judge.plan(["", judge.paths[len(judge.paths) // 2]], places=1, microbatches=2, schedule="interleaved")
        assert run_strictly(replace(seen.task, plan=plan, result=""))["losses"] == pytest.approx(seen.reference.losses)
