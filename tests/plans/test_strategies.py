"""The named strategies: how they are written, what mesh they make, how much of the work they split, how they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph.capture import capture
from fourfold.plans import lower, named
from fourfold.plans.strategies.named import STRATEGIES, parse
from small import graph_of, planned

VGG = "vgg16-cifar"


@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"),
    [
        ("data", 3, {"data": 3}),
        ("filter", 4, {"model": 4}),
        ("channel", 2, {"model": 2}),
        ("spatial", 4, {"space": 4}),
        ("spatial:d0=2,d1=2", 4, {"space0": 2, "space1": 2}),
        ("data+filter", 4, {"data": 2, "model": 2}),
        ("data+filter", 6, {"data": 3, "model": 2}),
        ("data+filter:model=4", 4, {"data": 1, "model": 4}),
        ("data+channel", 3, {"data": 1, "model": 3}),
        ("data+spatial:space=2", 4, {"data": 2, "space": 2}),
        ("splitbrain:k=4", 4, {"data": 1, "model": 4}),
        ("splitbrain", 4, {"data": 2, "model": 2}),
        ("grid:pr=2,pc=2", 4, {"data": 2, "model": 2}),
        ("grid:pc=4", 8, {"data": 4, "model": 2}),
    ],
)
def test_a_strategy_makes_the_mesh_its_name_says(strategy: str, ranks: int, mesh: dict[str, int]) -> None:
    plan = named(strategy, graph_of(VGG), ranks=ranks, batch=8)
    assert dict(plan.mesh.axes) == mesh
    assert plan.strategy == strategy
    assert plan.graph == graph_of(VGG).hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fliter", r"unknown strategy 'fliter'; did you mean 'filter'\?; known: data, filter"),
        ("", r"unknown strategy ''"),
        ("splitbrain:q=2", r"strategy splitbrain has no option 'q'; it takes k, passes"),
        ("data:k=2", r"strategy data has no option 'k'; it takes none"),
        ("splitbrain:k=0", r"'k=0' needs a positive whole number"),
        ("splitbrain:k=two", r"'k=two' needs a positive whole number"),
        ("splitbrain:k", r"'k' needs a positive whole number"),
    ],
)
def test_a_misspelt_strategy_is_refused_with_what_was_meant(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("strategy", "ranks", "message"),
    [
        ("data", 0, r"0 ranks asked for"),
        ("splitbrain:k=3", 4, r"4 ranks cannot be cut into groups of 3; use one of \[1, 2, 4\]"),
        ("data+filter:model=3", 4, r"4 ranks cannot be cut into groups of 3"),
        ("grid:pr=2,pc=3", 4, r"grid 2 x 3 does not make 4 ranks"),
        ("spatial:d0=2,d1=3", 4, r"spatial over space0=2 x space1=3 needs 6 ranks, 4 given"),
    ],
)
def test_ranks_that_do_not_make_the_mesh_are_refused_with_the_numbers(strategy: str, ranks: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        named(strategy, graph_of(VGG), ranks=ranks, batch=8)


class Thin(nn.Module):
    """Nearly all the work in a layer of three filters."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(1, 8, 1)
        self.thin = nn.Conv2d(8, 3, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.thin(self.wide(x))


def test_a_heavy_layer_too_thin_for_the_axis_is_refused_by_name_with_both_numbers() -> None:
    graph = capture(Thin(), (torch.zeros(2, 1, 6, 6),))
    with pytest.raises(
        Infeasible, match=r"^thin\.conv2d_1 has 3 filters, fewer than the 4 ranks of axis model, and does 9\d% of"
    ):
        named("filter", graph, ranks=4, batch=2)


def test_a_light_layer_too_thin_for_the_axis_runs_everywhere_and_is_noted() -> None:
    plan, program = planned("unet3d", "filter", 4)  # the head has three classes
    assert [note for note in plan.notes if note.startswith("head.")] == [
        next(f"{op.path}: 3 filters for 4 ranks, runs on all of them" for op in graph_of("unet3d").ops if op.module == "head")
    ]
    assert program.split_flops_fraction >= 0.95


def test_more_ranks_than_rows_are_refused_with_both_numbers() -> None:
    with pytest.raises(Infeasible, match=r"domain:0 has 32 rows, axis space has 33 ranks; use at most 32"):
        named("spatial", graph_of(VGG), ranks=33, batch=8)


def test_a_domain_the_inputs_do_not_have_is_refused_with_those_they_have() -> None:
    with pytest.raises(Infeasible, match=r"no domain:2; they have domain:0, domain:1"):
        named("spatial:d2=2", graph_of(VGG), ranks=2, batch=8)


def test_a_model_without_a_domain_refuses_spatial() -> None:
    graph = capture(nn.Linear(4, 4), (torch.zeros(3, 4),))
    with pytest.raises(Infeasible, match=r"no input has a domain dim"):
        named("spatial", graph, ranks=2, batch=3)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["filter", "channel", "spatial"])
@pytest.mark.parametrize("model", [VGG, "resnet50", "unet3d", "cosmoflow"])
def test_convolutional_models_run_split_not_gathered(model: str, strategy: str, ranks: int) -> None:
    _, program = planned(model, strategy, ranks)
    assert program.split_flops_fraction >= 0.95
    assert program.replicated == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_transformer_heads_and_mlp_run_split_by_filter(ranks: int) -> None:
    _, program = planned("gpt2", "filter", ranks)
    assert program.split_flops_fraction >= 0.95
    assert program.replicated == []


def test_what_a_strategy_writes_down_lowers_to_the_same_program_again() -> None:
    for strategy in STRATEGIES:
        plan, program = planned(VGG, strategy, 4)
        again = lower(graph_of(VGG), plan)
        assert again.steps == program.steps
        assert again.reductions == program.reductions


def test_the_grid_divides_early_layers_by_domain_and_late_ones_by_filter() -> None:
    """Early layers have large activations and few weights, late ones the reverse."""
    plan, _ = planned(VGG, "grid", 4)
    splits = [by_axis["model"] for path, by_axis in plan.splits if path.startswith("features")]
    assert splits[0] == "domain:0"
    assert splits[-1] == "filter"
    assert splits == sorted(splits)  # one change, from domain to filter


def test_splitbrain_runs_the_classifier_in_k_passes() -> None:
    plan, _ = planned(VGG, "splitbrain:k=4", 4)
    ((first, last, count),) = [(p.first, p.last, p.count) for p in plan.passes]
    assert (first.split(".linear")[0], last.split(".linear")[0], count) == ("classifier.0", "classifier.6", 4)
    assert planned(VGG, "splitbrain:k=4,passes=1", 4)[0].passes == ()
