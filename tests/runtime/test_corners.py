"""Corners where a split could go wrong without an error: each is either equal to one device or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.errors import CaptureFailed, Infeasible
from fourfold.graph.capture import capture
from fourfold.plans import Mesh, Passes, Plan, lower, named
from ranks import Job, run_jobs


class Function(nn.Module):
    """Layers by name and a forward given as a function of them."""

    def __init__(self, forward: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.body = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def assert_equal(model: nn.Module, x: Tensor, **fields: Any) -> None:
    """One step under a hand-written plan gives eager's outputs and gradients."""
    model, x = model.double(), x.double()
    state = {k: v.detach().clone() for k, v in [*model.named_parameters(), *model.named_buffers()]}
    graph = capture(model, (x,))
    plan = Plan(graph=graph.hash, batch=x.shape[0], **fields)
    (outcome,) = run_jobs([Job(name="case", graph=graph, plan=plan, state=state, inputs=[x])], plan.mesh.size).values()
    assert not outcome.error, outcome.error
    outputs = model(x)
    outputs.square().mean().backward()
    (got,) = outcome.outputs.values()
    torch.testing.assert_close(got, outputs.detach(), rtol=1e-9, atol=1e-10)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(outcome.gradients[name], parameter.grad, rtol=1e-9, atol=1e-10)


def clamped(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.l.weight.clamp_(-0.3, 0.3)
    return self.l(x)


def test_a_parameter_changed_in_place_in_forward_is_refused() -> None:
    with pytest.raises(CaptureFailed, match=r"changes parameter '.*weight' in place"):
        capture(Function(clamped, l=nn.Linear(4, 4)), (torch.randn(4, 4),))


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:2].mul_(0.5)
        return x * self.kept


def test_a_write_into_a_part_of_a_buffer_is_refused() -> None:
    with pytest.raises(CaptureFailed, match="part of buffer"):
        capture(Halved(), (torch.randn(3, 4),))


def test_a_tensor_that_lends_its_dtype_only_may_have_another_shape() -> None:
    model = Function(lambda self, x: self.l(x) * (x.sum(-1) > 0).type_as(self.l(x)).unsqueeze(-1), l=nn.Linear(4, 6))
    assert_equal(model, torch.randn(4, 5, 4), mesh=Mesh.of(data=2), inputs={"data": "batch"})


def deep(norm: nn.Module) -> nn.Module:
    layers = {"c": nn.Conv2d(3, 4, 1), "a": nn.Linear(16, 8), "n": norm, "b": nn.Linear(8, 6)}
    return Function(lambda self, x: self.b(self.n(self.a(self.c(x).flatten(1)))), **layers)


@pytest.mark.parametrize("tracked", [True, False])
def test_passes_never_cover_a_norm_over_the_batch(tracked: bool) -> None:
    graph = capture(deep(nn.BatchNorm1d(8, track_running_stats=tracked)), (torch.randn(8, 3, 2, 2),))
    plan = named("splitbrain:k=2", graph, ranks=2, batch=8)
    assert not plan.passes
    assert any("one pass" in note for note in plan.notes)


def test_a_partial_sum_that_enters_passes_is_summed() -> None:
    layers = {"c": nn.Linear(6, 8, bias=False), "l": nn.Linear(8, 8), "m": nn.Linear(8, 4)}
    model = Function(lambda self, x: self.m(self.l(self.c(x))), **layers)
    graph = capture(model, (torch.randn(8, 6),))
    paths = [op.path for op in graph.ops if op.target.startswith("aten.linear")]
    splits = ((paths[0], {"model": "channel"}), (paths[1], {"model": "filter"}), (paths[2], {"model": "filter"}))
    passes = (Passes(first=paths[1], last=paths[2], count=2, axis="model"),)
    mesh = Mesh.of(data=1, model=2)
    assert_equal(model, torch.randn(8, 6), mesh=mesh, splits=splits, passes=passes)


def test_dropout_inside_a_gru_is_refused() -> None:
    model = Function(lambda self, x: self.g(x)[0], g=nn.GRU(4, 4, 2, dropout=0.5, batch_first=True))
    graph = capture(model, (torch.randn(4, 3, 4),))
    with pytest.raises(Infeasible, match="random"):
        lower(graph, Plan(graph=graph.hash, batch=4, mesh=Mesh.of(data=2), inputs={"data": "batch"}))


def test_a_group_norm_whose_groups_and_channels_are_split_by_two_axes_is_right() -> None:
    layers = {"c": nn.Conv2d(3, 8, 1), "d": nn.Conv2d(3, 8, 1), "n": nn.GroupNorm(4, 16)}
    model = Function(lambda self, x: self.n(torch.cat([self.c(x), self.d(x)], 1)), **layers)
    rule = {"a": "filter", "b": "filter"}
    assert_equal(model, torch.randn(2, 3, 4, 4), mesh=Mesh.of(a=2, b=2), splits=(("c", rule), ("d", rule)))


def test_a_rounding_division_does_not_let_partial_sums_through() -> None:
    model = Function(lambda self, x: torch.div(self.l(x) * 10, 2, rounding_mode="floor") + self.l(x), l=nn.Linear(6, 4))
    assert_equal(model, torch.randn(5, 6), mesh=Mesh.of(model=2), splits=(("l", {"model": "channel"}),))


def taught(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = self.t(x)
    return self.l(x) - teacher


def test_a_parameter_that_gets_no_gradient_on_one_device_gets_none_on_many() -> None:
    model = Function(taught, t=nn.Linear(4, 4), l=nn.Linear(4, 4))
    assert_equal(model, torch.randn(4, 4), mesh=Mesh.of(data=2), inputs={"data": "batch"})
    graph = capture(model, (torch.randn(4, 4),))
    program = lower(graph, named("data", graph, ranks=2, batch=4))
    assert sorted(program.reductions) == ["p_model_l_bias", "p_model_l_weight"]


def test_a_norm_used_twice_under_different_splits_is_refused() -> None:
    layers = {"c": nn.Conv2d(4, 4, 1), "d": nn.Conv2d(4, 4, 1), "n": nn.BatchNorm2d(4)}
    model = Function(lambda self, x: self.n(self.d(self.n(self.c(x)))), **layers)
    graph = capture(model, (torch.randn(4, 4, 2, 2),))
    splits = (("c", {"model": "replicate"}), ("d", {"model": "filter"}))
    with pytest.raises(Infeasible, match="tracked by two norms"):
        lower(graph, Plan(graph=graph.hash, batch=4, mesh=Mesh.of(model=2), splits=splits, inputs={}))
