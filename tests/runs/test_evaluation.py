"""Evaluation and loading under stages and memory options, on a net with what is awkward there: a mask all layers share, class
weights in the loss, a parameter that only evaluation reads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.errors import InvalidInput
from fourfold.plans import Options, Plan
from ranks import pool

BATCH = 7


class Masked(nn.Module):
    """Layers that share a mask; evaluation scales the result by a parameter that training leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.temperature = nn.Parameter(torch.ones(6))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.temperature)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(6, 6, dtype=x.dtype, device=x.device).tril()
        for layer in self.layers:
            x = torch.relu(layer(x @ mask)) + x
        return x if self.training else x * self.temperature


class WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 6))

    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, self.weight)


class WithWeights(nn.Module):
    """The class weights inside the model, so that they are part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = Masked(), WeightedLoss()

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = self.net(x)
        return self.criterion(output, target), output


def first(outputs: Any) -> Tensor:
    return outputs[0]


def build(device: str = "cpu") -> WithWeights:
    torch.manual_seed(0)
    with torch.device(device):
        return WithWeights().double()


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 6, (BATCH,), generator=generator)


def other_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {k: torch.rand(t.shape, generator=generator, dtype=t.dtype) for k, t in build().state_dict().items()}


def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05)


def numbers(plan: Plan, device: str) -> dict[str, Any]:
    """A step, an evaluation, then the same from a loaded state."""
    run = ff.parallelize(build(device), plan, loss=first, optimizer=sgd)
    out: dict[str, Any] = {}
    if device == "cpu":
        out["step"] = float(run.step(*data(0)))
        out["eval"] = float(run.evaluate(*data(1))[0])
    run.load_state_dict(other_state())
    out["loaded step"] = float(run.step(*data(2)))
    out["loaded eval"] = float(run.evaluate(*data(1))[0])
    out["temperature"] = run.state_dict()["net.temperature"]
    return out


def expected() -> dict[str, float]:
    model, out = build(), {}
    for prefix, seed in (("", 0), ("loaded ", 2)):
        if prefix:
            model.load_state_dict(other_state())
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "temperature" not in n], lr=0.05)
        model.train()
        optimizer.zero_grad()
        loss, _ = model(*data(seed))
        loss.backward()
        optimizer.step()
        out[f"{prefix}step"] = loss.item()
        model.eval()
        out[f"{prefix}eval"] = model(*data(1))[0].item()
    return out


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("pipeline", {"microbatches": 3}), ("pipeline", {"microbatches": 2, "recompute": 2}), ("fsdp", {"microbatches": 2}),
     ("data", {"zero": 1, "microbatches": 3})],
)  # fmt: skip
def test_evaluation_and_loading_follow_training(strategy: str, options: dict[str, int], device: str) -> None:
    plan = ff.plan(build(), data(0), loss=first, strategy=strategy, devices=2, options=Options(**options)).best
    want = expected()
    for got in pool(2)(numbers, plan, device):
        for key in (k for k in got if k != "temperature"):
            assert got[key] == pytest.approx(want[key], rel=1e-9), key
        torch.testing.assert_close(got["temperature"], other_state()["net.temperature"])


def test_a_tensor_of_the_wrong_shape_is_refused_before_anything_is_loaded() -> None:
    plan = ff.plan(build(), data(0), loss=first, strategy="data", devices=1).best
    run = ff.parallelize(build(), plan, loss=first, optimizer=sgd)
    before = run.state_dict()
    state = {**other_state(), "net.layers.3.weight": torch.zeros(2, 2)}
    with pytest.raises(InvalidInput, match=r"'net.layers.3.weight' has shape \(2, 2\), the model's is \(6, 6\)"):
        run.load_state_dict(state)
    for key, value in run.state_dict().items():
        assert torch.equal(value, before[key])


def test_recomputed_segments_that_overlap_are_refused() -> None:
    plan = ff.plan(build(), data(0), loss=first, strategy="data", devices=1, options=Options(recompute=2)).best
    from dataclasses import replace

    from fourfold.graph.capture import capture
    from fourfold.plans import lower_plan

    graph = capture(build(), data(0), (), first)
    with pytest.raises(InvalidInput, match="in order, without overlap"):
        lower_plan(graph, replace(plan, recompute=tuple(reversed(plan.recompute))))
