"""Odd modules whose modes, buffers, Python state or random numbers are not those of a freshly made one."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odd_row import (
    BATCH,
    EITHER,
    EQUAL,
    HIDDEN,
    REFUSED,
    RUNS,
    WIDTH,
    Body,
    classifier,
    images,
    mean_square,
    none,
    odd,
    sequences,
)


class Normed(Body):
    """A batch norm in the middle."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.BatchNorm1d(HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)


@odd(EQUAL, microbatches=1, verify=True)
class FrozenBatchNorm(Normed):
    """A batch norm set to eval in a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.norm.running_mean)
        self.norm.eval()


@odd(EQUAL, microbatches=1)
class FrozenBackbone(Normed):
    """A fine-tuned head: the backbone's batch norm is in eval mode and its parameters need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.norm.running_mean)
        for part in (self.first, self.norm):
            part.eval().requires_grad_(False)


@odd(EQUAL, inputs=images, microbatches=1)
class FrozenByTrain(nn.Module):
    """A `train` of its own that leaves the batch norm frozen whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, HIDDEN, 3), nn.BatchNorm2d(HIDDEN), classifier()
        nn.init.normal_(self.norm.running_mean)
        self.train()

    def train(self, mode: bool = True) -> FrozenByTrain:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@odd(EQUAL, verify=True)
class FrozenDropout(Body):
    """Dropout set to eval in a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5).eval()

    def middle(self, h: Tensor) -> Tensor:
        return self.drop(h)


@odd(EQUAL)
class FrozenFunctionalDropout(Body):
    """`F.dropout` that asks a submodule in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last.eval()

    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, self.last.training)


@odd(EQUAL)
class FrozenParameters(Body):
    """A layer whose parameters need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.last.bias.requires_grad_(False)


@odd(EITHER)
class AllFrozen(Body):
    """No parameter needs a gradient: eager's backward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@odd(EITHER, "eval", microbatches=1, verify=True)
class RootInEval(Normed):
    """The model in eval mode when training starts, as Hugging Face returns it."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5)))
        self.eval()


@odd(EITHER, "eval", microbatches=1)
class TrainedInsideEval(Normed):
    """The model in eval mode with its dropout, its batch norm in train mode."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5)))
        self.eval()
        self.norm[0].train()


@odd(EQUAL)
class BranchOnTraining(Body):
    """A branch on `self.training`."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if self.training else h * 100


@odd(EITHER, "momentum", microbatches=1)
class CumulativeBatchNorm(Normed):
    """Batch norm with momentum=None: a cumulative average by num_batches_tracked."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(HIDDEN, momentum=None))


@odd(EQUAL, microbatches=1)
class BatchNormWithoutStatistics(Normed):
    """Batch norm with track_running_stats=False."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(HIDDEN, momentum=None, track_running_stats=False))


@odd(EQUAL, microbatches=1)
class BatchNormWithoutStatisticsInEval(Normed):
    """The same in eval mode, where it uses the batch's statistics all the same."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(HIDDEN, track_running_stats=False).eval())


class Buffered(Body):
    """A buffer that follows the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(HIDDEN))


@odd(EITHER, "seen", microbatches=1, verify=True)
class ReboundBuffer(Buffered):
    """A buffer bound anew in forward."""

    def middle(self, h: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * h.detach().mean(0)
        return h - self.seen


@odd(EQUAL, microbatches=1, verify=True)
class WrittenBuffer(Buffered):
    """A buffer written in place in forward."""

    def middle(self, h: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - self.seen


@odd(EITHER, ".data", microbatches=1)
class CopiedIntoBuffer(Buffered):
    """A buffer whose `.data` is written in forward, and one element of it."""

    def middle(self, h: Tensor) -> Tensor:
        self.seen.data.copy_(h.detach().mean(0))
        self.seen[0] = 1
        return h - self.seen


@odd(EQUAL)
class BufferNotSaved(Body):
    """A buffer that the state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, HIDDEN + 1), persistent=False)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale


@odd(EITHER)
class ExpandedBuffer(Body):
    """A buffer that is one number expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0).expand(HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale


@odd(EITHER, microbatches=1, verify=True)
class BufferOfParameter(Body):
    """A buffer on the memory of a parameter: it follows the optimizer's updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copy", self.first.bias.data)

    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + self.copy)


@odd(EITHER)
class ParametersOnOneMemory(Body):
    """Two parameters on the same memory: an update of one changes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Parameter(self.first.bias.data)

    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + self.again)


@odd(EQUAL, inputs=sequences, targets=none, loss=lambda: mean_square)
class BufferOnly(nn.Module):
    """A module with a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh()


@odd(EITHER, microbatches=1, verify=True)
class Counter(Body):
    """A Python counter that changes the forward at the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * 2 if self.calls == 2 else h


@odd(EITHER, microbatches=1)
class LateCounter(Body):
    """A Python counter that changes nothing before the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * 2 if self.calls >= 3 else h


STEPS = [0]


@odd(EITHER, microbatches=1)
class GlobalCounter(Body):
    """A counter outside the module that changes the forward at the second call."""

    def __init__(self) -> None:
        super().__init__()
        STEPS[0] = 0

    def middle(self, h: Tensor) -> Tensor:
        STEPS[0] += 1
        return h * 2 if STEPS[0] == 2 else h


@odd(EITHER, microbatches=1)
class GrowingList(Body):
    """A list that forward appends to and nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def middle(self, h: Tensor) -> Tensor:
        self.seen.append(tuple(h.shape))
        return h


@odd(EITHER, microbatches=1)
class GrowingListThatCounts(Body):
    """A list that forward appends to and whose length is a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def middle(self, h: Tensor) -> Tensor:
        self.seen.append(1)
        return h * len(self.seen)


@odd(EITHER, microbatches=1)
class KeptActivation(Body):
    """An attribute that keeps an activation for whoever wants to look."""

    def middle(self, h: Tensor) -> Tensor:
        self.activation = h.detach()
        return h


@odd(EQUAL)
class KeptHeads(Body):
    """A list attribute whose items forward replaces by activations and reads again, as networks with deep supervision do."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.zeros(1), torch.zeros(1)]

    def middle(self, h: Tensor) -> Tensor:
        self.heads[0], self.heads[1] = h.sin(), h.cos()
        return torch.stack(self.heads).sum(0)


class Skip(nn.Module):
    """A level of a network that writes its own output into a list its root holds too."""

    def __init__(self, heads: list[Tensor], index: int, inner: nn.Module) -> None:
        super().__init__()
        self.heads, self.index, self.inner, self.outer = heads, index, inner, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        h = self.outer(self.inner(h))
        self.heads[self.index] = h.sin()
        return h


@odd(EQUAL, verify=True)
class SharedHeads(Body):
    """The same with levels inside each other that write into one list, as MONAI's DynUNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.rand(1)] * 2
        self.levels = Skip(self.heads, 0, Skip(self.heads, 1, nn.Linear(HIDDEN, HIDDEN)))

    def middle(self, h: Tensor) -> Tensor:
        return torch.stack([self.levels(h), *self.heads], 1).sum(1)


@odd(EITHER, microbatches=1, verify=True)
class Memory(Body):
    """A tensor attribute, no buffer, that carries an activation to the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.past: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        before, self.past = self.past, h.detach()
        return h if before is None else h + before


@odd(EQUAL)
class TensorAttribute(Body):
    """A plain tensor attribute, and one that needs a gradient but is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.arange(1.0, HIDDEN + 1)
        self.shift = torch.ones(HIDDEN, requires_grad=True)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale + self.shift


@odd(EITHER)
class Unpicklable(Body):
    """A module that holds a lock and a generator, which nobody can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.numbers = threading.Lock(), (i for i in range(10))

    def middle(self, h: Tensor) -> Tensor:
        with self.lock:
            return h * 2


@odd(EQUAL)
class PatchedForward(Body):
    """A forward set on the instance."""

    def __init__(self) -> None:
        super().__init__()
        original = self.last.forward
        self.last.forward = lambda h: original(h) * 2  # type: ignore[method-assign]


@odd(EITHER, microbatches=1, verify=True)
class PythonRandom(Body):
    """A factor drawn by `random`."""

    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + random.random())


@odd(EITHER, microbatches=1)
class NumpyRandom(Body):
    """A factor drawn by numpy."""

    def middle(self, h: Tensor) -> Tensor:
        return h * float(1 + np.random.rand())


@odd(EITHER, microbatches=1)
class SeededNoise(Body):
    """Noise by a torch.Generator seeded in forward: the same in every step."""

    def middle(self, h: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return h + torch.randn(HIDDEN, generator=generator, dtype=h.dtype)


@odd(EITHER, microbatches=1, verify=True)
class SeededDropout(Body):
    """Dropout after torch.manual_seed in forward: the same mask in every step."""

    def middle(self, h: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.dropout(h, 0.5)


@odd(EITHER)
class DrawnBranch(Body):
    """A layer left out at random, as stochastic depth does with `.item()`."""

    def middle(self, h: Tensor) -> Tensor:
        return h if torch.rand(()).item() < 2 else h * 2


@odd(REFUSED, "DataDependentBranch")
class DataDependentBranch(Body):
    """A branch on the values of the batch."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if h.sum() > 0 else h


@odd(RUNS)
class DropoutInTraining(Body):
    """Dropout that trains: what it draws is its own affair."""

    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, self.training)


@odd(EQUAL, verify=True)
class DropoutThatCancels(Body):
    """One mask used twice, so that whatever is drawn cancels out."""

    def middle(self, h: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(h), 0.5)
        return h + mask * h - h * mask


@odd(EQUAL)
class DropoutOfAll(Body):
    """Dropout at p=0 and at p=1, where nothing is left to chance."""

    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.0) + F.dropout(h, 1.0)


@odd(EQUAL)
class NoiseThatCancels(Body):
    """Noise that is added and taken away."""

    def middle(self, h: Tensor) -> Tensor:
        noise = torch.randn_like(h)
        return h + noise - noise


class Recurrent(nn.Module):
    """Two recurrent layers and a classifier of the last step."""

    def __init__(self, layer: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.layers = layer(WIDTH, HIDDEN, num_layers=2, dropout=dropout, batch_first=True)
        self.head = classifier()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


@odd(RUNS, inputs=sequences)
def lstm_dropout() -> nn.Module:
    """An LSTM with dropout between its layers."""
    return Recurrent(nn.LSTM, 0.5)


@odd(RUNS, inputs=sequences)
def gru_dropout() -> nn.Module:
    """A GRU with dropout between its layers."""
    return Recurrent(nn.GRU, 0.5)


@odd(EQUAL, inputs=sequences, verify=True)
def lstm_with_dropout_frozen() -> nn.Module:
    """An LSTM with dropout in eval mode, in a model that trains."""
    model = Recurrent(nn.LSTM, 0.5)
    model.layers.eval()
    return model


@odd(EQUAL, microbatches=1)
class BatchInForward(Body):
    """The size of the batch and its mean are part of the forward."""

    def middle(self, h: Tensor) -> Tensor:
        return h * h.shape[0] - h.mean(0)


@odd(EITHER, microbatches=1)
class BatchAsNumber(Body):
    """The size of the batch is written into the forward as a number."""

    def middle(self, h: Tensor) -> Tensor:
        return h.reshape(BATCH // 2, 2, HIDDEN).flip(1).reshape(BATCH, HIDDEN)
