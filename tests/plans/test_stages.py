"""Stages without processes: where a graph is cut, what crosses, who sends it to whom, and each rank's list of actions."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.ops.nest import nest_of
from fourfold.plans import Options, Plan, named
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.plan_lowering import lower_plan
from fourfold.plans.lists.rank_schedule import BLOCKING, StageAction
from fourfold.plans.lists.stage_transfer import StageTensor, incoming, outgoing
from fourfold.plans.lowering.stages import Cut, cut
from fourfold.plans.spec.plan import Stage, check_runnable
from fourfold.plans.strategies.balance import balanced_cuts, balanced_cuts_and_ranks, balanced_firsts
from layouts import Array, box_of, laid, whole_box
from small import SMALL, batch_of, graph_of

MODELS = sorted(SMALL)
SCHEDULES = ("gpipe", "1f1b-sno", "1f1b-so", "interleaved")


@cache
def staged(name: str, schedule: str, ranks: int, strategy: str = "pipeline") -> LoweredPlan:
    options = Options(schedule=schedule)
    return lower_plan(graph_of(name), named(strategy, graph_of(name), ranks=ranks, batch=batch_of(name), options=options))


def cut_anywhere(graph: Graph, rng: random.Random) -> Cut:
    """Cut before any of the ops, sensible or not."""
    places = sorted(rng.sample(range(1, len(graph.ops)), rng.randint(1, min(5, len(graph.ops) - 1))))
    return cut(graph, ["", *(graph.ops[k].path for k in places)])


# --- cuts ---


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_every_op_that_depends_on_an_input_is_in_exactly_one_stage(name: str, seed: int) -> None:
    graph = graph_of(name)
    made, once = cut_anywhere(graph, random.Random(seed)), graph.dependent
    times = Counter(op.name for part in made.graphs for op in part.ops)
    assert all(times[op.name] == 1 for op in graph.ops if op.name in once)
    assert all(times[op.name] >= 1 for op in graph.ops if any(graph.consumers[r] for r in op.results))
    for part in made.graphs:
        order = [op.name for op in graph.ops]
        assert [op.name for op in part.ops] == sorted((op.name for op in part.ops), key=order.index)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_stage_reads_is_there(name: str, seed: int) -> None:
    graph = graph_of(name)
    made = cut_anywhere(graph, random.Random(seed))
    for s, part in enumerate(made.graphs):
        known = {*part.inputs, *part.targets, *(p.name for p in part.parameters), *(c.name for c in part.constants)}
        for op in part.ops:
            assert known.issuperset(op.operands)
            known.update(op.results)
        entering = {c.value for c in made.crossings if c.target == s}
        assert set(part.inputs) - entering <= set(graph.inputs)
        assert entering <= set(part.inputs)
        made_here = {name for op in part.ops for name in op.results}
        assert {c.value for c in made.crossings if c.source == s} <= set(part.outputs) & made_here
        assert known.issuperset(part.outputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_tensors_cross_forwards_only_and_each_way_once(name: str, seed: int) -> None:
    made = cut_anywhere(graph_of(name), random.Random(seed))
    assert all(c.source < c.target for c in made.crossings)
    assert len({(c.value, c.target) for c in made.crossings}) == len(made.crossings)
    floats = {n for n, spec in graph_of(name).values.items() if spec.is_float}
    assert all(c.value in floats for c in made.crossings if c.gradient)


def test_loss_outputs_and_written_buffers_have_one_home() -> None:
    graph = graph_of("resnet50")
    made = staged("resnet50", "gpipe", 4).cut
    assert [bool(part.loss) for part in made.graphs] == [False, False, False, True]
    assert Counter(buffer for part in made.graphs for buffer, _ in part.writes) == Counter(dict.fromkeys(dict(graph.writes), 1))
    assert [set(graph.outputs) <= set(part.outputs) for part in made.graphs] == [False, False, False, True]


def test_the_tied_embedding_of_gpt2_is_kept_by_the_first_and_the_last_stage() -> None:
    for ranks in (2, 3, 4):
        made = staged("gpt2", "gpipe", ranks).cut
        keys = {p.name: p.key for p in graph_of("gpt2").parameters}
        assert {keys[name]: stages for name, stages in made.tied.items()} == {"tokens.weight": (0, ranks - 1)}


def test_the_skips_of_a_u_net_jump_over_a_stage() -> None:
    made = staged("unet3d", "1f1b-so", 3).cut
    assert any(c.target - c.source == 2 and c.gradient for c in made.crossings)
    assert {(c.source, c.target) for c in made.crossings} == {(0, 1), (1, 2), (0, 2)}


class Twice(nn.Module):
    """One batch norm used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(self.norm(x))))


def path_of(graph: Graph, text: str) -> str:
    return next(op.path for op in graph.ops if text in op.path)


def test_a_written_buffer_that_two_stages_use_is_refused() -> None:
    graph = capture(Twice(), (torch.randn(6, 4),))
    with pytest.raises(Infeasible, match=r"buffer norm\.\w+ is updated in stage \d and read in stage \d; cut the model so"):
        cut(graph, ["", path_of(graph, "second")])


class Positions(nn.Module):
    """A table computed from parameters alone, read early and late; an integer mask made early and read late."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scaled, mask = self.table.softmax(0), x.argmax(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x) + scaled * mask
        return x


def test_what_depends_on_no_input_is_computed_where_it_is_read_and_a_mask_crosses_without_a_gradient() -> None:
    graph = capture(Positions(), (torch.randn(3, 5, 4),))
    made = cut(graph, ["", path_of(graph, "layers.1"), path_of(graph, "layers.2")])
    softmax, argmax = (next(op for op in graph.ops if kind in op.target) for kind in ("softmax", "argmax"))
    assert [softmax.name in {op.name for op in part.ops} for part in made.graphs] == [True, True, True]
    assert [argmax.name in {op.name for op in part.ops} for part in made.graphs] == [True, False, False]
    masks = [(c.source, c.target, c.gradient) for c in made.crossings if c.value in argmax.results]
    assert masks == [(0, 1, False), (0, 2, False)]
    assert list(made.tied.values()) == [(0, 1, 2)]


# --- between stages ---


def sides(rng: random.Random) -> tuple[StageTensor, StageTensor]:
    """A tensor on two sets of ranks that are apart, the same, or share some."""
    shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
    meshes = [Mesh(tuple((name, rng.randint(1, 3)) for name in "abc"[: rng.randint(1, 3)])) for _ in range(2)]
    everyone = list(range(rng.randint(max(m.size for m in meshes), sum(m.size for m in meshes))))
    source, target = (StageTensor(laid(rng, mesh, shape), mesh, tuple(rng.sample(everyone, mesh.size))) for mesh in meshes)
    if rng.random() < 0.2:
        target = replace(target, mesh=source.mesh, ranks=source.ranks, layout=laid(rng, source.mesh, shape))
    return source, target


@settings(max_examples=400, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_every_taker_gets_every_index_it_needs_exactly_once(seed: int) -> None:
    source, target = sides(random.Random(seed))
    whole = np.arange(1, 1 + np.prod(source.layout.shape), dtype=float).reshape(source.layout.shape)
    held = {rank: whole[box_of(source.layout, source.mesh.coords(k))] for k, rank in enumerate(source.ranks)}
    letters: dict[tuple[int, int], Array] = {}
    for rank in source.ranks:
        for give in outgoing(source, target, rank):
            assert (rank, give.peer) not in letters
            letters[rank, give.peer] = held[rank][whole_box(give.spans)]
    for k, rank in enumerate(target.ranks):
        box = box_of(target.layout, target.mesh.coords(k))
        got, times = np.zeros_like(whole[box]), np.zeros_like(whole[box], dtype=int)
        for take in incoming(source, target, rank):
            letter = letters.pop((take.peer, rank))
            assert letter.shape == take.shape
            got[whole_box(take.spans)] = letter
            times[whole_box(take.spans)] += 1
        assert (times == 1).all()
        assert (got == whole[box]).all()
    assert not letters, "sent, but taken by nobody"


@settings(max_examples=200, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_a_rank_on_both_sides_takes_from_itself_what_it_has(seed: int) -> None:
    source, target = sides(random.Random(seed))
    for rank in set(source.ranks) & set(target.ranks):
        mine = source.box(source.ranks.index(rank))
        need = target.box(target.ranks.index(rank))
        both = [a & b for a, b in zip(mine, need, strict=True)]
        kept = [t for t in incoming(source, target, rank) if t.peer == rank]
        assert [list(t.box) for t in kept] == ([both] if all(len(s) for s in both) else [])


# --- balance ---


def load_of(total: Array, charge: Array, ends: tuple[int, ...], weights: list[float]) -> float:
    """The load of the most loaded stage; both its boundaries are charged to a stage."""
    cost = [0.0, *(float(charge[k]) for k in ends[1:-1]), 0.0]
    each = zip(itertools.pairwise(ends), itertools.pairwise(cost), weights, strict=True)
    return max((total[b] - total[a] + c + d) / w for (a, b), (c, d), w in each)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_other_cut_has_a_smaller_bottleneck(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    numbers = st.integers(0, 20).map(float)
    work = np.array(data.draw(st.lists(numbers, min_size=count, max_size=count)))
    charge = np.array(data.draw(st.lists(numbers, min_size=count, max_size=count)))
    stages = data.draw(st.integers(1, min(count, 4)))
    weights = data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=stages, max_size=stages))
    total = np.concatenate([[0.0], np.cumsum(work)])
    cost = np.array([0.0, *charge[1:], 0.0])
    load = total[None, :] - total[:, None] + cost[None, :] + cost[:, None]
    chosen, _ = balanced_cuts([load / weight for weight in weights])
    assert chosen == sorted(set(chosen))
    every = itertools.combinations(range(1, count), stages - 1)
    best = min(load_of(total, charge, (0, *cuts, count), weights) for cuts in every)
    assert load_of(total, charge, (0, *chosen, count), weights) == pytest.approx(best)


def work_of(name: str, firsts: list[str]) -> list[int]:
    """FLOPs of each stage."""
    concrete = graph_of(name).at(batch_of(name))
    flops = {op.name: nest_of(op, concrete).flops for op in concrete.ops}
    return [sum(flops[op.name] for op in part.ops) for part in cut(graph_of(name), firsts).graphs]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_begin_one_after_the_other_and_each_has_work(name: str, stages: int) -> None:
    paths = [op.path for op in graph_of(name).ops]
    firsts = balanced_firsts(graph_of(name), batch_of(name), [1.0] * stages)
    begins = [paths.index(first) for first in firsts]
    assert len(firsts) == stages
    assert begins == sorted(set(begins))
    assert all(work_of(name, firsts))


def test_a_stage_of_two_ranks_gets_about_twice_the_work() -> None:
    first, second = work_of("vgg16-cifar", balanced_firsts(graph_of("vgg16-cifar"), 8, [2.0, 1.0]))
    assert 1.4 < first / second < 2.8


def test_more_stages_than_places_to_cut_are_refused_with_the_number() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (torch.randn(6, 4),))
    with pytest.raises(Infeasible, match=r"can be cut in (\d+) places, 40 stages need 39; use at most (\d+) stages") as found:
        balanced_firsts(graph, 6, [1.0] * 40)
    most = int(re.findall(r"at most (\d+)", str(found.value))[0])
    assert len(set(balanced_firsts(graph, 6, [1.0] * most))) == most
    with pytest.raises(Infeasible, match="can be cut"):
        balanced_firsts(graph, 6, [1.0] * (most + 1))


# --- lists of actions ---

LISTS = [(name, schedule, ranks) for name in ("vgg16-cifar", "unet3d", "gpt2", "gnmt") for schedule in SCHEDULES
         for ranks in (2, 3, 4)]  # fmt: skip


def by_stage(run: LoweredPlan) -> dict[int, tuple[StageAction, ...]]:
    """The list of the first rank of each stage."""
    return {part.index: run.rank_schedule(part.stage.ranks[0]) for part in run.parts}


@pytest.mark.parametrize(("name", "schedule", "ranks"), LISTS)
def test_every_send_has_its_receive_and_every_receive_its_send(name: str, schedule: str, ranks: int) -> None:
    run = staged(name, schedule, ranks)
    sent, received = (
        Counter((t.stage, t.peer, t.way, t.microbatch) if kind == "send" else (t.peer, t.stage, t.way, t.microbatch)
                for stage, tasks in by_stage(run).items() for t in tasks if t.kind == kind and t.stage == stage)
        for kind in ("send", "receive")
    )  # fmt: skip
    assert sent == received
    assert set(sent.values()) == {1}
    pairs = {(c.source, c.target) for c in run.crossings}
    assert {(a, b) for a, b, way, _ in sent if way == "F"} == pairs
    assert {(b, a) for a, b, way, _ in sent if way == "B"} == {(c.source, c.target) for c in run.crossings if c.gradient}


@pytest.mark.parametrize(("name", "schedule", "ranks"), LISTS)
def test_receives_stand_before_and_sends_behind_their_compute_in_the_order_of_the_timetable(
    name: str, schedule: str, ranks: int
) -> None:
    run = staged(name, schedule, ranks)
    for rank in range(ranks):
        tasks = run.rank_schedule(rank)
        at = {str(task): i for i, task in enumerate(tasks)}
        assert len(at) == len(tasks)
        for i, task in enumerate(tasks):
            here = f"{task.stage}{task.way}{task.microbatch}"
            if task.kind == "receive":
                assert i < at[here]
            if task.kind == "send":
                assert at[here] < i
                assert all(t.kind == "send" for t in tasks[at[here] + 1 : i])
        computes = [str(task) for task in tasks if task.kind in ("F", "B")]
        assert computes == [str(action) for action in run.plan.timetable.rows[rank]]
        stages = len({task.stage for task in tasks if task.kind == "begin"})
        assert [t.kind for t in tasks if t.kind not in ("F", "B", "send", "receive")] == [
            *(["listen"] if rank not in run.last.stage.ranks else []), *(["begin"] * stages), *(["reduce"] * stages),
            *(["tie"] if run.cut.tied else []), "loss", "update",
        ]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receives_are_posted_a_turn_ahead_unless_the_schedule_blocks(schedule: str) -> None:
    run = staged("vgg16-cifar", schedule, 2)
    tasks = [str(task) for task in run.rank_schedule(1)]
    early = tasks.index("1<0F1") < tasks.index("1F0")
    assert early == (schedule not in BLOCKING)


def test_a_list_of_actions_reads_as_the_module_says() -> None:
    run = lower_plan(graph_of("gpt2"), named("pipeline:stages=2,microbatches=1", graph_of("gpt2"), ranks=2, batch=4))
    assert " ".join(map(str, run.rank_schedule(0))) == "R 0S 0F0 0>1F0 0<1B0 0B0 0G T L U"
    assert " ".join(map(str, run.rank_schedule(1))) == "1S 1<0F0 1F0 1B0 1>0B0 1G T L U"
    plain = lower_plan(graph_of("gpt2"), named("data", graph_of("gpt2"), ranks=2, batch=4))
    assert [" ".join(map(str, plain.rank_schedule(rank))) for rank in (0, 1)] == ["0S 0F0 0B0 0G L U"] * 2


@pytest.mark.parametrize("schedule", ["1f1b-as", "fbp-as"])
def test_a_schedule_for_asynchronous_devices_is_planned_but_not_run(schedule: str) -> None:
    plan = named("pipeline", graph_of("vgg16-cifar"), ranks=2, batch=8, options=Options(schedule=schedule))
    with pytest.raises(Infeasible, match=rf"schedule {schedule} needs devices that stream .* use 1f1b-so, 1f1b-sno, gpipe"):
        check_runnable(plan)


# --- composed plans ---


def shape_of(plan: Plan) -> list[tuple[tuple[int, ...], dict[str, int]]]:
    return [(stage.ranks, dict(stage.mesh.axes)) for stage in plan.stages]


def composed(strategy: str, ranks: int, **options: object) -> Plan:
    return named(strategy, graph_of("vgg16-cifar"), ranks=ranks, batch=8, options=Options(**options))  # type: ignore[arg-type]


def test_ranks_are_dealt_out_to_stages_in_order() -> None:
    assert shape_of(composed("pipeline", 3)) == [((k,), {"data": 1}) for k in range(3)]
    assert shape_of(composed("data+pipeline", 4)) == [((0, 1), {"data": 2}), ((2, 3), {"data": 2})]
    assert shape_of(composed("filter+pipeline", 4)) == [((0, 1), {"model": 2}), ((2, 3), {"model": 2})]
    assert shape_of(composed("spatial+pipeline", 6)) == [((0, 1, 2), {"space": 3}), ((3, 4, 5), {"space": 3})]
    assert shape_of(composed("data+filter", 8, stages=2)) == [
        ((0, 1, 2, 3), {"data": 2, "model": 2}), ((4, 5, 6, 7), {"data": 2, "model": 2}),
    ]  # fmt: skip


def test_three_ranks_make_stages_of_two_and_of_one() -> None:
    for strategy, axis in [("data+pipeline", "data"), ("filter+pipeline", "model"), ("spatial+pipeline", "space")]:
        assert shape_of(composed(strategy, 3)) == [((0, 1), {axis: 2}), ((2,), {axis: 1})]


def test_interleaved_gives_every_set_of_ranks_two_stages() -> None:
    assert [stage.ranks for stage in composed("pipeline", 2, schedule="interleaved").stages] == [(0,), (1,), (0,), (1,)]
    plan = composed("data+pipeline", 4, schedule="interleaved")
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert plan.microbatches % 2 == 0
    with pytest.raises(InvalidInput, match="3 do not come out even; use 2 or 4"):
        composed("pipeline", 2, schedule="interleaved", stages=3)


def test_a_batch_is_cut_into_micro_batches_as_even_as_can_be() -> None:
    plan = composed("pipeline", 2, microbatches=3)
    assert plan.sizes == (3, 3, 2)
    assert replace(plan, batch=7).sizes == (3, 2, 2)
    with pytest.raises(InvalidInput, match="9 micro-batches of a batch of 8; use at most 8"):
        composed("pipeline", 2, microbatches=9)


def test_more_stages_than_ranks_are_refused() -> None:
    with pytest.raises(InvalidInput, match="5 stages need at least 5 ranks under 1f1b-so, 4 given; use at most 4"):
        composed("pipeline", 4, stages=5)


def test_stages_that_share_some_of_their_ranks_or_leave_one_out_are_refused() -> None:
    plan = composed("data+pipeline", 4)
    two = Mesh.of(data=2)

    def on(*ranks: tuple[int, ...]) -> tuple[Stage, ...]:
        return tuple(Stage(first=s.first, ranks=who, mesh=two) for s, who in zip(plan.stages, ranks, strict=True))

    for stages in (on((0, 1), (1, 2)), on((0, 1), (3, 4))):
        with pytest.raises(InvalidInput, match="the stages use ranks"):
            replace(plan, stages=stages)
    with pytest.raises(InvalidInput, match=r"stage 1 has ranks \[2\] for a mesh"):
        replace(plan, stages=on((0, 1), (2,)))


@pytest.mark.parametrize("strategy", ["pipeline", "data+pipeline", "filter+pipeline", "spatial+pipeline"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_composed_plan_lowers_and_every_stage_has_its_loss_share(strategy: str, ranks: int) -> None:
    run = staged("vgg16-cifar", "1f1b-so", ranks, strategy)
    assert sum(bool(part.graph.loss) for part in run.parts) == 1
    keys = [p.key for part in run.parts for p in part.graph.parameters]
    assert sorted(keys) == sorted(p.key for p in graph_of("vgg16-cifar").parameters)
    assert all(set(part.programs) == set(run.plan.sizes) for part in run.parts)


def test_stages_of_different_sizes_are_cut_as_trying_everything_says() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        count, ranks, length = int(rng.integers(2, 4)), int(rng.integers(3, 6)), int(rng.integers(4, 7))
        work = [np.cumsum(rng.random(length)) for _ in range(ranks)]
        loads = [{r: (work[r - 1][None, :] - work[r - 1][:, None]) / r for r in range(1, ranks)} for _ in range(count)]
        found = balanced_cuts_and_ranks(loads, ranks)
        tried = []
        for cuts in itertools.combinations(range(1, length - 1), count - 1):
            ends = (0, *cuts, length - 1)
            for sizes in itertools.product(range(1, ranks), repeat=count):
                if sum(sizes) == ranks:
                    tried.append(max(loads[k][r][ends[k], ends[k + 1]] for k, r in enumerate(sizes)))
        if not tried:
            assert found is None
            continue
        assert found is not None and found[2] == pytest.approx(min(tried))
        ends = (0, *found[0], length - 1)
        assert max(loads[k][r][ends[k], ends[k + 1]] for k, r in enumerate(found[1])) == pytest.approx(found[2])
        assert sum(found[1]) == ranks
