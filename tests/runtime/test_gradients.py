"""Gradient buckets on two ranks, and SplitBrain's group exchange on four: right sums, in the right order, in small buffers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.plans import Mesh, Plan, Program, lower, named
from fourfold.plans.lists import comm_batches as plans
from fourfold.plans.lists.comm_batches import Bucket, Gradient
from fourfold.plans.lowering.program import Move, Repeat
from fourfold.plans.spec.policy import DEFAULT
from fourfold.runs.initial_tensors import cut
from fourfold.runtime.comm.gradient_buckets import GradientBuckets
from fourfold.runtime.execution.executor import Executor
from ranks import lists_of, pool, stepped, world_of
from small import Subject, assert_equal, subject

# --- how buckets are filled ---------------------------------------------------------------------------------------------

KILO = 2**10


def sizes(**kilobytes: int) -> dict[str, Tensor]:
    return {name: torch.empty(size * KILO, dtype=torch.uint8) for name, size in kilobytes.items()}


def bucketed(
    parameters: dict[str, Tensor], reductions: dict[str, tuple[str, ...]] | None = None, *, most: int, last: int
) -> tuple[Bucket, ...]:
    over = reductions or dict.fromkeys(parameters, ("data",))
    found = [Gradient(n, t.nbytes, over[n], str(t.dtype)) for n, t in parameters.items() if n in over]
    return plans.buckets(found, most=most, last=last)


def filled(parameters: dict[str, Tensor], reductions: dict[str, tuple[str, ...]] | None = None) -> list[list[str]]:
    buckets = bucketed(parameters, reductions, most=DEFAULT.bucket_bytes, last=DEFAULT.last_bucket_bytes)
    return [list(b.names) for b in buckets]


def test_buckets_are_filled_from_the_last_layer_to_the_first() -> None:
    assert filled(sizes(a=100, b=200, c=300)) == [["c", "b", "a"]]


def test_no_bucket_holds_more_than_its_size() -> None:
    parameters = sizes(**{f"p{i}": 7 * KILO for i in range(9)})
    buckets = filled(parameters)
    assert [name for names in buckets for name in names] == [f"p{i}" for i in reversed(range(9))]
    assert all(sum(parameters[n].numel() for n in names) <= DEFAULT.bucket_bytes for names in buckets)
    assert len(buckets[0]) == 3


def test_the_first_layers_get_a_small_bucket_that_ends_the_step_sooner() -> None:
    parameters = sizes(first=300, second=500, third=4 * KILO, last=4 * KILO)
    assert filled(parameters) == [["last", "third"], ["second", "first"]]
    assert sum(parameters[n].numel() for n in ("first", "second")) <= DEFAULT.last_bucket_bytes


def test_a_parameter_larger_than_a_bucket_has_one_to_itself() -> None:
    buckets = filled(sizes(a=10, large=30 * KILO, b=10))
    assert ["large"] in buckets
    assert sorted(map(sorted, buckets)) == [["a", "b"], ["large"]]


def test_groups_and_dtypes_do_not_share_a_bucket() -> None:
    parameters = {"a": torch.empty(4), "b": torch.empty(4, dtype=torch.float64), "c": torch.empty(4), "d": torch.empty(4)}
    buckets = filled(parameters, {"a": ("data",), "b": ("data",), "c": ("data", "model"), "d": ("data",)})
    assert sorted(map(sorted, buckets)) == [["a", "d"], ["b"], ["c"]]


def test_parameters_that_are_reduced_over_no_axis_are_in_no_bucket() -> None:
    assert filled(sizes(a=1, b=1), {"b": ("data",)}) == [["b"]]


# --- on ranks -----------------------------------------------------------------------------------------------------------


def summed(bucket_bytes: int) -> dict[str, Any]:
    """A chain of products; `skipped` is used by rank 1 only and `unused` by nobody."""
    world = world_of(Mesh.of(data=2))
    torch.manual_seed(0)
    parameters = {name: torch.randn(6, 6, dtype=torch.float64).requires_grad_() for name in ("first", "middle", "last")}
    parameters |= {name: torch.randn(6, 6, dtype=torch.float64).requires_grad_() for name in ("skipped", "unused")}
    ready = GradientBuckets(parameters, bucketed(parameters, most=bucket_bytes, last=0), world)
    out = []
    for step in range(2):
        x = torch.full((3, 6), 1.0 + world.rank + step, dtype=torch.float64)
        y = ((x @ parameters["first"]).tanh() @ parameters["middle"]).tanh() @ parameters["last"]
        if world.rank == 1:
            y = y + x @ parameters["skipped"]
        for tensor in parameters.values():
            tensor.grad = None
        y.square().sum().backward()
        ready.finish()
        out.append({name: tensor.grad.clone() for name, tensor in parameters.items() if tensor.grad is not None})
    return {"gradients": out, "buckets": [b.names for b in ready.buckets]}


def expected(step: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    parameters = {name: torch.randn(6, 6, dtype=torch.float64).requires_grad_() for name in ("first", "middle", "last")}
    parameters |= {name: torch.randn(6, 6, dtype=torch.float64).requires_grad_() for name in ("skipped", "unused")}
    for rank in range(2):
        x = torch.full((3, 6), 1.0 + rank + step, dtype=torch.float64)
        y = ((x @ parameters["first"]).tanh() @ parameters["middle"]).tanh() @ parameters["last"]
        (y + x @ parameters["skipped"] if rank else y).square().sum().backward()
    return {name: tensor.grad if tensor.grad is not None else torch.zeros(6, 6) for name, tensor in parameters.items()}


@pytest.mark.parametrize("bucket_bytes", [1, 600, 10**6], ids=["each alone", "two by two", "all together"])
def test_gradients_are_summed_whatever_the_buckets_and_zero_where_nobody_used_a_parameter(bucket_bytes: int) -> None:
    answers = pool(2)(summed, bucket_bytes)
    for answer in answers:
        for step in range(2):
            for name, gradient in expected(step).items():
                torch.testing.assert_close(answer["gradients"][step][name], gradient.double(), rtol=1e-12, atol=1e-12)
    assert answers[0]["buckets"] == answers[1]["buckets"]


def chained(count: int) -> dict[str, list[int]]:
    """How many buckets were under way when each layer's gradient came."""
    world = world_of(Mesh.of(data=2))
    parameters = {f"p{i}": torch.eye(4, dtype=torch.float64).requires_grad_() for i in range(count)}
    ready = GradientBuckets(parameters, bucketed(parameters, most=1, last=0), world)
    launched: list[int] = []
    for tensor in parameters.values():
        tensor.register_post_accumulate_grad_hook(lambda _: launched.append(ready.launch_count))
    y = torch.ones(2, 4, dtype=torch.float64)
    for tensor in parameters.values():
        y = y @ tensor
    y.sum().backward()
    places = [tensor.grad.data_ptr() for tensor in parameters.values() if tensor.grad is not None]
    ready.finish()
    return {
        "launched": launched,
        "order": [int(b.names[0][1:]) for b in ready.buckets],
        "stayed": [
            int(t.grad is not None and t.grad.data_ptr() == p) for t, p in zip(parameters.values(), places, strict=True)
        ],
    }


def test_buckets_leave_while_backward_runs_and_large_gradients_are_reduced_where_they_lie() -> None:
    for answer in pool(2)(chained, 5):
        assert answer["order"] == [4, 3, 2, 1, 0]  # the last layer's gradient comes first
        assert answer["launched"] == [1, 2, 3, 4, 5]  # each bucket leaves as its gradient comes
        assert answer["stayed"] == [1] * 5


# --- SplitBrain ---------------------------------------------------------------------------------------------------------


@cache
def vgg(batch: int) -> Subject:
    torch.manual_seed(0)
    model = MODELS["vgg16-cifar"](batch=batch, width=64, channels=8)
    start = {key: tensor.detach().clone() for key, tensor in model.module.state_dict().items()}
    return subject(capture(*model), start, [*model.inputs, *model.targets], batch)


def planned(strategy: str, batch: int) -> tuple[Plan, Program]:
    graph = vgg(batch).task.graph
    plan = named(strategy, graph, ranks=4, batch=batch)
    return plan, lower(graph, plan)


@pytest.mark.parametrize(("strategy", "batch"), [("splitbrain:k=2", 16), ("splitbrain:k=4", 16), ("splitbrain:k=4", 6)])
def test_splitbrain_gives_the_numbers_of_one_device(strategy: str, batch: int) -> None:
    plan, _ = planned(strategy, batch)
    assert plan.passes
    assert_equal(vgg(batch).errors(plan))


def largest_gather(program: Program) -> int:
    """Elements of the largest tensor that a move between the linear layers makes on any rank."""
    moves: list[Move] = []
    for step in program.steps:
        if isinstance(step, Repeat):
            moves += [s for body in step.bodies for s in body if isinstance(s, Move)]
        elif isinstance(step, Move):
            moves.append(step)
    steps = [s for m in moves for s in m.exchange.steps if s.pattern in ("all_gather", "all_to_all")]
    return max(math.prod(s.target.local_shape(program.mesh.coords(r))) for s in steps for r in range(program.mesh.size))


class Gathered(TorchDispatchMode):
    """Watches the collectives that pass by: the largest result of a gather or an exchange, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = {"c10d::_allgather_base_": 1, "c10d::alltoall_base_": 1, "c10d::allgather_": 2}.get(function.name())
        if results:
            tensors = args[0][0] if results == 2 else args[:1]
            self.largest = max(self.largest, sum(t.numel() for t in tensors if t.is_floating_point()))
        return function(*args, **(kwargs or {}))


def gathered(plan: Plan, task: Any) -> int:
    """The largest result seen during one forward on this rank."""
    data = torch.load(task.data, mmap=True)
    world = world_of(plan.mesh)
    lists = lists_of(lower(task.graph, plan), world)
    executor = Executor(lists, world, lambda key, layout: cut(data["state"][key], layout, world).clone())
    names = (*task.graph.inputs, *task.graph.targets)
    feeds = {name: executor.cut(name, tensor) for name, tensor in zip(names, data["inputs"], strict=True)}
    with Gathered() as watch:
        stepped(executor, feeds)
    return watch.largest


@pytest.mark.parametrize("k", [2, 4])
def test_splitbrain_in_k_passes_gathers_into_buffers_k_times_smaller(k: int) -> None:
    (whole, all_at_once), (passed, in_passes) = (planned(f"splitbrain:k={k}{p}", 16) for p in (",passes=1", ""))
    assert largest_gather(all_at_once) == k * largest_gather(in_passes)
    task = vgg(16).task
    measured = [max(pool(4)(gathered, plan, task)) for plan in (whole, passed)]
    assert measured == [largest_gather(all_at_once), largest_gather(in_passes)]
