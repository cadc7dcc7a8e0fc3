"""Capture: one graph for every batch, nothing lost on the way, and a one-rank program that is eager, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.errors import CaptureFailed, Infeasible, InvalidInput
from fourfold.graph import Graph, Size
from fourfold.graph.capture import Inputs, capture, mean_square
from fourfold.models import MODELS
from fourfold.plans import Mesh, Plan, lower, named
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution.executor import Executor
from ranks import lists_of, stepped
from small import SMALL

Loss = Callable[..., Tensor]


def one_rank(graph: Graph, batch: int) -> Plan:
    return Plan(graph=graph.hash, batch=batch, mesh=Mesh.of(data=1))


def assert_bitwise(
    module: nn.Module, graph: Graph, inputs: Inputs, targets: tuple[Tensor, ...] = (), loss: Loss | None = None
) -> None:
    """Loss, every gradient and every buffer of the one-rank program are those of eager."""
    values = tuple(inputs.values()) if isinstance(inputs, Mapping) else tuple(inputs)
    start = {k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    world = World.join(Mesh.of(data=1))
    lists = lists_of(lower(graph, one_rank(graph, values[0].shape[0])), world)
    executor = Executor(lists, world, lambda key, _: start[key].clone())
    feeds = {n: executor.cut(n, t) for n, t in zip((*graph.inputs, *graph.targets), (*values, *targets), strict=True)}
    got, _ = stepped(executor, feeds)
    module.zero_grad()
    outputs = module(**inputs) if isinstance(inputs, Mapping) else module(*values)
    expected = loss(outputs, *targets) if loss else mean_square(outputs)
    expected.backward()
    assert torch.equal(got, expected)
    state, eager = {executor.keys[n]: t for n, t in executor.state.items()}, dict(module.named_parameters())
    for key, tensor in state.items():
        if key in eager and tensor.requires_grad:
            grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            assert torch.equal(grad, eager[key].grad), key
    for key, tensor in module.named_buffers():
        if key in state:
            assert torch.equal(state[key], tensor), key
    for key, tensor in start.items():  # eager must not see its own update in the next comparison
        (dict(module.named_parameters()) | dict(module.named_buffers()))[key].data.copy_(tensor)


@pytest.mark.parametrize("model", ["vgg16-cifar", "resnet50", "unet3d", "cosmoflow", "gpt2", "gnmt"])
def test_one_capture_runs_every_batch_bitwise_as_eager(model: str) -> None:
    torch.manual_seed(0)
    module, inputs, targets, loss = MODELS[model](**SMALL[model])
    graph = capture(module, inputs, targets, loss)
    assert graph.batch is None
    for batch in (4, 1, 3):
        cut_inputs, cut_targets = (tuple(t[:batch] for t in tensors) for tensors in (inputs, targets))
        assert_bitwise(module, graph, cut_inputs, cut_targets, loss)


def test_the_hash_does_not_depend_on_the_batch_or_the_weights_but_on_the_model() -> None:
    hashes = {
        (width, batch): capture(*MODELS["vgg16-cifar"](batch=batch, width=width, channels=4)).hash
        for width, batch in ((8, 2), (8, 5), (16, 2))
    }
    assert hashes[8, 2] == hashes[8, 5]
    assert hashes[8, 2] != hashes[16, 2]


def test_meta_and_real_captures_are_the_same_graph() -> None:
    with torch.device("meta"):
        on_meta = capture(*MODELS["gpt2"](**SMALL["gpt2"]))
    assert on_meta.hash == capture(*MODELS["gpt2"](**SMALL["gpt2"])).hash


class Fixed(nn.Module):
    """Knows its batch: the view bakes it in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(4, 2, 3).flatten(1))


def test_a_model_that_fixes_its_batch_is_captured_for_that_batch_only() -> None:
    module, x = Fixed(), torch.randn(4, 6)
    graph = capture(module, (x,))
    assert graph.batch == 4
    assert_bitwise(module, graph, (x,))
    with pytest.raises(InvalidInput, match=r"fixes its batch at 4, the plan says 8; use 4"):
        lower(graph, named("data", graph, ranks=2, batch=8))
    program = lower(graph, named("data", graph, ranks=2, batch=4))
    assert program.stored[graph.inputs[0]].state("data") == "shard(0)"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        y.mul_(2).add_(1)
        return F.dropout(y, 0.0, inplace=True).relu_() * x


def test_in_place_ops_become_functional_with_the_same_numbers() -> None:
    module, x = InPlace(), torch.randn(3, 5)
    graph = capture(module, (x,))
    assert not [op.target for op in graph.ops if op.target.split(".")[1].endswith("_")]
    assert_bitwise(module, graph, (x,))


class BehindItsBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        view = y[0]
        y.add_(1)
        return view * y


def test_a_view_changed_behind_its_back_is_refused() -> None:
    with pytest.raises(CaptureFailed, match=r"reads a view that .* changed in place; use the functional op there"):
        capture(BehindItsBack(), (torch.randn(3, 5),))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def test_tied_weights_are_one_parameter_known_by_both_keys() -> None:
    module, ids = Tied(), torch.randint(0, 7, (3, 5))
    graph = capture(module, (ids,))
    assert [p.key for p in graph.parameters] == ["table.weight"]
    assert graph.aliases == (("head.weight", "table.weight"),)
    assert_bitwise(module, graph, (ids,))


class Counted(nn.Module):
    """Buffers written by a norm, by hand, twice, and never."""

    steps: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.steps.mul_(3)
        return self.norm(x) * self.scale


def test_buffers_are_written_back_as_often_as_eager_does() -> None:
    module, x = Counted(), torch.randn(4, 5)
    graph = capture(module, (x,))
    keys = {p.name: p.key for p in graph.parameters}
    assert {keys[name] for name, _ in graph.writes} == {"norm.num_batches_tracked", "steps"}  # the norm writes its own
    assert {p.key: p.persistent for p in graph.parameters if p.buffer}["scale"] is False
    assert_bitwise(module, graph, (x,))


class Named(nn.Module):
    """Inputs by name, one of them without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(x) * scale, "z": x + bias}


def test_inputs_may_be_a_dict_and_some_have_no_batch_dim() -> None:
    module = Named()
    inputs = {"x": torch.randn(4, 5), "scale": torch.randn(()), "bias": torch.randn(5)}
    graph = capture(module, inputs)
    assert [graph.batch_dim(name) for name in graph.inputs] == [0, None, None]
    assert len(graph.outputs) == 2
    assert_bitwise(module, graph, inputs)
    program = lower(graph, named("data", graph, ranks=2, batch=4))
    assert [program.stored[name].state("data") for name in graph.inputs] == ["shard(0)", "same", "same"]


class Partly(nn.Module):
    """One frozen layer, one trained, one nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.idle = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x).relu())


def test_frozen_and_idle_parameters_are_no_obstacle() -> None:
    module, x = Partly(), torch.randn(4, 5)
    graph = capture(module, (x,))
    trainable = {p.key: p.trainable for p in graph.parameters}
    assert {k: v for k, v in trainable.items() if not k.startswith("idle")} == {
        "frozen.weight": False, "frozen.bias": False, "trained.weight": True, "trained.bias": True
    }  # fmt: skip
    program = lower(graph, named("data", graph, ranks=2, batch=4))
    assert {p.key for p in graph.parameters if p.name in program.reductions} == {"trained.weight", "trained.bias"}


class Ungraded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = self.linear(x).softmax(-1)
        return self.linear(x) * weights


def test_a_region_without_gradients_is_inlined_and_stays_without() -> None:
    module, x = Ungraded(), torch.randn(4, 5)
    graph = capture(module, (x,))
    assert any(op.target == "aten.detach.default" for op in graph.ops)
    assert_bitwise(module, graph, (x,))


def test_without_a_loss_the_mean_square_of_all_outputs_stands_in() -> None:
    module, x = nn.Linear(5, 3), torch.randn(4, 5)
    assert_bitwise(module, capture(module, (x,)), (x,))
    y, z = torch.randn(3), torch.randn(4)
    assert torch.equal(mean_square((y, {"z": z, "ids": torch.arange(3)})), y.square().mean() + z.square().mean())


def test_sizes_follow_the_batch() -> None:
    graph = capture(nn.Flatten(0), (torch.randn(4, 5),))
    assert graph.values[graph.outputs[0]].shape == (Size(5, 0),)
    assert graph.at(7).values[graph.outputs[0]].shape == (35,)


class Undecided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the line that the refusal names
            return x
        return -x


class Peeking(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * float(x.max().numpy())


@pytest.mark.parametrize(("module", "line"), [(Undecided(), "x.sum().item() > 0"), (Peeking(), "x.max().numpy()")])
def test_a_model_that_does_not_export_is_refused_with_its_line_and_a_remedy(module: nn.Module, line: str) -> None:
    with pytest.raises(CaptureFailed) as refusal:
        capture(module, (torch.randn(4, 5),))
    text = str(refusal.value)
    assert text.startswith(f"{type(module).__name__} cannot be exported at {__file__}:")
    assert line in text
    assert "avoid .item()" in text
    assert "\n" not in text


def test_a_loss_that_is_not_a_scalar_is_refused_with_the_remedy() -> None:
    with pytest.raises(CaptureFailed, match=r"the loss must be a scalar tensor; reduce it with mean\(\) or sum\(\)"):
        capture(nn.Linear(5, 5), (torch.randn(4, 5),), (), lambda y: y.square())


def test_inputs_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(CaptureFailed, match=r"inputs must be tensors, got int"):
        capture(nn.Linear(5, 5), (torch.randn(4, 5), 3))  # type: ignore[arg-type]


def test_the_module_is_left_in_the_mode_it_was_in() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    module[1].eval()
    capture(module, (torch.randn(4, 5),))
    assert [m.training for m in module.modules()] == [True, True, False]


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.normal(0.0, 1.0, x.shape)


def test_random_numbers_that_no_rule_keeps_alike_are_refused_by_name() -> None:
    graph = capture(Noisy(), (torch.randn(4, 5),))
    with pytest.raises(Infeasible, match=r"draws random numbers and has no rule that keeps ranks alike"):
        lower(graph, named("data", graph, ranks=2, batch=4))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="before 2.13 torch tells wrong shapes of the last states")
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"batch_first": True}, {"num_layers": 2, "proj_size": 3}])
def test_recurrent_layers_are_captured_as_torch_would(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By their shapes alone, and step by step as torch does: the same graph."""
    args = nn.LSTM(5, 4, **options), (torch.randn(4, 6, 5) if options.get("batch_first") else torch.randn(6, 4, 5),)
    quick = capture(args[0], args[1], (), lambda out: out[0].square().mean() + out[1][1].sum(), fixed=True)
    monkeypatch.setattr("fourfold.graph.capture.lstm_by_shapes", contextlib.nullcontext)
    assert capture(args[0], args[1], (), lambda out: out[0].square().mean() + out[1][1].sum(), fixed=True) == quick


def test_dims_written_as_a_range_of_a_tensor_are_numbers() -> None:
    def written(out: Tensor) -> Tensor:
        return out.square().sum(dim=torch.arange(1, len(out.shape)).tolist()).mean()

    model, given = nn.Conv2d(2, 3, 3), (torch.randn(4, 2, 6, 6),)
    found = capture(model, given, (), written)
    assert found.batch is None, "any batch will do"
    plain = capture(model, given, (), lambda out: out.square().sum(dim=(1, 2, 3)).mean())
    assert [(op.target, str(op.args)) for op in found.ops] == [(op.target, str(op.args)) for op in plain.ops]


def test_a_range_that_is_written_to_is_no_longer_known() -> None:
    def whole(out: Tensor) -> Tensor:
        dims = torch.arange(2)
        dims += 1
        return out.square().sum(dim=dims.tolist()).mean()

    def view(out: Tensor) -> Tensor:
        dims = torch.arange(3)
        dims[1:].add_(1)
        return out.square().sum(dim=dims[:2].tolist()).mean()

    for loss in (whole, view):
        with pytest.raises(CaptureFailed, match="data-dependent"):
            capture(nn.Conv2d(2, 3, 3), (torch.randn(4, 2, 6, 6),), (), loss)
