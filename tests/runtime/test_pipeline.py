"""Pipelines on real ranks: any cut, schedule and micro-batches give the numbers of the eager module in float64."""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from awkward import NETS, Alone, Judge, built_in, net
from fourfold.errors import WorkerFailed
from fourfold.plans import Options, named
from fourfold.plans.lists.rank_schedule import UNTIMED
from fourfold.plans.lowering.stages import cut
from fourfold.plans.spec.plan import Segment
from fourfold.plans.spec.schedule import schedule_named
from fourfold.runs.reference import EAGER
from fourfold.runtime.host.launch import LocalRanks
from fourfold.timeline import Timeline
from ranks import pool
from small import batch_of


def cuts(judge: Judge, stages: int, seed: int) -> list[str]:
    """The first ops of stages cut anywhere but within what depends on no input."""
    graph = judge.workload.graph
    places = [k for k, op in enumerate(graph.ops) if op.name in graph.dependent][1:]
    return ["", *(judge.paths[k] for k in sorted(random.Random(seed).sample(places, stages - 1)))]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seed", range(3))
def test_stages_in_turn_on_one_rank_equal_the_module(name: str, seed: int) -> None:
    judge = net(name)
    for stages, microbatches in [(2, 1), (3, 3), (5, 2)]:
        firsts = cuts(judge, stages, seed)
        judge.assert_equal(judge.plan(firsts, places=1, microbatches=microbatches, schedule="interleaved"))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("ranks", "schedule", "microbatches"), [(3, "1f1b-so", 3), (2, "interleaved", 2), (3, "gpipe", 3)])
def test_awkward_nets_on_ranks_equal_the_module(name: str, ranks: int, schedule: str, microbatches: int) -> None:
    judge = net(name)
    stages = ranks * 2 if schedule == "interleaved" else ranks
    judge.assert_equal(judge.plan(cuts(judge, stages, 7), places=ranks, microbatches=microbatches, schedule=schedule))
    assert judge.reference.kind == EAGER


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seed", range(2))
def test_any_run_of_ops_may_be_recomputed_in_any_stage(name: str, seed: int) -> None:
    judge, rng = net(name), random.Random(seed)
    firsts, graph = cuts(judge, 3, seed), judge.workload.graph
    segments = []
    for part in cut(graph, firsts).graphs:
        paths = [op.path for op in part.ops if op.name in graph.dependent]
        low, high = sorted(rng.choices(range(len(paths)), k=2))
        segments.append(Segment(first=paths[low], last=paths[high]))
    plan = judge.plan(firsts, places=1, microbatches=3, schedule="interleaved")
    judge.assert_equal(replace(plan, recompute=tuple(segments)))


CELLS = [
    ("vgg16-cifar", "pipeline", 2, "gpipe", 4),
    ("vgg16-cifar", "pipeline", 3, "1f1b-so", 3),  # a batch of 8 in 3, 3, 2
    ("vgg16-cifar", "data+pipeline", 3, "1f1b-sno", 3),  # stages of two ranks and of one
    ("vgg16-cifar", "filter+pipeline", 4, "1f1b-so", 2),
    ("vgg16-cifar", "spatial+pipeline", 4, "gpipe", 2),
    ("vgg16-cifar", "splitbrain", 4, "1f1b-so", 2),
    ("unet3d", "pipeline", 3, "1f1b-so", 4),
    ("unet3d", "pipeline", 2, "interleaved", 2),
    ("unet3d", "spatial+pipeline", 3, "1f1b-sno", 2),
    ("resnet50", "pipeline", 4, "1f1b-sno", 4),
    ("gpt2", "pipeline", 4, "gpipe", 3),  # a batch of 4 in 2, 1, 1
    ("gpt2", "pipeline", 2, "interleaved", 4),
    ("gpt2", "filter+pipeline", 4, "1f1b-so", 2),  # the tied weight lies split over each stage's ranks
    ("gnmt", "pipeline", 3, "interleaved", 3),
    ("gnmt", "data+pipeline", 4, "1f1b-so", 2),
]


@pytest.mark.parametrize(("name", "strategy", "ranks", "schedule", "microbatches"), CELLS)
def test_built_in_models_equal_the_module(name: str, strategy: str, ranks: int, schedule: str, microbatches: int) -> None:
    judge = built_in(name)
    stages = 2 if strategy == "splitbrain" else None
    options = Options(schedule=schedule, microbatches=microbatches, stages=stages)
    plan = named(strategy, judge.workload.graph, ranks=ranks, batch=batch_of(name), options=options)
    verdict = judge.assert_equal(plan)
    if (name, ranks) == ("unet3d", 3) and strategy == "pipeline":
        assert any(c.target - c.source == 2 for c in verdict.program.crossings), "no skip jumps over a stage"
    if name == "gpt2":
        assert verdict.program.cut.tied
    assert sum(plan.sizes) == batch_of(name)
    assert len(plan.sizes) == microbatches


# --- through the Python interface ---


class Tied(nn.Module):
    """Tokens in, logits by the same weight out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.layers(self.embedding(ids)), self.embedding.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(13, (6, 5), generator=generator) for _ in range(2))  # type: ignore[return-value]


def made(strategy: str, ranks: int, schedule: str = "1f1b-so") -> ff.Parallel:
    torch.manual_seed(2)
    model = Tied().double()
    x, y = batch(0)
    options = Options(schedule=schedule, microbatches=4)
    plan = ff.plan(model, (x,), targets=(y,), loss=loss_of, strategy=strategy, devices=ranks, options=options).best
    return ff.parallelize(model, plan, loss=loss_of, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], 0.01))


def copies_after(ranks: int, schedule: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """The loss in evaluation after each step, and this rank's copies of the tied weight after the last."""
    run = made("pipeline", ranks, schedule)
    losses = []
    for step in range(steps):
        run.step(*batch(step))
        losses.append(float(run.evaluate(*batch(9))[0]))
    executors = run.runner.executors.values()
    return losses, [t.detach().clone() for e in executors for n, t in e.state.items() if e.keys[n] == "embedding.weight"]


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b-so"), (3, "gpipe"), (1, "interleaved")])
def test_copies_of_a_tied_weight_stay_bitwise_equal(ranks: int, schedule: str) -> None:
    answers = (Alone() if ranks == 1 else pool(ranks))(copies_after, ranks, schedule, 5)
    first, second = [copy for _, copies in answers for copy in copies]
    assert torch.equal(first, second)
    torch.manual_seed(2)
    model = Tied().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        losses.append(loss_of(model(batch(9)[0]), batch(9)[1]).item())
    torch.testing.assert_close(first, model.embedding.weight.detach(), rtol=1e-9, atol=1e-11)
    assert all(got == pytest.approx(losses, rel=1e-10) for got, _ in answers)


def recorded(strategy: str, ranks: int, schedule: str) -> tuple[Timeline, list[str]]:
    """The timeline of a step, and this rank's list of actions."""
    run = made(strategy, ranks, schedule)
    return run.timeline(*batch(0)), [
        str(t) for t in run.lowered.rank_schedule(run.runner.rank) if t.kind not in (*UNTIMED, "update")
    ]


@pytest.mark.parametrize(("strategy", "ranks", "schedule"), [("pipeline", 4, "1f1b-sno"), ("pipeline", 4, "1f1b-so"),
                                                             ("pipeline", 2, "interleaved"), ("data+pipeline", 4, "gpipe"),
                                                             ("data+pipeline", 3, "1f1b-so")])  # fmt: skip
def test_a_recorded_step_is_the_list_of_actions_with_as_many_micro_batches_in_flight(
    strategy: str, ranks: int, schedule: str
) -> None:
    answers = pool(ranks)(recorded, strategy, ranks, schedule)
    places = ranks if strategy == "pipeline" else 2
    timetable = schedule_named(schedule, places, 4)
    timeline = answers[0][0]
    assert all(other.events == timeline.events for other, _ in answers)
    assert timeline.ranks == tuple(range(ranks))
    for rank, (_, tasks) in enumerate(answers):
        assert list(timeline.actions(rank)) == tasks
        events = [e for e in timeline.events if e.rank == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(events))
        for stage in {int(e.action.partition(e.kind)[0]) for e in events if e.kind in ("F", "B")}:
            assert peak([e.action for e in events if e.kind in ("F", "B")], stage) == timetable.in_flight(stage)


def peak(actions: list[str], stage: int) -> int:
    """The most micro-batches of a stage that are between forward and backward."""
    held = most = 0
    for action in actions:
        held += (action.startswith(f"{stage}F")) - (action.startswith(f"{stage}B"))
        most = max(most, held)
    return most


class Idle(nn.Module):
    """Nothing to train at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 13).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def trained_in_front(ranks: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and norms of some steps and the state after them; how many tensors this rank trains."""
    torch.manual_seed(3)
    model, x, y = Idle().double(), torch.randn(4, 8, dtype=torch.float64), torch.arange(4)
    loss = nn.functional.cross_entropy
    options = Options(stages=ranks, microbatches=2)
    plan = ff.plan(model, (x,), targets=(y,), loss=loss, strategy="pipeline", devices=ranks, options=options).best
    run = ff.parallelize(model, plan, loss=loss, optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1))
    numbers = []
    for _ in range(3):
        numbers += [float(run.forward_backward(x, y)), float(run.clip_grad_norm(0.1))]
        run.optimizer.step()
    return numbers, run.state_dict(), len(run.runner.named_parameters())


def test_a_rank_with_nothing_to_train_takes_part_in_steps_and_clipping() -> None:
    numbers, state, _ = trained_in_front(1)
    answers = pool(2)(trained_in_front, 2)
    assert [count for _, _, count in answers] == [2, 0]
    for got, held, _ in answers:
        assert got == pytest.approx(numbers, rel=1e-12)
        assert all(torch.allclose(held[key], value, rtol=1e-12) for key, value in state.items())


# --- a rank that fails ---


def failing(how: str) -> None:
    """A step in whose backward, on the last stage, something happens."""
    run = made("pipeline", 2)

    def happens(gradient: Tensor) -> Tensor:
        if how == "dies":
            os._exit(7)
        time.sleep(60)
        return gradient

    if run.runner.rank == 1:
        run.runner.named_parameters()[0][1].register_hook(happens)
    run.step(*batch(0))


@pytest.mark.parametrize(
    ("how", "said"),
    [("dies", r"rank 1 died \(exit code 7\)"), ("hangs", r"(?s)rank 0 failed.*[Tt]imed? ?out")],
)
def test_a_rank_that_fails_within_a_step_stops_the_others_in_time(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_TIMEOUT", "4" if how == "hangs" else "30")
    with LocalRanks(2, timeout=60) as ranks, pytest.raises(WorkerFailed, match=said) as found:
        ranks(time.monotonic)
        begun = time.monotonic()
        ranks(failing, how)
    assert time.monotonic() - begun < 40  # of the 60 it would sleep
    assert found.value.exit_code == 3
