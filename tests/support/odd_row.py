"""What a row of the table of odd modules is: a small module, its data and loss, and what must become of it.

What eager PyTorch computes is the truth. A run that gives the same numbers and a refusal in one line that names the thing are
both right; anything else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

BATCH, WIDTH, HIDDEN, WIDE, CLASSES, WORDS = 6, 6, 8, 256, 5, 11
EQUAL, REFUSED, EITHER, RUNS = "equal", "refused", "either", "runs"
"""Expectations; `either` is equal or refused, `runs` is for what is drawn at random: finite, trained, of the right shape."""

Inputs = tuple[Tensor, ...] | dict[str, Tensor]
Data = Callable[[Generator, torch.dtype], Inputs]
Targets = Callable[[Generator, torch.dtype], tuple[Tensor, ...]]
Loss = Callable[..., Tensor]


def vectors(generator: Generator, dtype: torch.dtype) -> Inputs:
    return (torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype),)


def named_vectors(generator: Generator, dtype: torch.dtype) -> Inputs:
    return {name: vectors(generator, dtype)[0] for name in ("left", "right")}  # type: ignore[index]


def images(generator: Generator, dtype: torch.dtype) -> Inputs:
    return (torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64).to(dtype),)


def sequences(generator: Generator, dtype: torch.dtype) -> Inputs:
    return (torch.randn(BATCH, 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype),)


def tokens(generator: Generator, dtype: torch.dtype) -> Inputs:
    return (torch.randint(0, WORDS, (BATCH, 4), generator=generator),)


def labels(generator: Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randint(0, CLASSES, (BATCH,), generator=generator),)


def float_labels(generator: Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (labels(generator, dtype)[0].to(dtype),)


def none(generator: Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return ()


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.Tanh(), nn.Linear(WIDE, CLASSES))


class Body(nn.Module):
    """Two layers, something odd where they are narrow, two layers: a pipeline of two stages is cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.first = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, HIDDEN)
        self.last, self.head = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, CLASSES)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        h = self.middle(self.first(torch.tanh(self.wide(x))))
        return self.head(torch.tanh(self.last(torch.tanh(h))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One odd module. `word`: what a refusal's message must contain. `tolerance`: relative, of parameters in units of their
    change; `first` is that of the first loss."""

    name: str
    build: Callable[[], nn.Module]
    expect: str
    word: str
    inputs: Data
    targets: Targets
    loss: Callable[[], Loss]
    dtype: torch.dtype
    tolerance: float
    first: float
    microbatches: int
    verify: bool
    plain: Callable[[], Any] | None
    split: Callable[[str], Any] | None

    def data(self, step: int) -> tuple[Inputs, tuple[Tensor, ...]]:
        generator = Generator().manual_seed(step)
        return self.inputs(generator, self.dtype), self.targets(generator, self.dtype)

    def made(self) -> tuple[nn.Module, Loss]:
        torch.manual_seed(1)
        with default_dtype(self.dtype):
            return self.build(), self.loss()


ROWS: dict[str, Row] = {}


def odd(
    expect: str,
    word: str = "",
    *,
    inputs: Data = vectors,
    targets: Targets = labels,
    loss: Callable[[], Loss] = lambda: F.cross_entropy,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    first: float | None = None,
    microbatches: int = 2,
    verify: bool = False,
    plain: Callable[[], Any] | None = None,
    split: Callable[[str], Any] | None = None,
) -> Callable[[Any], Any]:
    """Put a module's class, or a function that makes one, into the table. Micro-batches are those of the pipeline: 1 where
    statistics or state of a whole batch matter."""

    def register(build: Any) -> Any:
        assert build.__doc__, build
        name = "".join(word[:1].upper() + word[1:] for word in build.__name__.split("_"))
        ROWS[name] = Row(
            name=name, build=build, expect=expect, word=word, inputs=inputs, targets=targets, loss=loss, dtype=dtype,
            tolerance=tolerance, first=tolerance if first is None else first, microbatches=microbatches, verify=verify,
            plain=plain, split=split,
        )  # fmt: skip
        return build

    return register


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
