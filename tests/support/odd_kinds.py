"""Odd modules by their kind: of numbers, of weights, of wrappers, of outputs and of losses."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from odd_row import (
    CLASSES,
    EITHER,
    EQUAL,
    HIDDEN,
    REFUSED,
    WIDE,
    WIDTH,
    WORDS,
    Body,
    classifier,
    float_labels,
    images,
    mean_square,
    named_vectors,
    none,
    odd,
    sequences,
    tokens,
)

COARSE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}
"""Tolerances, in units of the parameters' change in three steps: tens of roundings of the dtype."""


@odd(EITHER, "complex", verify=True)
class ComplexParameters(Body):
    """A complex layer between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.complex128))

    def middle(self, h: Tensor) -> Tensor:
        return (h.to(torch.complex128) @ self.turn).abs()


@odd(EITHER)
class ComplexInside(Body):
    """Real parameters, a Fourier transform in the middle."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(h) * 1j, n=HIDDEN)


class Words(nn.Module):
    """Embedded tokens, their mean classified."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, WIDTH, **more), Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.words(x).mean(1))


@odd(EITHER, "sparse", inputs=tokens, microbatches=1, verify=True)
def sparse_gradients() -> nn.Module:
    """An embedding with sparse gradients."""
    return Words(sparse=True)


@odd(EQUAL, inputs=tokens)
def integer_inputs() -> nn.Module:
    """Inputs that need no gradient and cannot have one."""
    return Words(padding_idx=0)


@odd(EITHER, inputs=tokens)
def renormed_embedding() -> nn.Module:
    """An embedding with max_norm, which changes its weight in forward, and gradients scaled by frequency."""
    return Words(max_norm=1.0, scale_grad_by_freq=True)


@odd(EITHER, dtype=torch.bfloat16, tolerance=COARSE[torch.bfloat16], verify=True)
class BFloat16(Body):
    """A module in bfloat16."""


@odd(EITHER, dtype=torch.float16, tolerance=COARSE[torch.float16])
class Float16(Body):
    """A module in float16."""


@odd(EQUAL, dtype=torch.float32, tolerance=COARSE[torch.float32])
class Float32(Body):
    """A module in float32."""


@odd(EITHER, dtype=torch.float32, tolerance=COARSE[torch.float32], verify=True)
class MixedFloats(Body):
    """A float64 layer between float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def middle(self, h: Tensor) -> Tensor:
        return self.exact(h.double()).float()


@odd(EITHER, "autocast", dtype=torch.float32, tolerance=COARSE[torch.float16], first=1e-5, verify=True)
class AutocastInside(Body):
    """A region of forward under torch.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(h).float()


@odd(EITHER, "autocast", dtype=torch.float32, tolerance=COARSE[torch.float32])
class AutocastDisabled(Body):
    """A region of forward where autocast is switched off, which it is anyway."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return h * 2


def weight_normed(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


class Wrapped(Body):
    """A layer in the middle that something has been done to."""

    def __init__(self, layer: nn.Module | Any) -> None:
        super().__init__()
        self.layer = layer

    def middle(self, h: Tensor) -> Tensor:
        return self.layer(h)


def layer() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


@odd(EQUAL)
def old_weight_norm() -> nn.Module:
    """nn.utils.weight_norm, by a forward pre-hook."""
    return Wrapped(weight_normed(layer()))


@odd(EQUAL)
def weight_norm() -> nn.Module:
    """parametrizations.weight_norm."""
    return Wrapped(parametrizations.weight_norm(layer()))


@odd(EITHER, microbatches=1)
def old_spectral_norm() -> nn.Module:
    """nn.utils.spectral_norm, whose buffers a forward pre-hook writes."""
    return Wrapped(nn.utils.spectral_norm(layer()))


@odd(EITHER, microbatches=1, verify=True)
def spectral_norm() -> nn.Module:
    """parametrizations.spectral_norm."""
    return Wrapped(parametrizations.spectral_norm(layer()))


@odd(EITHER)
def orthogonal() -> nn.Module:
    """parametrizations.orthogonal."""
    return Wrapped(parametrizations.orthogonal(layer()))


@odd(EITHER)
def pruned() -> nn.Module:
    """A layer pruned by torch.nn.utils.prune: a mask and a forward pre-hook."""
    return Wrapped(prune.l1_unstructured(layer(), "weight", amount=0.5))


@odd(EQUAL, inputs=tokens)
class TiedEmbedding(nn.Module):
    """Words in and out by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH)) for _ in "ab"))
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x).sum(1)))


@odd(EQUAL)
class TiedLayers(nn.Module):
    """A layer used in both stages, and two layers, one in each, that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), nn.Linear(WIDE, WIDTH)
        self.same, self.again.weight = self.up, self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.down(torch.tanh(self.up(x))))
        return self.again(torch.tanh(self.same(h)))


@odd(EQUAL)
class UsedTwice(Body):
    """A layer used twice, its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = layer()

    def middle(self, h: Tensor) -> Tensor:
        return self.twice(torch.tanh(self.twice(h))) + self.twice.weight.sum(0)


@odd(EQUAL)
class UnusedParameter(Body):
    """A layer and a parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.idle = layer(), nn.Parameter(torch.ones(3))


@odd(EQUAL)
class ParameterListAndDict(Body):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(HIDDEN) for _ in range(2)])
        self.shifts = nn.ParameterDict({"one": torch.randn(HIDDEN), "two": torch.randn(1)})

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scales[0] * self.scales[1] + self.shifts["one"] - self.shifts["two"]


@odd(EITHER, "azy")
class LazyUninitialised(Body):
    """A lazy layer that has not seen an input."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return self.lazy(h)


@odd(EQUAL)
class LazyInitialised(Body):
    """A lazy layer after its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(HIDDEN)
        self.lazy(torch.zeros(1, HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return self.lazy(h)


@odd(EITHER, "ompile")
def compiled() -> nn.Module:
    """The whole module compiled."""
    return torch.compile(Body(), backend="eager")  # type: ignore[return-value]


@odd(EITHER, "ompile")
def compiled_in_place() -> nn.Module:
    """The whole module compiled by `module.compile()`."""
    model = Body()
    model.compile(backend="eager")
    return model


@odd(EITHER, "ompile")
def compiled_inside() -> nn.Module:
    """A compiled submodule."""
    return Wrapped(torch.compile(layer(), backend="eager"))


@odd(EITHER, "cript")
def scripted_inside() -> nn.Module:
    """A scripted submodule."""
    return Wrapped(torch.jit.script(layer()))


@odd(EITHER, "cript")
def scripted() -> nn.Module:
    """The whole module scripted."""
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)))


@odd(EITHER, "rac")
def traced_inside() -> nn.Module:
    """A traced submodule."""
    return Wrapped(torch.jit.trace(layer(), torch.zeros(2, HIDDEN)))


@odd(EITHER, "DataParallel", verify=True)
def wrapped_by_data_parallel() -> nn.Module:
    """A module inside nn.DataParallel, which without GPUs calls it as it is."""
    return nn.DataParallel(Body())


@odd(EITHER)
def on_meta() -> nn.Module:
    """A module without storage, initialised when it is split."""
    with torch.device("meta"):
        return Body()


@odd(EQUAL, inputs=sequences, targets=none, loss=lambda: lambda out: out[0].square().mean() + out[1].square().sum())
class AttentionWeights(nn.Module):
    """Attention whose weights are an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=True, average_attn_weights=False)


@odd(EQUAL, inputs=sequences, targets=none, loss=lambda: mean_square)
class AttentionWithoutWeights(nn.Module):
    """Attention that returns None for its weights, and has dropout at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def by_name(key: str) -> Any:
    return lambda: lambda output, y: F.cross_entropy(output[key] if isinstance(output, dict) else getattr(output, key), y)


@odd(EQUAL, loss=by_name("logits"))
class DictOutput(Body):
    """Outputs in a dict, None among them."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "past": None, "hidden": (x.sin(), None)}


class Answer(NamedTuple):
    logits: Tensor
    past: Tensor | None


@odd(EQUAL, loss=by_name("logits"))
class NamedTupleOutput(Body):
    """Outputs in a NamedTuple."""

    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x), None)


@dataclass
class Reply:
    logits: Tensor
    past: Tensor | None = None


@odd(EITHER, "Reply", loss=by_name("logits"))
class DataclassOutput(Body):
    """Outputs in a dataclass that torch.export does not know."""

    def forward(self, x: Tensor) -> Any:
        return Reply(super().forward(x))


@dataclass
class KnownReply:
    logits: Tensor
    past: Tensor | None = None


torch.export.register_dataclass(KnownReply)


@odd(EQUAL, loss=by_name("logits"))
class KnownDataclassOutput(Body):
    """Outputs in a dataclass that torch.export knows."""

    def forward(self, x: Tensor) -> Any:
        return KnownReply(super().forward(x))


@odd(EITHER, targets=none, loss=lambda: lambda output: torch.zeros(()))
class NoOutput(Body):
    """A forward that returns None."""

    def forward(self, x: Tensor) -> Any:
        super().forward(x)


@odd(EITHER, loss=lambda: lambda output, y: F.cross_entropy(output[0], y))
class InputAsOutput(Body):
    """The input unchanged is one of the outputs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


@odd(EITHER, targets=none, loss=lambda: mean_square)
def only_identity() -> nn.Module:
    """A model that returns its input."""
    return nn.Identity()


@odd(EQUAL, targets=none, loss=lambda: lambda output: output["loss"])
class LossInside(Body):
    """The loss is part of the model's output."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": logits.logsumexp(1).mean(), "logits": logits}


@odd(EQUAL, inputs=named_vectors)
class NamedInputs(Body):
    """Inputs by name, one of them optional."""

    def forward(self, *, left: Tensor, right: Tensor, scale: float = 2.0) -> Any:
        return super().forward(left - scale * right)


@odd(REFUSED, "label", targets=float_labels)
class FloatLabels(Body):
    """Class labels as floats: eager raises."""


@odd(REFUSED, "scalar", loss=lambda: lambda output, y: F.cross_entropy(output, y, reduction="none"))
class LossPerSample(Body):
    """A loss that is not a scalar: eager's backward raises."""


class Weighed(nn.Module):
    """A loss that learns how much its term weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.tensor([0.3]))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(output, y) * torch.exp(-self.log_weight) + self.log_weight).sum()


@odd(EITHER, "loss", loss=Weighed, verify=True)
class LossWithParameters(Body):
    """A loss with a parameter of its own, trained with the model's."""


@odd(EQUAL, loss=lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]), label_smoothing=0.1))
class WeighedClasses(Body):
    """A mean over weights that depend on the labels."""


@odd(EQUAL, loss=lambda: lambda output, y: F.cross_entropy(output, y, ignore_index=2))
class IgnoredLabels(Body):
    """A mean over the labels that count."""


@odd(EITHER, "loss", verify=True)
class NotANumber(Body):
    """A loss that is NaN from the first step on."""

    def middle(self, h: Tensor) -> Tensor:
        return (h * 0 - 1).log()


@odd(EITHER, "loss", loss=lambda: lambda output, y: F.cross_entropy(output, y) * 1e200 * 1e200)
class InfiniteLoss(Body):
    """A loss that is infinite."""


@odd(EITHER, inputs=images, microbatches=1)
class ChannelsLast(nn.Module):
    """Convolution and batch norm in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, HIDDEN, 3), nn.BatchNorm2d(HIDDEN), classifier()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x.contiguous(memory_format=torch.channels_last))).mean((2, 3)))
