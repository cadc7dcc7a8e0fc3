"""What torch.export drops is refused by name or carried, and capturing leaves the module as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.errors import CaptureFailed, Infeasible, Notice
from fourfold.graph.capture import capture
from fourfold.runs.parallel import Parallel


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


tripled = Tripled.apply


class Net(nn.Module):
    """A linear layer and what `body` does with it."""

    steps: int = 0
    memory: Tensor
    mean: Tensor

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.body = body
        self.register_buffer("mean", torch.zeros(4))
        self.memory = torch.zeros(4)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def own_backward(net: Net, x: Tensor) -> Tensor:
    return Tripled.apply(net.linear(x))


def stored_apply(net: Net, x: Tensor) -> Tensor:
    return tripled(net.linear(x))


def double(grad: Tensor) -> Tensor:
    return grad * 2


def hooked(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    y.register_hook(double)
    return y


def saved(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return net.linear(x).square()


def lower_precision(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.linear(x)


def counted(net: Net, x: Tensor) -> Tensor:
    net.steps += 1
    return net.linear(x) * net.steps


def grown(net: Net, x: Tensor) -> Tensor:
    net.seen.append(1)
    return net.linear(x) * len(net.seen)


def remembered(net: Net, x: Tensor) -> Tensor:
    net.memory = net.memory * 0.9 + x.detach().mean(0)
    return net.linear(x) + net.memory


def rolled(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) * random.random()


def drawn(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) * float(np.random.rand())


def reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.linear, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (own_backward, "autograd.Function Tripled, whose backward"),
        (stored_apply, "autograd.Function Tripled, whose backward"),
        (hooked, "the tensor hook double in forward"),
        (saved, "hooks on saved tensors in forward"),
        (lower_precision, r"torch.autocast\('cpu', dtype=bfloat16\)"),
        (counted, "changes 'steps' in every call of forward"),
        (grown, "changes 'seen' in every call of forward"),
        (remembered, "reads and replaces the tensor 'memory'"),
        (rolled, "draws numbers by random in forward"),
        (drawn, "draws numbers by numpy.random in forward"),
        (reentrant, "use_reentrant=True"),
    ],
)
def test_what_export_drops_is_refused_by_name(body: Any, words: str) -> None:
    net, before = Net(body), random.getstate()
    with pytest.raises(CaptureFailed, match=words):
        capture(net, (torch.randn(6, 4),))
    assert (net.steps, net.seen) == (0, [])
    random.setstate(before)


@pytest.mark.parametrize("kind", ["module", "pre", "parameter", "accumulated"])
def test_hooks_on_modules_and_parameters_are_refused_by_name(kind: str) -> None:
    net = Net(lambda net, x: net.linear(x))
    if kind == "module":
        net.linear.register_full_backward_hook(lambda module, inputs, outputs: None)
    elif kind == "pre":
        net.linear.register_full_backward_pre_hook(lambda module, outputs: None)
    elif kind == "parameter":
        net.linear.weight.register_hook(double)
    else:
        net.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CaptureFailed, match=r"'linear' has the backward hook|'linear.weight' has the hook"):
        capture(net, (torch.randn(6, 4),))
    capture(net, (torch.randn(6, 4),), train=False)  # evaluation has no backward


def cached(net: Net, x: Tensor) -> Tensor:
    net.steps = 1
    if not net.seen:
        net.seen.append("made once")
    net.memory = x.detach()
    return net.linear(x)


def without_autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return net.linear(x)


def on_cpu(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net.linear(x).square()


def rebound(net: Net, x: Tensor) -> Tensor:
    net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)
    return net.linear(x) + net.mean


def rerun(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.norm(net.linear(x)).relu(), x, use_reentrant=False)


def trained(net: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """Plain PyTorch."""
    update = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x in data:
        update.zero_grad()
        net(x).square().mean().backward()
        update.step()
    return {key: value.clone() for key, value in net.state_dict().items()}


def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def parallel(net: nn.Module, data: list[Tensor], **options: Any) -> Parallel:
    plan = ff.plan(net, (data[0],), strategy="data", devices=1).best
    return ff.parallelize(net, plan, optimizer=sgd, **options)


@pytest.mark.parametrize("body", [cached, without_autocast, on_cpu, rebound, rerun])
def test_what_carries_nothing_or_can_be_carried_is_equal(body: Any) -> None:
    torch.manual_seed(0)
    data = [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(1)
    run = parallel(Net(body).double(), data)
    for x in data:
        run.step(x)
    torch.manual_seed(1)
    expected = trained(Net(body).double(), data)
    for key, value in run.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12)


class Heads(nn.Module):
    """A list that two submodules share, written in forward: DynUNet's deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[Tensor] = [torch.rand(1)]
        self.first = Writer(self.heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.heads[0]


class Writer(nn.Module):
    def __init__(self, heads: list[Tensor]) -> None:
        super().__init__()
        self.heads, self.linear = heads, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.heads[0] = self.linear(x)
        return self.heads[0] * 2


def test_capturing_leaves_the_very_objects_a_module_had() -> None:
    net = Heads()
    head = net.heads[0]
    net.first.linear.eval()
    net.linear = net.first.linear
    for _ in range(2):
        capture(net, (torch.randn(6, 4),))
    assert net.heads is net.first.heads
    assert net.heads[0] is head
    assert net.training
    assert not net.first.linear.training


def test_every_submodule_is_captured_in_its_own_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    net[1].eval(), net[2].eval()
    ops = {op.module: op for op in capture(net, (torch.randn(6, 4),)).ops}
    assert ops["1"].args[5] is False
    assert ops["3"].args[5] is True
    assert "2" not in ops or ops["2"].args[2] is False


def test_a_module_in_eval_mode_is_trained_so_and_a_line_says_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with pytest.warns(Notice, match=r"Sequential is in eval mode"):
        run = parallel(net, [torch.randn(6, 4)])
    before = net[1].running_mean.clone()
    run.forward_backward(torch.randn(6, 4))
    assert torch.equal(run.state_dict()["1.running_mean"], before)


OUTSIDE = {"calls": 0}


def outside(net: Net, x: Tensor) -> Tensor:
    OUTSIDE["calls"] += not torch.compiler.is_exporting()
    return net.linear(x) * (1 + OUTSIDE["calls"])


def on_node(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x).square()
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 2 for g in inputs))
    return y


@pytest.mark.parametrize("body", [outside, on_node])
def test_what_no_trace_shows_is_found_by_two_eager_steps(body: Any) -> None:
    net = Net(body)
    with pytest.raises(CaptureFailed, match=r"Net as captured does not train as eager PyTorch does: .* off by"):
        parallel(net, [torch.randn(6, 4)])


def test_whoever_does_not_want_the_eager_steps_goes_without() -> None:
    parallel(Net(on_node), [torch.randn(6, 4)], check=False).step(torch.randn(6, 4))


def test_the_eager_steps_leave_weights_gradients_and_random_states_as_they_were() -> None:
    net = Net(lambda net, x: F.dropout(net.norm(net.linear(x)), 0.5, net.training))
    net.linear.weight.grad = torch.ones(4, 4)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    parallel(net, [torch.randn(6, 4, generator=torch.Generator().manual_seed(0))])
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(net.linear.weight.grad, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[index, union-attr]


def test_a_model_past_the_budget_is_not_compared_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.runs.capture_check.MOST_FLOPS", 10)
    with pytest.warns(Notice, match=r"not compared with eager PyTorch: forward takes .* FLOPs, at most 1e\+01"):
        parallel(nn.Linear(4, 4), [torch.randn(6, 4)])


class Both(nn.Module):
    """One of the two sides of a GAN, on weights that the other has too."""

    def __init__(self, made: nn.Module, judged: nn.Module) -> None:
        super().__init__()
        self.made, self.judged = made, judged

    def forward(self, x: Tensor) -> Tensor:
        return self.judged(self.made(x))


def test_two_runs_on_shared_weights_see_each_others_updates() -> None:
    data = [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(4)]

    def sides() -> tuple[Both, Both]:
        torch.manual_seed(0)
        one, two, shared = (nn.Linear(4, 4).double() for _ in range(3))
        return Both(one, shared), Both(two, shared)

    first, second = sides()
    runs = [parallel(first, data), parallel(second, data)]
    for k, x in enumerate(data):
        runs[k % 2].step(x)
    ours = {**runs[0].state_dict(), **{f"second.{k}": v for k, v in runs[1].state_dict().items()}}
    first, second = sides()
    updates = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (first, second)]
    for k, x in enumerate(data):
        updates[k % 2].zero_grad()
        (first, second)[k % 2](x).square().mean().backward()
        updates[k % 2].step()
    for key, value in {**first.state_dict(), **{f"second.{k}": v for k, v in second.state_dict().items()}}.items():
        torch.testing.assert_close(ours[key], value)


def test_a_second_run_on_divided_weights_is_refused_while_the_first_lives() -> None:
    net, x = nn.Linear(4, 4), torch.randn(6, 4)
    plan = ff.plan(net, (x,), strategy="fsdp", devices=1).best
    run = ff.parallelize(net, plan)
    with pytest.raises(Infeasible, match=r"'weight' belongs to another Parallel"):
        ff.parallelize(net, plan)
    del run
    ff.parallelize(net, plan)


class Scaled(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("weight", torch.arange(4.0, dtype=torch.float64))

    def forward(self, output: Tensor) -> Tensor:
        return (output * self.weight * self.scale).square().mean() + (self.scale - 2).square()


def test_a_loss_with_tensors_of_its_own_is_trained_and_its_parameters_are_given_back() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.manual_seed(0)
    net, loss = nn.Linear(4, 4).double(), Scaled()
    plan = ff.plan(net, (x,), loss=loss, strategy="data", devices=1).best
    run = ff.parallelize(net, plan, loss=loss, optimizer=sgd)
    losses = [float(run.step(x)) for _ in range(3)]
    torch.manual_seed(0)
    net, loss = nn.Linear(4, 4).double(), Scaled()
    update = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    for found in losses:
        update.zero_grad()
        value = loss(net(x))
        value.backward()
        update.step()
        assert found == pytest.approx(float(value.detach()))
    assert set(run.state_dict()) == {"weight", "bias"}
    assert set(run.loss_state_dict()) == {"scale", "weight"}
    torch.testing.assert_close(run.loss_state_dict()["scale"], loss.scale.detach())


class Once(nn.Module):
    """Sets itself up by the first batch, told by an attribute."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ready = nn.Linear(4, 4), False
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.mean.copy_(x.detach().mean(0))
            self.ready = True
        return self.linear(x - self.mean)


class Past(nn.Module):
    """Keeps an activation for the next call, where there was none before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.past = self.past, x.detach()
        return self.linear(x if before is None else x + before)


class OwnGenerator(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.linear, self.generator, self.fill = nn.Linear(4, 4), generator, float("nan")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (self.generator.random() if self.generator is not None else 1)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Once(), "writes buffer 'mean' in its first call of forward alone"),
        (Past(), r"carries tensors from one call of forward to the next \('past' changes\)"),
        (OwnGenerator(random.Random(0)), "changes 'generator' in every call"),
        (OwnGenerator(np.random.default_rng(0)), "changes 'generator' in every call"),
    ],
)
def test_state_that_shows_in_the_second_call_alone_is_refused(net: nn.Module, words: str) -> None:
    with pytest.raises(CaptureFailed, match=words):
        capture(net, (torch.randn(6, 4),))
    if isinstance(net, OwnGenerator) and isinstance(net.generator, random.Random):
        assert net.generator.random() == random.Random(0).random()


def test_an_attribute_that_is_not_a_number_has_not_changed() -> None:
    capture(OwnGenerator(None), (torch.randn(6, 4),))


def test_a_checkpoint_that_backward_does_not_run_again_writes_once() -> None:
    net = Net(rerun)
    net.linear.requires_grad_(False)
    net.norm.requires_grad_(False)
    whole = nn.Sequential(net, nn.Linear(4, 4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    run = parallel(whole, [x])
    run.step(x)
    assert int(run.state_dict()["0.norm.num_batches_tracked"]) == 1


def test_hooks_on_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inputs, outputs: None)
    try:
        with pytest.raises(CaptureFailed, match=r"all modules have the backward hook"):
            capture(nn.Linear(4, 4), (torch.randn(6, 4),))
    finally:
        handle.remove()


def test_the_parts_of_torch_that_have_no_public_name_are_there() -> None:
    """What capture and verify rest on: where a version of torch has moved one, this says which."""
    from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
    from torch._subclasses.schema_check_mode import SchemaCheckMode
    from torch.utils import checkpoint as checkpointing

    assert all(map(callable, (enable_python_dispatcher, no_python_dispatcher, SchemaCheckMode)))
    assert issubclass(checkpointing._checkpoint_hook, torch.autograd.graph.saved_tensors_hooks)
    assert issubclass(checkpointing._recomputation_hook, torch.autograd.graph.saved_tensors_hooks)
    assert torch._C.DispatchKey.PreDispatch is not None
    assert not torch._C._functorch.is_functorch_wrapped_tensor(torch.zeros(1))
    x = Tripled.apply(torch.ones(1, requires_grad=True))
    assert type(x.grad_fn)._forward_cls is Tripled
    parameter = nn.Parameter(torch.ones(1))
    assert parameter._post_accumulate_grad_hooks is None
    assert torch.zeros(2).untyped_storage()._cdata != torch.zeros(2).untyped_storage()._cdata
    assert nn.modules.module._global_backward_hooks is not None
