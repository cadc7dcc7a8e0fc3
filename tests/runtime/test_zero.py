"""ZeRO: dividing the optimizer's state (1) or the weights too (3) changes no number, and the memory falls as it should."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fourfold as ff
from fourfold.cluster import Cluster, Curve, Measured, local
from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph.capture import capture
from fourfold.index import IndexSet
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.stage import StagePrices
from fourfold.plans import Mesh, Options, Plan, lower, lower_plan, named
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.actions import Fetch
from fourfold.plans.lists.comm_batches import chunks, weight_gathers
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.plan import Segment
from fourfold.plans.spec.policy import Policy
from fourfold.runs.comparison_run import ComparisonRun, execute_run, load_result, runner
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.zero.weight_transport import GatheredWeight
from fourfold.runtime.zero.zero3 import SavedView, Zero3Weights
from fourfold.runtime.zero.zero3_collective import CollectiveTransport
from fourfold.runtime.zero.zero3_shared import SharedTransport
from ranks import between_hosts, pool
from small import SMALL, Subject, assert_equal, batch_of, built_in, graph_of, subject

VGG = "vgg16-cifar"


def plan_of(name: str, strategy: str, ranks: int, zero: int, **fields: Any) -> Plan:
    return replace(named(strategy, graph_of(name), ranks=ranks, batch=batch_of(name)), zero=zero, **fields)


# --- the algebra ---


@pytest.mark.parametrize("shape", [(8, 4), (3, 5), (10,), (1, 1), (2, 9), (0, 3)])
@pytest.mark.parametrize("mesh", [Mesh.of(data=4), Mesh.of(data=2, model=3)])
def test_a_divided_layout_holds_every_element_once(shape: tuple[int, ...], mesh: Mesh) -> None:
    divided = Layout.same(shape).fully_sharded(mesh)
    held = [divided.local_shape(mesh.coords(rank)) for rank in range(mesh.size)]
    assert sum(torch.Size(local).numel() for local in held) == torch.Size(shape).numel()
    assert divided.sharded == set(mesh.names)


def test_a_tensor_without_dims_stays_whole() -> None:
    assert Layout.same(()).fully_sharded(Mesh.of(data=4)) == Layout.same(())


def test_dividing_further_keeps_what_is_divided_and_cuts_one_run_out_of_it() -> None:
    mesh = Mesh.of(data=2, model=2)
    rows = Layout.same((8, 3)).dims[0].refine(mesh, "model")
    divided = Layout((rows, Layout.same((8, 3)).dims[1])).fully_sharded(mesh)
    assert [own.axes for own in divided.dims] == [("data", "model"), ()]
    assert divided.dims[0].at({"data": 1, "model": 0}) == IndexSet.of(8, [(2, 4)])


def test_a_first_dim_with_too_few_indices_leaves_the_division_to_the_longest() -> None:
    divided = Layout.same((3, 5, 7)).fully_sharded(Mesh.of(data=4))
    assert [own.axes for own in divided.dims] == [(), (), ("data",)]


@pytest.mark.parametrize("strategy", ["data", "filter", "data+filter"])
def test_zero_3_stores_every_weight_once_and_zero_1_updates_it_once(strategy: str) -> None:
    whole = sum(p.numel() for p in built_in(VGG).start.values())
    for zero, kind in [(3, "stored"), (1, "updates")]:
        plan = plan_of(VGG, strategy, 4, zero)
        program = lower(graph_of(VGG), plan)
        layouts = [getattr(program, kind)[p.name] for p in program.graph.parameters]
        points = [plan.mesh.coords(rank) for rank in range(4)]
        assert sum(torch.Size(layout.local_shape(at)).numel() for layout in layouts for at in points) == whole
        assert program.updates.keys() == {p.name for p in program.graph.parameters if p.trainable}


def test_without_zero_a_rank_updates_what_it_stores_and_nothing_is_gathered() -> None:
    program = lower(graph_of(VGG), plan_of(VGG, "data", 4, 0))
    assert all(program.stored[name] == layout for name, layout in program.updates.items())
    assert not [move for move in program.moves() if move.kind == "parameter"]


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("strategy", ["data", "data+filter"])
def test_ops_are_divided_as_without_zero_however_weights_are_stored(name: str, strategy: str) -> None:
    plain = lower(graph_of(name), plan_of(name, strategy, 4, 0))
    program = lower(graph_of(name), plan_of(name, strategy, 4, 3))
    again = lower(graph_of(name), plan_of(name, strategy, 4, 3), like=program)  # evaluation, other micro-batches
    for found in (program, again):
        assert {c.op.path: c.choice for c in found.computes()} == {c.op.path: c.choice for c in plain.computes()}


def test_on_one_rank_zero_changes_nothing() -> None:
    plain = lower(graph_of(VGG), plan_of(VGG, "data", 1, 0))
    for zero in (1, 3):
        program = lower(graph_of(VGG), plan_of(VGG, "data", 1, zero))
        assert (program.steps, program.stored, program.updates) == (plain.steps, plain.stored, plain.updates)


# --- the numbers ---

CELLS = [
    (VGG, "data", 2, 3, 1),
    (VGG, "data", 3, 3, 3),  # ten classes and eight examples on three ranks, micro-batches of 3, 3, 2
    (VGG, "data", 3, 1, 3),
    (VGG, "data", 4, 3, 3),  # micro-batches with no example for one of the ranks
    (VGG, "filter", 4, 3, 1),
    (VGG, "data+filter", 4, 3, 1),
    (VGG, "data+filter", 4, 1, 2),
    (VGG, "splitbrain", 4, 3, 1),  # in passes
    ("resnet50", "data", 2, 1, 1),
    ("resnet50", "data+filter", 4, 3, 1),
    ("gpt2", "data", 2, 3, 2),
    ("gpt2", "filter", 2, 1, 1),
    ("gpt2", "filter", 3, 3, 1),
    ("gpt2", "data+pipeline", 4, 3, 2),  # the tied table is in two stages of two ranks each
    ("gpt2", "data+pipeline", 4, 1, 2),
    ("unet3d", "spatial", 3, 3, 1),
    ("unet3d", "spatial", 2, 1, 1),
    ("unet3d", "data", 4, 3, 1),  # a head of three filters on four ranks
]


@pytest.mark.parametrize(("name", "strategy", "ranks", "zero", "microbatches"), CELLS)
def test_zero_gives_the_numbers_of_one_rank(name: str, strategy: str, ranks: int, zero: int, microbatches: int) -> None:
    assert_equal(built_in(name).errors(plan_of(name, strategy, ranks, zero, microbatches=microbatches)))


@pytest.fixture(scope="module")
def apart() -> Iterator[LocalRanks]:
    """Three ranks that may not share memory."""
    with ranks_apart(3) as ranks:
        yield ranks


def ranks_apart(count: int) -> LocalRanks:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOURFOLD_SOCKETS", "1")
        patch.setenv("FOURFOLD_TIMEOUT", os.environ.get("FOURFOLD_TIMEOUT", "60"))
        ranks = LocalRanks(count, timeout=240)
        ranks(float, 0)  # started under these settings
    return ranks


def run_by_messages(task: ComparisonRun) -> None:
    _, travelled = between_hosts(execute_run, task)
    assert travelled


@pytest.mark.parametrize("large", [False, True], ids=["collectives", "messages"])
@pytest.mark.parametrize(
    ("name", "strategy", "zero", "microbatches"),
    [(VGG, "data", 3, 3), ("gpt2", "filter", 3, 1), ("gpt2", "data", 3, 3), ("unet3d", "spatial", 3, 1)],
)
def test_zero_over_sockets_gives_the_numbers_of_one_rank(
    apart: LocalRanks, name: str, strategy: str, zero: int, microbatches: int, large: bool
) -> None:
    plan = plan_of(name, strategy, 3, zero, microbatches=microbatches)
    assert_equal(built_in(name).errors(plan, ranks=apart, run=run_by_messages if large else execute_run))


def test_slices_over_sockets_give_the_numbers_of_one_rank(apart: LocalRanks) -> None:
    assert_equal(built_in(VGG).errors(plan_of(VGG, "data", 3, 1), ranks=apart))
    with ranks_apart(2) as two:  # among more, a ring gathers
        assert_equal(built_in(VGG).errors(plan_of(VGG, "data", 2, 1), ranks=two, run=run_by_messages))


class Mixed(nn.Module):
    """A weight used twice, one that is frozen, a scalar, one that no gradient reaches, and a bias of ten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 10)
        self.second.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.aside = nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.scale
        h = torch.tanh(self.second(torch.tanh(self.second(h))))
        return self.head(h) + self.aside(h).detach()


@cache
def mixed() -> Subject:
    torch.manual_seed(0)
    model, inputs = Mixed(), torch.randn(6, 5)
    graph = capture(model, (inputs,), (), lambda out: out.square().mean())
    return subject(graph, {k: p.detach().clone() for k, p in model.named_parameters()}, [inputs], 6)


@pytest.mark.parametrize("zero", [1, 3])
def test_frozen_shared_unreached_and_scalar_parameters(apart: LocalRanks, zero: int) -> None:
    plan = replace(named("data", mixed().task.graph, ranks=3, batch=6), zero=zero, microbatches=2)
    assert_equal(mixed().errors(plan))
    assert_equal(mixed().errors(plan, ranks=apart))


def test_weights_are_gathered_again_where_a_segment_is_recomputed(apart: LocalRanks) -> None:
    paths = [op.path for op in graph_of(VGG).ops]
    segments = (Segment(first=paths[2], last=paths[9]), Segment(first=paths[20], last=paths[-4]))
    plan = plan_of(VGG, "data", 3, 3, microbatches=2, recompute=segments)
    assert_equal(built_in(VGG).errors(plan))
    assert_equal(built_in(VGG).errors(plan, ranks=apart))


def test_a_rank_that_saves_nothing_takes_part_when_a_segment_runs_again(apart: LocalRanks) -> None:
    """Two examples on three ranks: one has none of them."""
    options = Options(zero=3, recompute=2, microbatches=2)
    plan = named("data", graph_of("gpt2"), ranks=3, batch=4, options=options)
    assert_equal(built_in("gpt2").errors(plan, ranks=apart))


@pytest.mark.parametrize("shapes", [[(3, 4), (0, 5), (7,), (2, 6)], [(1, 12)], [], [(5, 0)]])
def test_chunks_hold_every_row_once_and_no_more_than_fits(shapes: list[tuple[int, ...]]) -> None:
    found = chunks(shapes, 12)
    rows = [(k, row) for chunk in found for k, low, high in chunk for row in range(low, high)]
    assert rows == [(k, row) for k, shape in enumerate(shapes) if all(shape) for row in range(shape[0])]
    widths = [torch.Size(shape[1:]).numel() for shape in shapes]
    assert all(sum((high - low) * widths[k] for k, low, high in chunk) <= 12 for chunk in found)


@pytest.mark.parametrize("sockets", [False, True])
def test_slices_gathered_in_many_rounds_give_the_numbers_of_one_rank(apart: LocalRanks, sockets: bool) -> None:
    plan = plan_of("gpt2", "data", 3, 1, policy=Policy(chunk_bytes=8 * 1000))
    lists = lower_plan(graph_of("gpt2"), plan).lists(Placement.one_host(3), "fp64")
    assert all(slices.rounds > 10 for found in lists.values() for slices in found.messages.slices)
    assert_equal(built_in("gpt2").errors(plan, ranks=apart if sockets else pool(3)))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("zero", [1, 3])
def test_optimizers_with_state_give_the_numbers_of_one_rank(optimizer: str, zero: int) -> None:
    built = with_optimizer(optimizer)
    assert_equal(built.errors(plan_of(VGG, "data", 3, zero)))


@cache
def with_optimizer(optimizer: str) -> Subject:
    built = built_in(VGG)
    result = str(Path(built.task.data).with_name(f"{optimizer}.pt"))
    task = replace(built.task, optimizer=optimizer, result=result)
    execute_run(task)
    return replace(built, task=task, reference=load_result(result))


# --- the memory ---


def bytes_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def bytes_held(task: ComparisonRun) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer state after a step."""
    data = torch.load(task.data)
    running = runner(task, data["state"], Randomness(exact=True))
    optimizer = optimizer_named(task.optimizer)([tensor for _, tensor in running.named_parameters()])
    running.gather_after_step(optimizer)
    running.forward_backward(dict(zip((*task.graph.inputs, *task.graph.targets), data["inputs"], strict=True)))
    optimizer.step()
    state = [t for found in optimizer.state.values() for t in found.values() if isinstance(t, Tensor) and t.dim()]
    trained = [tensor for _, _, tensor, _ in running.trained_parameters()]
    return {"parameters": bytes_of(trained), "gradients": bytes_of(t.grad for t in trained), "state": bytes_of(state)}


def test_state_weights_and_gradients_fall_by_the_number_of_replicas() -> None:
    built, whole = built_in(VGG), 8 * sum(t.numel() for t in built_in(VGG).start.values())
    for zero, divided in [(0, set()), (1, {"state"}), (3, {"state", "parameters", "gradients"})]:
        task = replace(built.task, plan=plan_of(VGG, "data", 4, zero), optimizer="adamw")
        for held in pool(4)(bytes_held, task):
            for kind, count in {"parameters": 1, "gradients": 1, "state": 2}.items():
                share = held[kind] / (count * whole)
                assert 0.24 < share < 0.26 if kind in divided else share == 1, (zero, kind, share)


class Watch:
    """The gathered weights that are alive, seen whenever one more is asked for."""

    def __init__(self, weights: Zero3Weights) -> None:
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.total = self.largest = self.peak = 0
        transport: Any = weights.transport
        transport.fetch = self.seen(transport.fetch)

    def seen(self, get: Any) -> Any:
        def got(*arguments: Any) -> Tensor:
            tensor: Tensor = get(*arguments)
            storage = tensor.untyped_storage()
            self.alive.append((StorageWeakRef(storage), storage.nbytes()))
            self.total, self.largest = self.total + storage.nbytes(), max(self.largest, storage.nbytes())
            self.peak = max(self.peak, self.bytes())
            return tensor

        return got

    def bytes(self) -> int:
        return sum(size for reference, size in self.alive if not reference.expired())


def gathered_bytes(task: ComparisonRun) -> dict[str, Any]:
    """How much gathered weight is alive after forward, at most in a step, and after it."""
    data = torch.load(task.data)
    running = runner(task, data["state"], Randomness(exact=True))
    feeds = dict(zip((*task.graph.inputs, *task.graph.targets), data["inputs"], strict=True))
    running.forward_backward(feeds)
    executor = running.executors[0]
    watch = Watch(executor.weights)
    running._reset(feeds)
    running.collect_outputs, running.record = False, False
    facts: dict[str, Any] = {}
    for each in running.actions[:-1]:
        running._run[each.kind](each)
        if each.kind == "F":
            facts = {"after forward": watch.bytes(), "gathered in forward": watch.total, "at once": watch.peak}
    wired = isinstance(executor.weights.transport, CollectiveTransport)
    assert wired != isinstance(executor.weights.transport, SharedTransport)
    return {**facts, "in backward": watch.peak, "after": watch.bytes(), "largest": watch.largest, "wired": wired}


@pytest.mark.parametrize("sockets", [False, True])
def test_gathered_weights_do_not_outlive_their_use(apart: LocalRanks, sockets: bool) -> None:
    built, plan = built_in(VGG), plan_of(VGG, "data", 3, 3)
    whole = 8 * sum(t.numel() for t in built.start.values())
    for facts in (apart if sockets else pool(3))(gathered_bytes, replace(built.task, plan=plan)):
        assert facts["wired"] == sockets
        assert facts["gathered in forward"] == whole
        assert facts["after forward"] == facts["after"] == 0
        if not sockets:
            assert facts["at once"] <= facts["largest"] + 8 * 64  # a weight and its bias
            assert facts["in backward"] <= 2 * facts["largest"]


def copied(task: ComparisonRun) -> Counter[tuple[str, str]]:
    """How often a step copies each weight together, and deals its gradient out."""
    data = torch.load(task.data)
    running = runner(task, data["state"], Randomness(exact=True))
    transport = running.executors[0].weights.transport
    assert isinstance(transport, SharedTransport)
    counts: Counter[tuple[str, str]] = Counter()
    fetch, give = transport.fetch, transport.give

    def fetched(weight: GatheredWeight, source: Any = None) -> Tensor:
        counts["fetch", weight.name] += 1
        return fetch(weight, source)

    def given(weight: GatheredWeight, grad: Tensor, target: Any = None) -> None:
        counts["give", weight.name] += 1
        give(weight, grad, target)

    transport.fetch, transport.give = fetched, given  # type: ignore[method-assign]
    running.forward_backward(dict(zip((*task.graph.inputs, *task.graph.targets), data["inputs"], strict=True)))
    return counts


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_oracle_prices_each_copy_of_a_weight_that_is_made(name: str) -> None:
    built, plan = built_in(name), plan_of(name, "data", 2, 3)
    made = lower_plan(graph_of(name), plan)
    prices = Prices(cluster=with_copies(fetch=1.0, give=1000.0))
    stage = StagePrices(made.lists(prices.placement)[0, plan.sizes[0]], prices)
    weights = {move.value for move in weight_gathers(made.parts[0].program)}
    priced = Counter({("fetch", v): 0 for v in weights})
    for item in (*stage.forward(), *stage.backward()):
        if item.label in weights and item.category == "gradient_exchange":
            priced[("give" if item.seconds > 100 else "fetch"), item.label] += 1
    for counts in pool(2)(copied, replace(built.task, plan=plan)):
        assert counts == priced


def saved(task: ComparisonRun) -> set[tuple[str, str]]:
    """Every op and every gathered weight that autograd saves for its backward."""
    data = torch.load(task.data)
    running = runner(task, data["state"], Randomness(exact=True))
    weights, found = running.executors[0].weights, set[tuple[str, str]]()
    pack = weights._pack

    def packed(tensor: Tensor) -> Any:
        out = pack(tensor)
        if isinstance(out, SavedView):
            assert weights.current_op is not None
            found.add((weights.current_op.op.path, out.weight.name))
        return out

    weights._pack = packed  # type: ignore[method-assign]
    running.forward_backward(dict(zip((*task.graph.inputs, *task.graph.targets), data["inputs"], strict=True)))
    return found


@pytest.mark.parametrize("name", sorted(SMALL))
def test_backward_gathers_what_autograd_saves_and_nothing_else(name: str) -> None:
    plan = plan_of(name, "data", 2, 3)
    lists = lower_plan(graph_of(name), plan).lists(Placement.one_host(2), "fp64")[0, plan.sizes[0]]
    users = [step for step in lists.program.computes() if id(step) in lists.messages.backward_weights]
    listed = {(step.op.path, move.value) for step in users for move in lists.messages.backward_weights[id(step)]}
    biases = {pair for pair in listed if "lstm" in pair[0] and "bias" in pair[1]}  # kept by oneDNN's LSTM alone (float32)
    for seen in pool(2)(saved, replace(built_in(name).task, plan=plan)):
        assert listed - biases <= seen <= listed


class Doubled(torch.autograd.Function):
    """Keeps the weight it is given, which no rule knows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def kept_secretly(task: ComparisonRun) -> None:
    data = torch.load(task.data)
    running = runner(task, data["state"], Randomness(exact=True))
    weights = running.executors[0].weights
    step = next(step for step in running.lowered.computes() if step.op.target.startswith("aten.add"))
    with weights.forward(task.plan.sizes[0]):
        weights.current_op = step
        fetch = next(a for a in running.lists[0, task.plan.sizes[0]].forward if isinstance(a, Fetch))
        Doubled.apply(weights.fetch(fetch, running.executors[0].state[fetch.move.source]))


def test_a_weight_that_an_op_keeps_beyond_its_rule_is_refused() -> None:
    task = replace(built_in("resnet50").task, plan=plan_of("resnet50", "data", 2, 3))
    with pytest.raises(Infeasible, match=r"keeps .* for its backward, which its rule does not say.*--zero 1"):
        LocalRanks(2, timeout=120)(kept_secretly, task)


def with_copies(**seconds: float) -> Cluster:
    """Two ranks where a weight takes so long, whatever its size."""
    curves = [
        Curve(collective=f"shared_{word}", level="loopback", ranks=2, sizes=(1.0, 1e9), seconds=(time, time))  # type: ignore[arg-type]
        for word, time in seconds.items()
    ]
    return replace(local(2), measured=Measured(curves=tuple(curves)))


# --- what is refused, and evaluation ---


def lamb_like(named_tensors: Any) -> torch.optim.Optimizer:
    class Whole(torch.optim.SGD):
        """Scales by the norm of the whole tensor."""

    return Whole([tensor for _, tensor in named_tensors], lr=0.1)


def parallel(zero: int, optimizer: Any) -> list[float]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 6)
    chosen = replace(ff.plan(model, (x,), loss=mean_square, strategy="data", devices=2).best, zero=zero)
    run = ff.parallelize(model, chosen, loss=mean_square, optimizer=optimizer)
    out = []
    for _ in range(3):
        out.append(float(run.evaluate(x)[0]))
        run.forward_backward(x)
        assert run.optimizer is not None
        run.optimizer.step()  # a loop of the user's own
    return [*out, *(float(t.double().sum()) for t in run.state_dict().values())]


def mean_square(out: Tensor) -> Tensor:
    return out.square().mean()


def sgd(named_tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named_tensors], lr=0.1, momentum=0.9)


def test_evaluation_between_steps_sees_the_weights_as_they_are() -> None:
    plain = pool(2)(parallel, 0, sgd)
    for zero in (1, 3):
        for mine, theirs in zip(pool(2)(parallel, zero, sgd), plain, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


def refusal(zero: int) -> str:
    try:
        parallel(zero, lamb_like)
    except InvalidInput as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("zero", [1, 3])
def test_an_optimizer_that_needs_whole_tensors_is_refused(zero: int) -> None:
    for said in pool(2)(refusal, zero):
        assert "Whole is not known to update elements one by one" in said
