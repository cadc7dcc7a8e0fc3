"""The planner: what it finds untold, that it tells the truth about memory, what it refuses, and that its plans run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from fourfold.api.planning import search_plans
from fourfold.api.settings import setting_of
from fourfold.calibrate.measured_prices import ONCE, measured_prices
from fourfold.cli.main import run
from fourfold.cluster import Curve, Measured, cluster_named, local
from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.graph.spec import check_precision
from fourfold.models import MODELS
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.prices import Prices
from fourfold.planner import Ranking, SearchTask, search
from fourfold.planner.explain import compare, explained, with_scaled_links, with_scaled_memory
from fourfold.planner.search import TIE, same_plan
from fourfold.planner.splits.solve import solve
from fourfold.planner.splits.split_groups import split_groups
from fourfold.planner.splits.split_search import SplitSearch
from fourfold.plans import Mesh, Plan
from fourfold.plans.lowering.stages import cut
from fourfold.plans.spec.plan import check_runnable
from fourfold.report.explain import _why_not
from fourfold.runtime.execution.precision import lower_for_precision
from fourfold.workload.model_graph import ModelGraph
from ranks import pool
from small import SMALL, assert_equal, batch_of, built_in, graph_of


@cache
def captured(name: str, **arguments: int) -> Graph:
    with torch.device("meta"):
        return capture(*MODELS[name](**arguments))


def task(graph: Graph, cluster: str, devices: int, batch: int, optimizer: str = "sgd") -> SearchTask:
    prices = Prices(cluster=cluster_named(cluster, devices=devices))
    return SearchTask(graph=graph, batch=batch, setting=Setting(prices=prices, optimizer=optimizer))


@cache
def ranked(name: str, cluster: str, devices: int, batch: int, *arguments: tuple[str, int]) -> Ranking:
    return search(task(captured(name, **dict(arguments)), cluster, devices, batch))


def splits(plan: Plan, words: Sequence[str]) -> set[str]:
    """The splits, on axes of more than one rank, of anchors whose path has one of the words."""
    wide = [axis for axis, size in plan.mesh.axes if size > 1]
    return {by[axis] for path, by in plan.splits for axis in wide if axis in by and any(word in path for word in words)}


def best(ranking: Ranking) -> Prediction:
    assert ranking.best is not None
    return ranking.best


# --- what it finds untold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alexnet", pytest.param("vgg16", marks=pytest.mark.slow)])
def test_on_a_slow_network_convolutions_go_by_batch_and_the_classifier_by_its_weights(name: str) -> None:
    found = ranked(name, "ethernet-1g", 8, 256)
    one = next(c for c in found.candidates if not c.plan.stages)
    assert splits(one.plan, ["features"]) == {"batch"}
    assert splits(one.plan, ["classifier"]) & {"filter", "channel"} and "batch" not in splits(one.plan, ["classifier"])
    data = next(c for c in found.candidates if c.plan.strategy == "data")
    assert one.step_seconds < data.step_seconds / 3
    first = best(found)  # alexnet's is faster still: the classifier on a rank of its own, as PipeDream has it
    assert first is one or [len(stage.ranks) for stage in first.plan.stages] == [7, 1]


def test_with_fast_links_and_many_examples_data_parallelism_wins() -> None:
    assert best(ranked("resnet50", "dgx-h100", 8, 2048)).plan.strategy == "data"


def test_of_plans_that_are_as_good_as_equal_the_best_needs_the_least_machinery() -> None:
    found = ranked("resnet50", "dgx-h100", 8, 2048)
    equal = [
        c
        for c in found.candidates
        if c.feasible and c.step_seconds <= (1 + TIE) * min(c.step_seconds for c in found.candidates)
    ]
    assert {"data", "fsdp"} <= {c.plan.strategy for c in equal}
    assert (best(found).plan.zero, len(best(found).plan.stages)) == (0, 0)
    plain = [c for c in equal if not c.plan.zero and not c.plan.stages and c.plan.microbatches == 1 and not c.plan.recompute]
    assert best(found) is min(plain, key=lambda c: c.step_seconds)


def test_a_sample_that_no_device_holds_is_split_by_its_domain() -> None:
    found = best(ranked("cosmoflow", "abci", 64, 16, ("size", 512)))
    assert any(split.startswith("domain") for split in (*found.plan.inputs.values(), *splits(found.plan, ["conv"])))


def test_one_sample_on_eight_devices_is_split_by_its_domain() -> None:
    found = best(ranked("unet3d", "dgx-h100", 8, 1, ("size", 256)))
    assert any(split.startswith("domain") for split in found.plan.inputs.values())


def test_a_deep_network_on_slow_links_becomes_a_pipeline() -> None:
    found = best(ranked("gpt2", "ethernet-10g-gpu", 16, 64, ("layers", 12), ("width", 1024), ("heads", 16)))
    assert len(found.plan.stages) > 1


# --- groups and bounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_op_that_depends_on_an_input_is_in_one_group(name: str) -> None:
    graph = graph_of(name)
    live = cut(graph, [""]).live
    found = split_groups(graph, batch_of(name), live)
    owned = [op.name for group in found for op in group.graph.ops if op.name in graph.dependent]
    first = [op.name for op in graph.ops if op.name in graph.dependent]
    assert set(owned) <= set(first) and len({group.key for group in found}) <= len(found)
    makers = {value: group.index for group in found for op in group.graph.ops for value in op.results}
    assert all(makers[value] == maker for group in found for value, maker in group.reads)


def test_the_same_search_twice_gives_the_same_ranking() -> None:
    graph = graph_of("gpt2")
    one, other = (search(task(graph, "ethernet-10g", 4, 4)) for _ in range(2))
    assert [c.plan for c in one.candidates] == [c.plan for c in other.candidates]
    assert [c.step_seconds for c in one.candidates] == [c.step_seconds for c in other.candidates]


# --- memory -------------------------------------------------------------------------------------------------------------


def smaller(wanted: SearchTask, factor: float) -> SearchTask:
    return replace(wanted, setting=wanted.setting.on(with_scaled_memory(wanted.cluster, factor)))


def test_with_less_memory_a_slower_plan_that_fits_is_chosen_and_with_none_nothing() -> None:
    wanted = task(captured("alexnet"), "abci", 8, 64, "adamw")
    free = best(search(wanted))
    share = 0.95 * free.peak_bytes / wanted.cluster.memory(0)
    tight = search(smaller(wanted, share))
    assert best(tight).peak_bytes <= best(tight).capacity_bytes
    assert best(tight).step_seconds >= free.step_seconds
    nothing = search(smaller(wanted, 0.01 * share))
    assert nothing.best is None and "over" in nothing.nearest()


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_fixed_splits_are_kept_and_impossible_ones_refused() -> None:
    wanted = task(captured("alexnet"), "ethernet-1g", 8, 256)
    found = best(search(replace(wanted, fixed=(("classifier.*", "filter"),))))
    assert splits(found.plan, ["classifier"]) == {"filter"}
    none = search(replace(wanted, fixed=(("features.*", "filter"), ("features.*", "channel"))))
    assert none.best is None or not none.best.plan.splits
    assert any("as asked" in refusal.reason for refusal in none.refusals)
    with pytest.raises(InvalidInput, match="unknown split"):
        replace(wanted, fixed=(("a", "sideways"),))


@pytest.mark.parametrize("name", ["vgg16-cifar", "gpt2"])
def test_sums_played_beside_backward_cost_no_more_than_after_it_and_no_less_than_nothing(name: str) -> None:
    wanted = task(graph_of(name), "ethernet-10g-gpu", 8, 16)
    splitting, seen = SplitSearch(wanted, wanted.graph), 0
    for grid in splitting.grids():
        surrogate = splitting.surrogate(grid, tuple(range(8)), 16)
        for hidden in (1.0, 0.0):
            solution = solve(surrogate.problem(hidden))
            assert solution is not None
            low, high = (surrogate.problem(part).cost(solution.choice) for part in (1.0, 0.0))
            assert low * (1 - 1e-9) <= surrogate.overlapped_seconds(solution.choice) <= high * (1 + 1e-9)
            seen += low < surrogate.overlapped_seconds(solution.choice) < high
    assert seen, "some sums are hidden in part"


def test_only_the_strategies_asked_for_are_tried() -> None:
    wanted = replace(task(captured("alexnet"), "ethernet-1g", 4, 64), strategies=("data", "filter"))
    assert {c.plan.strategy for c in search(wanted).candidates} == {"data", "filter"}


def test_kernels_that_no_table_has_are_timed_by_what_is_handed_in() -> None:
    cluster = local(2)
    wanted = task(graph_of("gpt2"), "local", 2, batch_of("gpt2"))
    timing = partial(measured_prices, cluster=cluster, ranks=pool(2), rounds=ONCE)
    found = search(replace(wanted, strategies=("data",), measure=timing))
    assert best(found).estimate.measured_share == 1.0
    bare = Setting(prices=Prices(cluster=cluster))
    assert best(search(replace(wanted, strategies=("data",), setting=bare))).estimate.measured_share < 1.0


def test_a_time_limit_gives_the_best_so_far_and_says_so() -> None:
    wanted = task(captured("alexnet"), "ethernet-1g", 8, 256)
    found = search(replace(wanted, limit=1e-3))
    assert found.best is not None and any("stopped after" in note for note in found.notes)


# --- explain and the command line ---------------------------------------------------------------------------------------


def test_an_explanation_compares_and_recomputes() -> None:
    wanted = task(captured("alexnet"), "ethernet-1g", 4, 64)
    ranking = search(wanted)
    told = explained(ranking, best(ranking))
    assert told.comparisons[0].other.plan.strategy == "data" and told.comparisons[0].extra_seconds > 0
    changes = {change.change: change.best for change in told.changes}
    fast = changes["links 10 times as fast"]
    assert fast is not None and fast.step_seconds < best(ranking).step_seconds
    assert with_scaled_links(wanted.cluster, 10).links[0].bandwidth == 10 * wanted.cluster.links[0].bandwidth


def test_faster_links_leave_a_ranks_own_copies_as_they_are() -> None:
    cluster, both = local(2), ("all_gather", "shared_fetch")
    link = cluster.links[0].name
    curves = tuple(Curve(collective=kind, level=link, ranks=2, sizes=(1e3,), seconds=(1e-3,)) for kind in both)  # type: ignore[arg-type]
    found = with_scaled_links(replace(cluster, measured=Measured(curves=curves)), 10).measured.curves
    assert [curve.seconds for curve in found] == [(pytest.approx(1e-4),), (1e-3,)]


@pytest.mark.parametrize(("part", "word"), [(0.995, "equal within 1%"), (0.9, "it is the better plan")])
def test_a_faster_plan_is_called_better_if_it_is_more_than_a_tie(part: float, word: str) -> None:
    plan = best(search(replace(task(captured("alexnet"), "ethernet-1g", 4, 64), strategies=("data",))))
    other = replace(plan, estimate=replace(plan.estimate, step_seconds=part * plan.step_seconds))
    (line,) = _why_not(plan, compare(plan, other))
    assert word in line


def test_plan_and_explain_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    asked = ["plan", "alexnet", "--cluster", "ethernet-1g", "--devices", "4", "--batch", "64", "-o", str(file), "--json"]
    assert run(asked) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["best"] == 0
    first = record["candidates"][0]
    assert sum(first["breakdown"].values()) == pytest.approx(first["step_seconds"])
    steps = [candidate["step_seconds"] for candidate in record["candidates"]]
    assert steps == sorted(steps)
    assert run(["explain", str(file)]) == 0
    told = capsys.readouterr().out
    assert "Why not another" in told and "links 10 times as fast" in told
    assert all(len(line) <= 100 for line in told.splitlines())


@pytest.mark.parametrize(("cluster", "devices", "precision"), [("dgx-h200", 4, "bf16"), ("ethernet-10g-gpu", 4, "tf32")])
@pytest.mark.parametrize("name", ["gpt2", "vgg16-cifar"])
def test_a_run_takes_every_plan_of_the_table_for_gpus(name: str, cluster: str, devices: int, precision: str) -> None:
    """The plan as a file has it, checked and lowered as a run on cuda does it, is the plan that was predicted."""
    source = ModelGraph(text=name, graph=graph_of(name), batch=batch_of(name), signature={})
    found = search_plans(source, setting_of(cluster, devices, precision=precision))
    assert {bool(c.plan.stages) for c in found.candidates} == {False, True}
    for candidate in found.candidates:
        plan = source.adopted(candidate.plan, found.task.graph)
        check_runnable(plan)
        check_precision(precision, "cuda")
        lowered = lower_for_precision(source.graph, plan, precision=precision, device="cuda")
        assert lowered.places == candidate.lowered.places and lowered.plan.mesh == candidate.plan.mesh
        run = predict(lowered, found.task.setting.prices, optimizer=found.task.setting.optimizer)
        assert (run.step_seconds, run.peak_bytes) == pytest.approx((candidate.step_seconds, candidate.peak_bytes))


def test_a_search_refuses_what_a_run_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same function, with the same words."""
    monkeypatch.setattr("fourfold.planner.stages.stage_search.SYNCHRONOUS", ("1f1b-as",))
    found = search(task(captured("vgg16-cifar"), "ethernet-1g", 4, 64))
    reasons = [refusal.reason for refusal in found.refusals if "1f1b-as" in refusal.reason]
    assert reasons and all("needs devices that stream transfers under compute" in reason for reason in reasons)
    assert all(candidate.plan.schedule != "1f1b-as" for candidate in found.candidates)


@pytest.mark.parametrize("cluster", ["ethernet-1g", "cori-knl"])
def test_tf32_is_refused_for_processors_as_a_run_refuses_it(cluster: str) -> None:
    with pytest.raises(InvalidInput, match="tf32 is a mode of GPUs, these ranks run on processors; use fp32"):
        setting_of(cluster, 2, precision="tf32")


# --- its plans run ------------------------------------------------------------------------------------------------------

QUICK = ("gpt2", "vgg16-cifar")
PLACES = [("ethernet-1g", 2), ("ethernet-10g", 3), ("abci", 4), ("ethernet-25g-gpu", 4)]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(SMALL)])
def test_plans_found_for_any_cluster_give_the_numbers_of_one_device(name: str) -> None:
    seen: list[Plan] = []
    for cluster, devices in PLACES:
        found = search(task(graph_of(name), cluster, devices, batch_of(name)))
        auto = [c.plan for c in found.candidates if c.plan.strategy == "auto"]
        plan = next((p for p in auto if p.microbatches == 1 or not p.notes), None)  # batch norm sees micro-batches
        if plan is not None and not any(same_plan(plan, other) for other in seen):
            seen.append(plan)
            assert_equal(built_in(name).errors(plan))
    assert seen


def test_axes_are_called_by_what_is_split_over_them() -> None:
    from fourfold.planner.splits.split_search import plan_of_splits

    rules = (("a", {"x": "batch", "y": "domain:0"}), ("b", {"x": "batch", "y": "replicate"}))
    plan = plan_of_splits(graph_of("unet3d"), 4, Mesh.of(x=2, y=2), rules)
    assert plan.mesh.names == ("data", "space") and plan.inputs == {"data": "batch", "space": "domain:0"}
