"""Laws of lowering, on the built-in models without ranks: who moves what, when, and what is left to the gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from fourfold.errors import Error
from fourfold.graph.capture import capture
from fourfold.plans import Program, lower, named
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lowering.program import Compute, Move, Repeat, Step
from ranks import Job, run_jobs
from small import SMALL, assert_equal, graph_of, planned, subject

STRATEGIES = ("data", "filter", "channel", "spatial", "data+filter", "splitbrain:k=2", "grid")
CONVOLUTIONAL = ("vgg16-cifar", "resnet50", "unet3d", "cosmoflow")


def programs(ranks: int = 4) -> Iterator[tuple[str, str, Program]]:
    for model, strategy in itertools.product(SMALL, STRATEGIES):
        try:
            yield model, strategy, planned(model, strategy, ranks)[1]
        except Error:
            continue  # what is refused has tests of its own


def computes(program: Program, module: str) -> list[Compute]:
    return [c for c in program.computes() if c.op.module == module]


def travelling(program: Program) -> list[Move]:
    """Moves that send anything, forward or backward."""
    return [m for m in program.moves() if m.exchange.steps or m.exchange.adjoint.steps]


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_moves_nothing_and_reduces_nothing(model: str, strategy: str) -> None:
    _, program = planned(model, strategy.partition(":")[0], 1)
    assert travelling(program) == []
    assert program.reductions == {}


def held(layouts: dict[str, Layout], program: Program, steps: Sequence[Step], where: str) -> None:
    """Follow the slots through the steps: what is read is there, in the layout its reader wants."""
    for step in steps:
        if isinstance(step, Move):
            assert layouts[step.source] == step.exchange.source, (where, step.value)
            layouts[step.target] = step.exchange.target
        elif isinstance(step, Compute):
            for slot, need in zip(step.inputs, step.needs, strict=True):
                have = layouts[slot]
                assert (have.dims, have.partial) == (need.dims, need.partial), (where, step.op.path, slot)
                summed = set(program.reductions.get(slot, ()))
                if have != need and slot in {p.name for p in program.graph.parameters if p.trainable}:
                    assert need.replicate == summed, (where, step.op.path, slot)
            layouts.update(zip(step.outputs, step.gives, strict=True))
        else:
            for body in step.bodies:
                held({**layouts, **entering(step, body)}, program, body, where)
            layouts.update({outside: program.layouts[outside] for _, outside, _ in step.exits})


def entering(step: Repeat, body: Sequence[Compute | Move]) -> dict[str, Layout]:
    """The layout of the slice that a pass takes, as its first reader sees it."""
    ((entry, _),) = step.entries
    for inner in body:
        if isinstance(inner, Move) and inner.source == entry:
            return {entry: inner.exchange.source}
        if isinstance(inner, Compute) and entry in inner.inputs:
            return {entry: inner.needs[inner.inputs.index(entry)]}
    raise AssertionError("a pass that reads nothing")


def test_every_move_starts_where_a_value_lies_and_ends_where_its_reader_needs_it() -> None:
    seen = 0
    for model, strategy, program in programs():
        held(dict(program.stored), program, program.steps, f"{model} {strategy}")
        seen += 1
    assert seen > 30


def test_a_value_is_moved_at_most_once_into_each_layout() -> None:
    for model, strategy, program in programs():
        bodies: list[Sequence[Step]] = [program.steps]
        bodies += [body for step in program.steps if isinstance(step, Repeat) for body in step.bodies]
        for body in bodies:
            moves = [(s.value, s.exchange.target) for s in body if isinstance(s, Move) and not s.target.endswith("/out")]
            assert len(moves) == len(set(moves)), (model, strategy)


def test_every_stored_tensor_is_held_whole_by_all_ranks_together() -> None:
    for model, strategy, program in programs():
        for parameter in program.graph.parameters:
            for own in program.stored[parameter.name].dims:
                assert sorted(i for s in own.sets for i in s) == list(range(own.size)), (model, strategy, parameter.key)


@pytest.mark.parametrize("model", SMALL)
def test_data_parallelism_sends_gradients_and_nothing_else(model: str) -> None:
    """Every parameter's gradient is summed over `data`: in the buckets, or by the one edge behind what is made of it."""
    _, program = planned(model, "data", 4)
    assert all(m.exchange.steps == () for m in program.moves())
    behind = reached(program, {m.value for m in program.moves() if m.exchange.adjoint.steps})
    for parameter in program.graph.parameters:
        if parameter.trainable:
            assert (program.reductions.get(parameter.name) == ("data",)) != (parameter.name in behind), parameter.key


def reached(program: Program, values: set[str]) -> set[str]:
    """What the given values are made of."""
    producer, queue, seen = program.graph.producer, list(values), set(values)
    while queue:
        op = producer.get(queue.pop())
        new = set(op.operands) - seen if op else set()
        seen |= new
        queue += new
    return seen


@pytest.mark.parametrize("model", CONVOLUTIONAL)
def test_filter_gathers_each_activation_once_and_reduces_no_gradient(model: str) -> None:
    _, program = planned(model, "filter", 2)
    assert program.reductions == {}
    gathered = [m.value for m in travelling(program)]
    assert len(gathered) == len(set(gathered))
    anchors = [c for c in program.computes() if c.nest.anchor]
    assert len(gathered) <= len(anchors)
    for move in travelling(program):
        assert {s.pattern for s in move.exchange.steps} <= {"all_gather", "all_to_all"}
        assert any(c.nest.anchor for c in program.computes() if move.target in c.inputs), move.value


def test_channel_reduces_each_product_once_and_scatters_it_to_the_next() -> None:
    _, program = planned("vgg16-cifar", "channel", 2)
    patterns = [s.pattern for m in program.moves() for s in m.exchange.steps]
    assert patterns == ["reduce_scatter"] * 15 + ["all_reduce"]


def test_domain_fetches_halos_and_never_a_whole_tensor_before_the_head() -> None:
    _, program = planned("unet3d", "spatial", 4)
    for move in travelling(program):
        assert move.kind == "halo"
        shape = move.exchange.target.shape
        row = math.prod(shape) // shape[2]
        assert all(step.received_elements(rank) <= 2 * row for step in move.exchange.steps for rank in range(4)), move.value


def test_splitbrain_reduces_convolutions_over_both_axes_and_linear_layers_over_data_only() -> None:
    _, program = planned("vgg16-cifar", "splitbrain:k=2", 4)
    by_key = {p.key: program.reductions[p.name] for p in program.graph.parameters}
    assert {axes for key, axes in by_key.items() if key.startswith("features")} == {("data", "model")}
    assert {axes for key, axes in by_key.items() if key.startswith("classifier")} == {("data",)}


def test_a_tied_embedding_is_stored_once() -> None:
    graph = graph_of("gpt2")
    tied = [p for p in graph.parameters if p.key == "tokens.weight"]
    assert len(tied) == 1
    assert len(graph.consumers[tied[0].name]) == 2
    for strategy in ("data", "filter", "channel", "spatial"):
        _, program = planned("gpt2", strategy, 2)
        assert tied[0].name in program.stored
    filtered = planned("gpt2", "filter", 2)[1]
    assert filtered.stored[tied[0].name].state("model") == "shard(0)"
    assert not [m for m in filtered.moves() if m.kind == "parameter"]  # both uses read the same shard


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_fused_projection_is_cut_by_heads_so_that_attention_needs_no_exchange(ranks: int) -> None:
    _, program = planned("gpt2", "filter", ranks)
    for layer in range(2):
        ops = [c.op for c in program.computes() if c.op.module.startswith(f"blocks.{layer}.attention")]
        (qkv,) = [op.results[0] for op in ops if op.module.endswith("qkv")]
        (attention,) = [op for op in ops if "attention" in op.target]
        between = reached(program, set(attention.operands)) - reached(program, {qkv}) | {qkv}
        assert not [m.value for m in travelling(program) if m.value in between]
        assert qkv in reached(program, set(attention.operands))


def test_concatenated_skips_stay_where_they_are_under_filter() -> None:
    _, program = planned("unet3d", "filter", 2)
    joins = [c for c in program.computes() if c.op.target.startswith("aten.cat")]
    assert len(joins) == 3
    assert all("@" not in slot for c in joins for slot in c.inputs)
    assert {c.gives[0].state("model") for c in joins} == {"shard(1)"}


class Windowed(nn.Module):
    """Parameters read through windows: by a convolution, by a slice, by a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.look = nn.Conv2d(2, 2, 3, padding=1)
        self.seen = nn.Parameter(torch.randn(1, 2, 8, 4))
        self.cut = nn.Parameter(torch.randn(1, 2, 12, 4))
        self.strided = nn.Parameter(torch.randn(1, 2, 16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.look(self.seen) + self.cut[:, :, 2:10] * self.strided[:, :, ::2]


def test_a_parameter_read_through_a_window_keeps_every_row_once() -> None:
    torch.manual_seed(0)
    module, x = Windowed(), torch.randn(3, 2, 8, 4)
    graph = capture(module, (x,))
    start = {k: v.detach().clone() for k, v in module.state_dict().items()}
    for ranks in (2, 3):
        plan = named("spatial", graph, ranks=ranks, batch=3)
        for name, layout in lower(graph, plan).stored.items():
            for own in layout.dims:
                assert sorted(i for s in own.sets for i in s) == list(range(own.size)), name
        assert_equal(subject(graph, start, [x], 3).errors(plan))


class Turned(nn.Module):
    """One weight in two products, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 9))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x @ self.weight) @ self.weight.t()).sigmoid()


def test_a_weight_used_twice_in_different_layouts_gets_the_sum_of_both_gradients() -> None:
    torch.manual_seed(0)
    module, x = Turned().double(), torch.randn(5, 6, dtype=torch.float64)
    graph = capture(module, (x,))
    outputs = module(x)
    outputs.square().mean().backward()
    state = {k: v.detach().clone() for k, v in module.state_dict().items()}
    jobs = [
        Job(name=s, graph=graph, plan=named(s, graph, ranks=3, batch=5), state=state, inputs=[x])
        for s in ("data", "filter", "channel")
    ]
    for outcome in run_jobs(jobs, 3).values():
        assert not outcome.error, outcome.error
        torch.testing.assert_close(outcome.gradients["weight"], module.weight.grad, rtol=1e-11, atol=1e-13)
