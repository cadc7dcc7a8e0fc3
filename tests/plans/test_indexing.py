"""Look-ups by index tensors, differences and random numbers from nothing, split and compared with one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.plans import lower, named
from ranks import close_pools
from small import assert_equal, subject

BATCH, LENGTH, WIDTH = 5, 7, 6


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_pools()


class Picked(nn.Module):
    """A weighted input, looked up in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("order", torch.tensor([4, 0, 6, 0, 2]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        rows, columns = torch.arange(x.shape[0]), torch.arange(LENGTH)
        if self.how == "counted":
            return y[rows[:, None], columns]
        if self.how == "shifted":
            return y[rows[:, None], (torch.arange(LENGTH - 2) + 1)[None]]
        if self.how == "free":
            return y[:, self.order]
        if self.how == "apart":
            return y[self.order[:3, None] % 3, :, self.order % WIDTH][..., :WIDTH]
        if self.how == "gather":
            return y.gather(1, self.order[None, :, None].expand(x.shape[0], -1, WIDTH))
        if self.how == "diff":
            return torch.diff(y, dim=1, prepend=y[:, :1] * 2)
        keep = torch.rand(x.shape[0], 1, 1) if self.how == "rand" else torch.randn(x.shape[0], 1, WIDTH)
        return y * keep


HOW = ("counted", "shifted", "free", "apart", "gather", "diff", "rand", "randn")


def _graph(how: str) -> tuple[Graph, nn.Module, Tensor]:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Picked(how), nn.Linear(WIDTH, 4))
    return capture(module, (x,)), module, x


@pytest.mark.parametrize("strategy", ["data", "filter", "channel", "spatial"])
@pytest.mark.parametrize("how", HOW)
def test_a_look_up_split_on_three_ranks_equals_one_rank(how: str, strategy: str) -> None:
    torch.manual_seed(0)
    graph, module, x = _graph(how)
    start = {k: t.detach().clone() for k, t in [*module.named_parameters(), *module.named_buffers()]}
    plan = named(strategy, graph, ranks=3, batch=BATCH)
    assert not lower(graph, plan).replicated
    assert_equal(subject(graph, start, [x], BATCH).errors(plan))


def test_an_index_that_counts_the_samples_exchanges_nothing_under_data() -> None:
    graph, _, _ = _graph("counted")
    program = lower(graph, named("data", graph, ranks=3, batch=BATCH))
    assert [move.value for move in program.moves() if any(step.axes for step in move.exchange.steps)] == []
