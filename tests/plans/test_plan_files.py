"""Plans as values and files: round trips, refusals in one line, and mixtures written by hand that run like one device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import Infeasible, InvalidInput, StalePlan
from fourfold.plans import Mesh, Plan, load_plan, lower, named, save_plan
from fourfold.plans.spec.plan import Passes, matches
from fourfold.plans.spec.plan_file import VERSION, plan_data
from small import assert_equal, batch_of, built_in, graph_of

VGG = "vgg16-cifar"


def by_hand(*, ranks: int = 2, mesh: Mesh | None = None, model: str = VGG, **fields: Any) -> Plan:
    return Plan(graph=graph_of(model).hash, batch=batch_of(model), mesh=mesh or Mesh.of(model=ranks), **fields)


@pytest.mark.parametrize("strategy", ["data", "filter", "channel", "spatial", "data+filter", "splitbrain:k=2", "grid"])
def test_every_named_plan_survives_its_file(strategy: str, tmp_path: Path) -> None:
    plan = named(strategy, graph_of(VGG), ranks=4, batch=8, model="vgg16-cifar,width=64")
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_plan_inside_an_answer_of_the_command_line_is_found(tmp_path: Path) -> None:
    plan = by_hand(inputs={"model": "batch"})
    (tmp_path / "answer.json").write_text(json.dumps({"model": VGG, "plan": plan_data(plan)}))
    assert load_plan(tmp_path / "answer.json") == plan


def test_a_file_of_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**plan_data(by_hand()), "version": VERSION + 1}))
    with pytest.raises(InvalidInput, match=rf"version {VERSION + 1}, this Fourfold reads {VERSION}"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"version": 1}',
        '{"version": 1, "graph": "x", "batch": "many", "mesh": {"a": 2}}',
        '{"version": 1, "graph": "x", "batch": 4, "mesh": {}}',
        '{"version": 1, "graph": "x", "batch": 4, "mesh": {"a": 0}}',
        '{"version": 1, "graph": "x", "batch": 4, "mesh": 2}',
        '{"version": 1, "graph": "x", "batch": 0, "mesh": {"a": 2}}',
        '{"version": 1, "graph": "x", "batch": 4, "mesh": {"a": 2}, "splits": [{"a": "batch"}]}',
        '{"version": 1, "graph": "x", "batch": 4, "mesh": {"a": 2}, "passes": [{"first": "x"}]}',
        '{"version": 1, "graph": "x", "batch": 4, "mesh": {"a": 2}, "inputs": ["batch"]}',
    ],
)
def test_a_corrupted_file_is_refused_in_one_line(broken: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(broken)
    with pytest.raises(InvalidInput) as refusal:
        load_plan(tmp_path / "plan.json")
    assert "\n" not in str(refusal.value)


PLAIN = {"version": 1, "graph": "x", "batch": 4, "mesh": {"a": 2}}
STAGE = {"first": "", "ranks": [0, 1]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bach": 4}, "bach: is no key here; did you mean 'batch'?"),
        ({"stages": [{**STAGE, "rank": [0]}]}, "stages 1: rank: is no key here; did you mean 'ranks'?"),
        ({"passes": [{"first": "", "last": "", "count": 1, "axis": "a", "n": 1}]}, "passes 1: n: is no key here"),
        ({"made_for": {"clusters": "abci"}}, "made_for: clusters: is no key here; did you mean 'cluster'?"),
        ({"signature": {"inputs": []}}, "signature: has inputs alone; it needs inputs and targets"),
        ({"signature": {"inputs": [["x", [2], "load"]], "targets": []}}, "signature.inputs: dtype: is 'load', it must be"),
        ({"batch": 4.0}, "batch: is 4.0, a whole number is needed"),
        ({"batch": "4"}, "batch: is '4', a whole number is needed"),
        ({"batch": True}, "batch: is true, a whole number is needed"),
        ({"batch": None}, "batch: is null, a whole number is needed"),
        ({"version": True}, "version: is true, a whole number is needed"),
        ({"mesh": {"a": 2.0}}, "mesh: a: is 2.0, a whole number is needed"),
        ({"mesh": {"op": 2}}, "mesh: has an axis 'op'"),
        ({"mesh": {"a": 2**10, "b": 2**10}}, "mesh: a=1024 x b=1024 has 1,048,576 ranks, at most 65,536 are read"),
        ({"mesh": {f"a{i}": 1 for i in range(17)}}, "has 17 entries, at most 16 are read"),
        ({"stages": [{**STAGE, "ranks": [0, -1]}]}, "stages 1: ranks: is -1, it must be at least 0"),
        ({"stages": [{**STAGE, "ranks": [0, 1.0]}]}, "stages 1: ranks: is 1.0, a whole number is needed"),
        ({"batch": 2**30, "microbatches": 2**30}, "that is a schedule of 1,073,741,824 turns; at most 65,536 are read"),
        ({"splits": [{"op": f"{i}*", "a": "batch"} for i in range(201)]}, "201 patterns with wildcards, at most 200 are read"),
        ({"passes": [{"first": "", "last": "", "count": 10**6, "axis": "a"}]}, "passes: are 1,000,000 all together"),
        ({"strategy": "a\0b"}, "strategy: has the character U+0000, which no text may have"),
        ({"model": "\ud800"}, "model: has the character U+D800, which no text may have"),
        ({"notes": ["\x1b[2J"]}, "notes: has the character U+001B"),
        ({"strategy": "x" * 10**6}, "strategy: is a text of 1,000,000 characters, at most 200 are read"),
        ({"x" * 10**6: 1}, "(1,000,000 characters): is no key here"),
        ({"graph": 16}, "graph: is 16, a text is needed"),
        ({"inputs": {"a": ["batch"]}}, "inputs: a: is a list, a text is needed"),
        ({"splits": [{"a": "batch"}]}, "splits 1: op: is missing"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_file_is_read_strictly(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAIN, **fields}))
    with pytest.raises(InvalidInput) as refusal:
        load_plan(path)
    line = str(refusal.value)
    assert line.startswith(f"{path}: ") and words in line and "\n" not in line and len(line) < 1000


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot read plan .*nowhere.json: No such file"):
        load_plan(tmp_path / "nowhere.json")


def test_a_plan_for_another_graph_is_stale() -> None:
    plan = replace(by_hand(inputs={"model": "batch"}), graph="0123456789abcdef", model="other")
    with pytest.raises(StalePlan, match=rf"0123456789abcdef \(other\), this model is {graph_of(VGG).hash}"):
        lower(graph_of(VGG), plan)


def test_a_plan_does_not_go_stale_with_the_batch() -> None:
    assert lower(graph_of(VGG), replace(by_hand(inputs={"model": "batch"}), batch=31)).graph.values["inputs_0"].shape[0] == 31


def test_unknown_splits_and_axes_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidInput, match=r"unknown split 'filtr'; did you mean 'filter'"):
        by_hand(splits=(("classifier.*", {"model": "filtr"}),))
    with pytest.raises(InvalidInput, match=r"unknown split 'domain:x'"):
        by_hand(inputs={"model": "domain:x"})
    with pytest.raises(InvalidInput, match=r"axes model, not 'modle'; did you mean 'model'"):
        by_hand(splits=(("classifier.*", {"modle": "filter"}),))


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_op() -> None:
    with pytest.raises(InvalidInput, match=r"no op matches 'clasifier.0'; did you mean 'classifier.0'"):
        lower(graph_of(VGG), by_hand(splits=(("clasifier.0", {"model": "filter"}),)))


def test_a_split_the_op_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(Infeasible, match=r"classifier.0.*cannot be split by domain:1; it offers .*filter"):
        lower(graph_of(VGG), by_hand(splits=(("classifier.0", {"model": "domain:1"}),)))


def test_a_split_past_its_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(Infeasible, match=r"features.0.* has 8 filters to split, axis model has 16 ranks; use at most 8"):
        lower(graph_of(VGG), by_hand(ranks=16, splits=(("features.0", {"model": "filter"}),)))


def test_passes_that_do_not_lie_in_the_graph_are_refused() -> None:
    first = next(op.path for op in graph_of(VGG).ops if op.module == "classifier.0")
    plan = by_hand(inputs={"model": "batch"}, passes=(Passes(first=first, last="nowhere", count=2, axis="model"),))
    with pytest.raises(InvalidInput, match=r"passes end at 'nowhere', which does not follow"):
        lower(graph_of(VGG), plan)
    unknown = replace(plan, passes=(Passes(first="nowhere", last=first, count=2, axis="model"),))
    with pytest.raises(InvalidInput, match=r"passes begin at 'nowhere', which is no op"):
        lower(graph_of(VGG), unknown)


def test_passes_over_a_batch_beyond_bounds_are_refused_before_it_is_dealt_out() -> None:
    first = next(op.path for op in graph_of(VGG).ops if op.module == "classifier.0")
    run = Passes(first=first, last=first, count=2, axis="model")
    plan = replace(by_hand(inputs={"model": "batch"}, passes=(run,)), batch=2**40)
    with pytest.raises(Infeasible, match=r"deal out 1,099,511,627,776 examples one by one, at most 1,048,576 can be"):
        lower(graph_of(VGG), plan)


@pytest.mark.parametrize(("count", "axis"), [(0, "model"), ("2", "model"), (2, "data")])
def test_passes_without_a_count_or_an_axis_of_the_mesh_are_refused(count: Any, axis: str) -> None:
    with pytest.raises(
        InvalidInput, match=rf"passes from 'x' have axis '{axis}' and count '?{count}'?; they need one of model"
    ):
        by_hand(passes=(Passes(first="x", last="y", count=count, axis=axis),))


def test_patterns_match_module_paths_and_op_paths() -> None:
    op = next(op for op in graph_of(VGG).ops if op.module == "classifier.0")
    for pattern in ("classifier.0", "classifier.*", "*.0", op.path, f"*{op.name}", "*"):
        assert matches(pattern, op), pattern
    for pattern in ("features.*", "classifier", "classifier.1*", "Classifier.0"):
        assert not matches(pattern, op), pattern


def test_of_several_matching_rules_the_last_wins_axis_by_axis() -> None:
    rules = (
        ("*", {"data": "batch", "model": "replicate"}),
        ("classifier.*", {"model": "channel"}),
        ("classifier.0", {"model": "filter"}),
    )
    plan = by_hand(mesh=Mesh.of(data=2, model=2), splits=rules)
    by_module = {op.module: plan.split_of(op) for op in graph_of(VGG).ops}
    assert by_module["classifier.0"] == {"data": "batch", "model": "filter"}
    assert by_module["classifier.3"] == {"data": "batch", "model": "channel"}
    assert by_module["features.0"] == {"data": "batch", "model": "replicate"}


MIXTURES: list[tuple[str, Mesh, dict[str, Any]]] = [
    (
        "convolutions by batch, classifier by filter",
        Mesh.of(model=2),
        {"inputs": {"model": "batch"}, "splits": (("classifier.*", {"model": "filter"}),)},
    ),
    (
        "convolutions by rows, classifier by channel",
        Mesh.of(model=2),
        {"inputs": {"model": "domain:0"}, "splits": (("classifier.*", {"model": "channel"}),)},
    ),
    (
        "rows, then filters, then channels, then everywhere",
        Mesh.of(model=4),
        {
            "inputs": {"model": "domain:1"},
            "splits": (
                ("features.1?", {"model": "filter"}),
                ("features.2*", {"model": "channel"}),
                ("classifier.*", {"model": "filter"}),
                ("classifier.6", {"model": "replicate"}),
            ),
        },
    ),
    (
        "rows and columns, classifier by batch and filter",
        Mesh.of(up=2, across=2),
        {
            "inputs": {"up": "domain:0", "across": "domain:1"},
            "splits": (("classifier.*", {"up": "batch", "across": "filter"}),),
        },
    ),
    (
        "both axes on the batch, classifier by channel and filter",
        Mesh.of(data=2, model=2),
        {
            "inputs": {"data": "batch", "model": "batch"},
            "splits": (("classifier.*", {"data": "channel", "model": "filter"}),),
        },
    ),
]


@pytest.mark.parametrize(("mesh", "fields"), [m[1:] for m in MIXTURES], ids=[m[0] for m in MIXTURES])
def test_a_mixture_written_by_hand_gives_the_numbers_of_one_device(mesh: Mesh, fields: dict[str, Any]) -> None:
    assert_equal(built_in(VGG).errors(by_hand(mesh=mesh, **fields)))
