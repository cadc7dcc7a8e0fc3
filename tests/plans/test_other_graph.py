"""Plans made for a graph, as plans of the graph with autocast's casts, and back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fourfold.errors import StalePlan
from fourfold.graph import Graph
from fourfold.graph.autocast import as_computed
from fourfold.plans import Options, Plan, lower_plan, named
from fourfold.plans.spec.other_graph import transferred
from fourfold.plans.spec.plan import Passes, Segment
from fourfold.runtime.execution.precision import lower_for_precision
from small import batch_of, graph_of

MODELS = ("vgg16-cifar", "gpt2")
WAYS = {
    "data": ("data", Options()),
    "filter": ("filter", Options()),
    "spatial": ("spatial", Options()),
    "two stages": ("pipeline", Options(stages=2)),
    "recompute": ("data", Options(recompute=3)),
    "two stages, recompute": ("pipeline", Options(stages=2, recompute=2)),
    "splitbrain": ("splitbrain:k=2", Options()),
}


@cache
def with_casts(model: str) -> Graph:
    return as_computed(graph_of(model), "bf16", "cpu")


@cache
def plan_of(model: str, way: str) -> Plan:
    strategy, options = WAYS[way]
    return named(strategy, graph_of(model), ranks=2, batch=batch_of(model), options=options)


def with_second_stage_at(plan: Plan, path: str) -> Plan:
    first, second = plan.stages
    return replace(plan, stages=(first, replace(second, first=path)))


def cast_linear(model: str) -> str:
    """The last linear op: autocast casts what it reads."""
    return [op.path for op in graph_of(model).ops if op.target == "aten.linear.default"][-1]


def preceding_casts(model: str, path: str) -> list[str]:
    """The casts right before an op of the plain graph, in the graph that has them."""
    plain = {op.path for op in graph_of(model).ops}
    paths = [op.path for op in with_casts(model).ops]
    at = begin = paths.index(path)
    while begin and paths[begin - 1] not in plain:
        begin -= 1
    return paths[begin:at]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_goes_to_the_graph_with_casts_and_back(model: str, way: str) -> None:
    plan, plain, computed = plan_of(model, way), graph_of(model), with_casts(model)
    there = transferred(plan, plain, computed)
    there.check(computed)
    assert there.graph == computed.hash != plain.hash
    assert transferred(there, computed, plain) == plan
    assert transferred(plan, plain, plain) is plan
    with pytest.raises(StalePlan):
        plan.check(computed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_transferred_plan_lowers_and_its_loss_stays_in_float32(model: str, way: str) -> None:
    plan, plain, computed = plan_of(model, way), graph_of(model), with_casts(model)
    lowered = lower_plan(computed, transferred(plan, plain, computed))
    assert lowered.last.graph.values[lowered.last.graph.loss].dtype == "float32"
    again = lower_for_precision(plain, plan, precision="bf16", device="cpu")
    assert again.plan == lowered.plan and again.graph.hash == lowered.graph.hash
    assert lower_for_precision(plain, plan, precision="fp32", device="cpu").plan == plan


@pytest.mark.parametrize("model", MODELS)
def test_a_stage_begins_at_the_casts_of_its_first_op(model: str) -> None:
    plain, computed = graph_of(model), with_casts(model)
    paths = [op.path for op in computed.ops]
    plan = with_second_stage_at(plan_of(model, "two stages"), cast_linear(model))
    casts = preceding_casts(model, cast_linear(model))
    assert casts
    there = transferred(plan, plain, computed)
    assert there.stages[1].first == casts[0]
    reader = computed.ops[paths.index(cast_linear(model))]
    assert {computed.ops[paths.index(path)].results[0] for path in casts} <= set(reader.operands)
    parts = lower_plan(computed, there).parts
    assert set(casts) <= {op.path for op in parts[1].graph.ops}
    assert transferred(there, computed, plain) == plan


@pytest.mark.parametrize("model", MODELS)
def test_a_segment_to_recompute_holds_the_casts_of_its_first_op(model: str) -> None:
    plain, path = graph_of(model), cast_linear(model)
    plan = replace(plan_of(model, "data"), recompute=(Segment(first=path, last=path),))
    (segment,) = transferred(plan, plain, with_casts(model)).recompute
    assert (segment.first, segment.last) == (preceding_casts(model, path)[0], path)


def test_casts_before_passes_stay_outside() -> None:
    model = "vgg16-cifar"
    plan = plan_of(model, "splitbrain")
    assert plan.passes and preceding_casts(model, plan.passes[0].first)
    assert transferred(plan, graph_of(model), with_casts(model)).passes == plan.passes


@pytest.mark.parametrize("model", MODELS)
def test_what_begins_or_ends_at_a_cast_moves_to_the_nearest_op_of_the_plain_graph(model: str) -> None:
    plain, computed, path = graph_of(model), with_casts(model), cast_linear(model)
    cast = preceding_casts(model, path)[-1]
    before = [op.path for op in plain.ops][[op.path for op in plain.ops].index(path) - 1]
    plan = replace(
        transferred(plan_of(model, "filter"), plain, computed),
        splits=((cast, {"model": "replicate"}),),
        passes=(Passes(first=cast, last=path, count=2, axis="model"),),
        recompute=(Segment(first=cast, last=path),),
    )
    back = transferred(plan, computed, plain)
    assert back.splits == ()
    assert (back.passes[0].first, back.passes[0].last) == (path, path)
    assert back.recompute == (Segment(first=path, last=path),)
    ends_at_cast = replace(plan, passes=(), recompute=(Segment(first=before, last=cast),))
    assert transferred(ends_at_cast, computed, plain).recompute == (Segment(first=before, last=before),)
