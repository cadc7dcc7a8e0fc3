"""The Python interface on real ranks: training steps, clipping, evaluation and state with the numbers of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.errors import InvalidInput
from fourfold.runtime.host.launch import LocalRanks
from ranks import pool


class Net(nn.Module):
    """Convolution, batch norm and two layers of a classifier, small enough for many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 6 * 6, 16)
        self.head = nn.Linear(16, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(torch.relu(self.norm(self.conv(x))).flatten(1)))


def sample(step: int = 0, batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (batch,), generator=generator)


def build(device: str = "cpu") -> Net:
    torch.manual_seed(1)
    with torch.device(device):
        return Net().double()


def adamw(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def planned(strategy: str, ranks: int, batch: int = 6) -> Any:
    x, y = (t.to("meta") for t in sample(batch=batch))
    loss = nn.functional.cross_entropy
    return ff.plan(build("meta"), (x,), targets=(y,), loss=loss, strategy=strategy, devices=ranks).best


def train(strategy: str, ranks: int, clip: float) -> dict[str, Any]:
    run = ff.parallelize(build(), planned(strategy, ranks), loss=nn.functional.cross_entropy, optimizer=adamw)
    losses, norms = [], []
    for step in range(4):
        x, y = sample(step)
        losses.append(float(run.forward_backward(*run.local(x, y)) if step % 2 else run.forward_backward(x, y)))
        norms.append(float(run.clip_grad_norm(clip)))
        run.optimizer.step()
    loss, outputs = run.evaluate(*sample(9))
    again = ff.parallelize(build(), planned(strategy, ranks), loss=nn.functional.cross_entropy, optimizer=adamw)
    again.load_state_dict(run.state_dict())
    second, _ = again.evaluate(*sample(9))
    shapes = {name: tuple(p.shape) for name, p in run.module.named_parameters()}
    return {"losses": losses, "norms": norms, "eval": float(loss), "outputs": outputs[0], "state": run.state_dict(),
            "again": float(second), "shapes": shapes}  # fmt: skip


def reference(clip: float, microbatches: int = 1) -> dict[str, Any]:
    """A plain loop; batch norm sees one micro-batch after the other, the loss all of them."""
    model = build()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "unused" not in n], lr=1e-2)
    losses, norms = [], []
    for step in range(4):
        x, y = sample(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(torch.cat([model(part) for part in x.tensor_split(microbatches)]), y)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    model.eval()
    x, y = sample(9)
    outputs = model(x).detach()
    return {"losses": losses, "norms": norms, "eval": float(nn.functional.cross_entropy(outputs, y)), "outputs": outputs,
            "state": model.state_dict()}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "ranks", "microbatches"),
    [("data", 2, 1), ("data", 4, 1), ("filter", 2, 1), ("channel", 3, 1), ("spatial", 2, 1), ("data+filter", 4, 1),
     ("splitbrain:k=2", 4, 1), ("pipeline:microbatches=4", 2, 4), ("data+pipeline:microbatches=2", 3, 2),
     ("filter+pipeline:microbatches=3", 4, 3)],
)  # fmt: skip
def test_training_through_the_interface_equals_a_plain_loop(strategy: str, ranks: int, microbatches: int) -> None:
    want = reference(0.5, microbatches)
    for got in pool(ranks)(train, strategy, ranks, 0.5):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-9)
        assert got["eval"] == pytest.approx(want["eval"], rel=1e-9)
        assert got["again"] == pytest.approx(want["eval"], rel=1e-9)
        torch.testing.assert_close(got["outputs"], want["outputs"], rtol=1e-9, atol=1e-9)
        assert list(got["state"]) == list(want["state"])
        for key, value in want["state"].items():
            torch.testing.assert_close(got["state"][key], value, rtol=1e-8, atol=1e-10)
        if strategy == "filter":
            assert got["shapes"]["conv.weight"] == (4, 3, 3, 3)


def test_ranks_that_share_no_memory_get_the_same_numbers_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    want = reference(0.5)
    monkeypatch.setenv("FOURFOLD_SOCKETS", "1")
    with LocalRanks(2) as fresh:
        for got in fresh(train, "data", 2, 0.5):
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-9)


def from_meta(strategy: str, ranks: int) -> dict[str, Tensor]:
    run = ff.parallelize(build("meta"), planned(strategy, ranks), loss=nn.functional.cross_entropy, optimizer=adamw, seed=3)
    run.step(*sample())
    return {k: v for k, v in run.state_dict().items() if not k.startswith("unused")}


def test_a_model_built_on_meta_is_initialised_alike_under_every_plan() -> None:
    want = from_meta("data", 1)
    assert want["conv.weight"].std() > 0.05
    for strategy, ranks in [("filter", 2), ("data", 2)]:
        for got in pool(ranks)(from_meta, strategy, ranks):
            for key, value in want.items():
                torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-10)


class ScaledLoss(nn.Module):
    """Cross entropy of scaled and shifted outputs: the scale is trained, the shift is a buffer."""

    shift: Tensor

    def __init__(self, scale: float = 1.0, shift: float = 0.5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), scale, dtype=torch.float64))
        self.register_buffer("shift", torch.full((5,), shift, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.scale - (outputs - self.shift).square(), targets)


def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-2)


def plan_with_loss(strategy: str, zero: int) -> Any:
    x, y = (t.to("meta") for t in sample())
    with torch.device("meta"):
        loss = ScaledLoss()
    options = ff.Options(zero=zero, microbatches=1)  # as one process: batch norm sees the whole batch
    plan = ff.plan(build("meta"), (x,), targets=(y,), loss=loss, strategy=strategy, devices=2, options=options).best
    return replace(plan, stages=(*plan.stages[:1], *(replace(stage, first="hidden.linear") for stage in plan.stages[1:])))


def continue_in_another_run(strategy: str, zero: int) -> dict[str, Any]:
    """Two steps of one run; its state loaded into another with other values in its loss, and a third step there."""
    plan = plan_with_loss(strategy, zero)
    run = ff.parallelize(build(), plan, loss=ScaledLoss(), optimizer=sgd)
    losses = [float(run.step(*sample(step))) for step in range(2)]
    other = ff.parallelize(build(), plan, loss=ScaledLoss(scale=3.0, shift=7.0), optimizer=sgd)
    other.load_state_dict(run.state_dict())
    other.load_loss_state_dict(run.loss_state_dict())
    evaluated = float(other.evaluate(*sample(9))[0])
    losses.append(float(other.step(*sample(2))))
    held = sum(p.numel() for name, p in other.module.named_parameters() if name == "loss.scale")
    return {"losses": losses, "eval": evaluated, "held": held, "saved": run.loss_state_dict(), "state": other.loss_state_dict()}


def continued_reference() -> dict[str, Any]:
    model, loss = build(), ScaledLoss()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=1e-2)
    losses, saved, evaluated = [], {}, 0.0
    for step in range(3):
        if step == 2:
            saved = {name: t.clone() for name, t in loss.state_dict().items()}
            model.eval()
            x, y = sample(9)
            evaluated = loss(model(x), y).item()
            model.train()
        optimizer.zero_grad()
        x, y = sample(step)
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return {"losses": losses, "eval": evaluated, "saved": saved, "state": loss.state_dict()}


@pytest.mark.parametrize(("strategy", "zero", "held"), [("data", 0, [5, 5]), ("data", 3, [3, 2]), ("pipeline", 0, [0, 5])])
def test_the_state_of_a_loss_is_loaded_into_the_ranks_that_hold_it(strategy: str, zero: int, held: list[int]) -> None:
    want = continued_reference()
    found = pool(2)(continue_in_another_run, strategy, zero)
    assert [got["held"] for got in found] == held
    for got in found:
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
        assert got["eval"] == pytest.approx(want["eval"], rel=1e-9)
        for part in ("saved", "state"):
            assert list(got[part]) == ["scale", "shift"]
            for key, value in want[part].items():
                torch.testing.assert_close(got[part][key], value, rtol=1e-9, atol=1e-12)


def test_the_state_of_a_loss_that_lacks_a_key_or_has_another_shape_is_refused() -> None:
    x, y = sample()
    loss = ScaledLoss()
    plan = ff.plan(build(), (x,), targets=(y,), loss=loss, strategy="data", devices=1).best
    run = ff.parallelize(build(), plan, loss=loss)
    with pytest.raises(InvalidInput, match=r"lacks 1 keys, the first is 'loss\.scale'"):
        run.load_loss_state_dict({"shift": torch.zeros(5)})
    with pytest.raises(InvalidInput, match=r"'loss\.scale' has shape \(4,\), the model's is \(5,\)"):
        run.load_loss_state_dict({"shift": torch.zeros(5), "scale": torch.zeros(4)})


class Coupled(torch.optim.SGD):
    """An optimizer that is not known to be elementwise."""


def refuse_coupled(strategy: str) -> str:
    try:
        ff.parallelize(build(), planned(strategy, 2), loss=nn.functional.cross_entropy,
                       optimizer=lambda named: Coupled([p for _, p in named], 0.1))  # fmt: skip
    except InvalidInput as error:
        return str(error)
    return "accepted"


def test_an_optimizer_that_is_not_elementwise_is_refused_on_sharded_parameters_only() -> None:
    assert "Coupled" in pool(2)(refuse_coupled, "filter")[0]
    assert pool(2)(refuse_coupled, "data") == ["accepted", "accepted"]


def test_inputs_of_the_wrong_shape_are_named_with_both_shapes() -> None:
    run = ff.parallelize(build(), planned("data", 1), loss=nn.functional.cross_entropy, optimizer=adamw)
    with pytest.raises(InvalidInput, match=r"\(5, 3, 6, 6\).*\(6, 3, 6, 6\)"):
        run.step(*sample(batch=5))


def test_a_device_without_a_number_is_this_process_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found(Exception):
        pass

    def init_torchrun(mesh: Any, device: torch.device) -> None:
        raise Found(str(device))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("fourfold.runs.parallel.World.init_torchrun", init_torchrun)
    with pytest.raises(Found, match=r"^cuda:3$"):
        ff.parallelize(build(), planned("data", 1), device="cuda")
    with pytest.raises(Found, match=r"^cpu$"):
        ff.parallelize(build(), planned("data", 1))


def test_a_precision_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidInput, match="unknown precision 'fp46'; did you mean 'fp64'"):
        ff.parallelize(build(), planned("data", 1), precision="fp46")


def test_a_plan_for_more_ranks_than_run_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs 2 ranks"):
        ff.parallelize(build(), planned("data", 2), loss=nn.functional.cross_entropy)
