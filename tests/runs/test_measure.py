"""The figures of a run that is over: peaks that follow what a rank holds, and the share of a step it waits."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold.plans import Options
from fourfold.runs.comparison_run import ComparisonRun, runner
from fourfold.runs.measure import measure
from fourfold.runs.train import History, train
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.recompute import run_without_saving
from fourfold.runtime.kernels import Randomness
from fourfold.timeline import Event, Timeline
from fourfold.workload.workload import Workload, load_workload, stored_tensors
from ranks import pool

SMALL = "vgg16-cifar,batch=8,width=32,channels=8"


@pytest.fixture(scope="module")
def small() -> Workload:
    return load_workload(SMALL)


def peak(seen: Workload, **options: int) -> int:
    """On one rank, in one micro-batch unless told otherwise."""
    plan = seen.plan("data", ranks=1, options=Options(**options))
    state = {key: tensor.detach() for key, tensor in stored_tensors(seen.example).items()}
    running = runner(ComparisonRun(graph=seen.graph, plan=plan, data="", precision="fp32"), state, Randomness())
    feeds = dict(zip((*seen.graph.inputs, *seen.graph.targets), seen.example.tensors, strict=True))
    optimizer = optimizer_named("sgd")([tensor for _, tensor in running.named_parameters()])
    return measure(running, optimizer, feeds).peak_bytes


def test_the_peak_holds_weights_and_gradients_and_falls_with_micro_batches(small: Workload) -> None:
    weights = sum(p.nbytes for p in small.example.module.parameters())
    whole, pieces = peak(small), peak(small, microbatches=4)
    assert whole > pieces > 2 * weights


DEEP = """
import torch
from torch import nn

def deep():
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh()))), (torch.randn(512, 16),)
"""


def test_recomputation_keeps_segment_ends_and_one_segment_s_activations(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(DEEP)
    seen = load_workload(f"{tmp_path}/nets.py:deep")
    activation = 4 * 512 * 16
    plain, again = peak(seen), peak(seen, recompute=4)
    assert plain > 12 * activation  # every tanh keeps its result
    assert again < plain - 5 * activation


def test_a_recomputed_segment_is_forgotten_after_its_backward() -> None:
    """Otherwise every step would keep its activations for ever."""
    weight = torch.ones(8, requires_grad=True)
    made: list[weakref.ref[Tensor]] = []

    def body(again: bool) -> list[Tensor]:
        inner = (weight * 2).exp()
        made.append(weakref.ref(inner))
        return [inner.sin()]

    (result,) = run_without_saving(body)
    result.sum().backward()
    del result
    assert len(made) == 2
    assert all(ref() is None for ref in made)


def run(seen: Workload, strategy: str, ranks: int, **options: object) -> History:
    plan = seen.plan(strategy, ranks=ranks, options=Options(**options))  # type: ignore[arg-type]
    return train(seen, plan, pool(ranks), steps=1, optimizer="momentum")


def test_shared_rows_count_on_the_rank_they_belong_to(small: Workload) -> None:
    """Data parallelism on one host: weights, momentum, gradients as backward makes them and as the ranks sum them."""
    weights = sum(p.nbytes for p in small.example.module.parameters())
    history = run(small, "data", 2)
    assert history.waiting == ()
    assert all(4 * weights < peak < 8 * weights for peak in history.peaks)


def test_stages_hold_less_and_say_how_long_they_wait(small: Workload) -> None:
    staged, data = run(small, "pipeline", 2, microbatches=4), run(small, "data", 2)
    assert min(staged.peaks) < min(data.peaks)
    assert len(staged.waiting) == 2
    assert all(0 <= share < 1 for share in staged.waiting)


def test_waiting_is_what_no_action_fills() -> None:
    def event(rank: int, kind: str, start: float, end: float) -> Event:
        return Event(rank=rank, action="0F0", kind=kind, start=start, end=end)

    timeline = Timeline.of([
        [event(0, "F", 0, 1), event(0, "wait", 1, 3), event(0, "B", 3, 4)],
        [event(1, "wait", 0, 1), event(1, "F", 1, 3)],
    ])  # fmt: skip
    assert [timeline.waiting(rank) for rank in (0, 1)] == [0.5, 0.5]
    assert Timeline(()).waiting(0) == 0
