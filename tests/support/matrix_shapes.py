"""Cases of ops that move elements, treat them one by one, or reduce them, on divided and on other dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from matrix import Case, Column, Fn

IMAGE = ("batch", "filter", "domain:0", "domain:1")
SEQUENCE = ("batch", "domain:0", "filter")


def columns(names: tuple[str, ...], **by_name: Column) -> dict[str, Column]:
    """One column per dim; `d2=Column(...)` replaces that of dim 2."""
    out = {name: Column(dim=d) for d, name in enumerate(names)}
    for key, column in by_name.items():
        out[names[int(key[1:])]] = column
    return out


def make(
    row: str,
    name: str,
    f: Callable[..., Any],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    family: str,
    tensors: dict[str, torch.Tensor] | None = None,
    more: tuple[tuple[int, ...], ...] = (),
    **by_dim: Column,
) -> Case:
    return Case(
        row=row,
        name=name,
        op=lambda: Fn(f, **(tensors or {})),
        shapes=(shape, *more),
        columns=columns(names, **by_dim),
        family=family,
    )


def moved(dim: int, **fields: Any) -> Column:
    """Rows change place: a rank may receive its whole share."""
    return Column(dim=dim, share=True, **fields)


def whole(dim: int, why: str) -> Column:
    return Column(dim=dim, expect="whole", why=why)


def shapes() -> Iterator[Case]:
    x, t = (4, 6, 8, 9), (4, 10, 6)

    def image(row: str, name: str, f: Callable[..., Any], **by_dim: Column) -> Case:
        return make(row, name, f, x, IMAGE, "shape", **by_dim)

    def sequence(row: str, name: str, f: Callable[..., Any], **by_dim: Column) -> Case:
        return make(row, name, f, t, SEQUENCE, "shape", **by_dim)

    for dim in range(4):
        yield image("cat", f"cat on dim {dim}", lambda m, x, d=dim: torch.cat([x, 2 * x, x * x], d))
    yield image("cat of unequal pieces", "cat of 3 and 8 rows", lambda m, x: torch.cat([x[:, :, :3], x], 2), d2=moved(2))
    yield image("split / chunk", "chunk in 2 on dim 1", lambda m, x: x.chunk(2, 1), d1=moved(1))
    yield image("split / chunk", "split 3, 3, 2 on dim 2", lambda m, x: x.split([3, 3, 2], 2), d2=moved(2))
    yield image("split / chunk", "chunk in 2 on dim 3 of 9", lambda m, x: x.chunk(2, 3), d3=moved(3))
    yield image("slice", "slice 2:7 on dim 2", lambda m, x: x[:, :, 2:7], d2=moved(2))
    yield image("slice", "slice 1:-1 on both", lambda m, x: x[:, :, 1:-1, 1:-1], d2=moved(2), d3=moved(3))
    yield image("slice", "slice one channel", lambda m, x: x[:, 2:3], d1=moved(1))
    yield image("slice", "slice all", lambda m, x: x[:, :, :])
    yield image("slice", "narrow", lambda m, x: x.narrow(3, 4, 5), d3=moved(3))
    yield image("slice with a step", "::2 on dim 2", lambda m, x: x[:, :, ::2], d2=Column(dim=2, halo=2))
    yield image("slice with a step", "1::3 on dim 3", lambda m, x: x[:, :, :, 1::3], d3=Column(dim=3, halo=3))
    yield image("slice with a step", "::2 on dim 0", lambda m, x: x[::2], d0=Column(dim=0, halo=2))
    yield image(
        "slice with a step",
        "::2 on both, pieces added",
        lambda m, x: x[:, :, ::2, :8:2] + x[:, :, 1::2, 1::2],
        d2=Column(dim=2, halo=4),
        d3=Column(dim=3, halo=6),
    )
    for dim in range(4):
        fields = {f"d{dim}": Column(dim=dim, results=2)}
        yield image("select", f"select on dim {dim}", lambda m, x, d=dim: x.select(d, 2), **fields)
        yield image("flip", f"flip dim {dim}", lambda m, x, d=dim: x.flip(d), **{f"d{dim}": moved(dim)})
        yield image("roll", f"roll dim {dim}", lambda m, x, d=dim: x.roll(2, d), **{f"d{dim}": Column(dim=dim, halo=4)})
    yield image(
        "select", "select -1 twice", lambda m, x: x[:, -1, :, -1], d1=Column(dim=1, results=2), d3=Column(dim=3, results=2)
    )
    yield image("flip", "flip two dims", lambda m, x: x.flip(2, 3), d2=moved(2), d3=moved(3))
    yield image("roll", "roll two dims", lambda m, x: x.roll((3, -2), (2, 3)), d2=moved(2), d3=moved(3))
    yield image(
        "roll",
        "roll all as one",
        lambda m, x: x.roll(5),
        **{f"d{d}": whole(d, "one long roll crosses all dims") for d in range(4)},
    )
    yield image("permute / transpose", "permute", lambda m, x: x.permute(0, 2, 3, 1))
    yield image("permute / transpose", "transpose", lambda m, x: x.transpose(1, 3).contiguous())
    yield image("permute / transpose", "movedim", lambda m, x: x.movedim(1, 2))
    yield image("permute / transpose", "movedim of several", lambda m, x: x.movedim((1, 2), (3, 1)))
    yield sequence("permute / transpose", "mT", lambda m, x: x.mT)
    yield image("flatten", "flatten all but batch", lambda m, x: x.flatten(1))
    yield image("flatten", "flatten space", lambda m, x: x.flatten(2))
    yield image("flatten", "tokens of an image", lambda m, x: x.flatten(2).transpose(1, 2))
    yield image("flatten", "flatten everything", lambda m, x: x.flatten())
    yield sequence("view of merged dims", "view(-1, D) and back", lambda m, x: torch.tanh(x.reshape(-1, 6)).view(4, 10, 6))
    yield sequence("view of merged dims", "heads", lambda m, x: x.view(4, 10, 3, 2).transpose(1, 2), d2=moved(2))
    yield sequence(
        "view of merged dims",
        "heads and back",
        lambda m, x: torch.exp(x.view(4, 10, 2, 3).transpose(1, 2)).transpose(1, 2).reshape(4, 10, 6),
        d2=moved(2),
    )
    yield image(
        "view of merged dims",
        "channel shuffle",
        lambda m, x: x.view(4, 2, 3, 8, 9).transpose(1, 2).reshape(4, 6, 8, 9),
        d1=moved(1),
    )
    yield image(
        "view of merged dims",
        "patches",
        lambda m, x: x[..., :8].reshape(4, 6, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).flatten(3),
        d2=moved(2),
        d3=moved(3),
    )
    yield image(
        "view of merged dims",
        "windows",
        lambda m, x: x.reshape(4, 6, 2, 4, 3, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 12, 6),
        d2=moved(2),
        d3=moved(3),
    )
    yield image(
        "view of merged dims",
        "no common factor",
        lambda m, x: x.reshape(4, 6, 12, 6),
        d2=moved(2),
        d3=whole(3, "an inner factor of 9 in 8 x 9 is none of 12 x 6"),
    )
    yield image("unflatten / squeeze", "unflatten", lambda m, x: x.unflatten(2, (2, 4)), d2=moved(2))
    yield image("unflatten / squeeze", "unsqueeze and squeeze", lambda m, x: x.unsqueeze(2).exp().squeeze(2))
    yield sequence("expand / repeat", "expand", lambda m, x: x.unsqueeze(1).expand(4, 3, 10, 6))
    yield sequence(
        "expand / repeat", "expand from one", lambda m, x: x[:, :1].expand(4, 5, 6), d1=whole(1, "one row lies on one rank")
    )
    yield sequence("expand / repeat", "repeat", lambda m, x: x.repeat(1, 2, 3))
    yield sequence("expand / repeat", "repeat with a new dim", lambda m, x: x.repeat(2, 1, 1, 1))
    yield sequence("expand / repeat", "repeat_interleave", lambda m, x: x.repeat_interleave(2, 1))
    yield sequence(
        "expand / repeat",
        "repeat none",
        lambda m, x: x.repeat(1, 0, 1).sum() + x,
        **{f"d{d}": whole(d, "there is nothing to divide") for d in range(3)},
    )
    for dim in range(4):
        yield sequence("stack", f"stack at {dim}", lambda m, x, d=dim: torch.stack([x, -x], d))
    for dim in range(3):
        yield sequence(
            "unbind",
            f"unbind dim {dim}",
            lambda m, x, d=dim: torch.stack(x.unbind(d)[1:3]).sum(0),
            **{f"d{dim}": whole(dim, "each row becomes a tensor of its own")},
        )
    yield image("pixel shuffle", "pixel unshuffle", lambda m, x: F.pixel_unshuffle(x[..., :8], 2), d3=moved(3), d2=moved(2))
    yield make("pixel shuffle", "pixel shuffle", lambda m, x: F.pixel_shuffle(x, 2), (4, 12, 5, 6), IMAGE, "shape", d1=moved(1))

    yield make(
        "gather",
        "gather along channels",
        lambda m, x: x.gather(1, m.ids),
        x,
        IMAGE,
        "shape",
        {"ids": torch.arange(4 * 6 * 72).view(4, 6, 8, 9) % 6},
        d1=whole(1, "rows are picked by data"),
    )
    yield make(
        "gather",
        "index_select",
        lambda m, x: x.index_select(2, m.ids),
        x,
        IMAGE,
        "shape",
        {"ids": torch.tensor([7, 0, 3, 3])},
        d2=whole(2, "rows are picked by data"),
    )
    for name, f in (
        ("cumsum", lambda m, x: x.cumsum(1)),
        ("sort", lambda m, x: x.sort(1)[0]),
        ("topk", lambda m, x: x.topk(3, 1)[0]),
    ):
        yield sequence("along one dim", name, f, d1=whole(1, "each row needs all before it"))
    yield sequence(
        "tril / triu",
        "tril",
        lambda m, x: x.tril(),
        d1=whole(1, "no rule for a divided matrix"),
        d2=whole(2, "no rule for a divided matrix"),
    )


def pointwise() -> Iterator[Case]:
    x = (4, 6, 5, 7)
    functions: dict[str, Callable[..., Any]] = {
        "relu": lambda m, x: F.relu(x),
        "gelu": lambda m, x: F.gelu(x),
        "gelu tanh": lambda m, x: F.gelu(x, approximate="tanh"),
        "silu": lambda m, x: F.silu(x),
        "tanh": lambda m, x: torch.tanh(x),
        "sigmoid": lambda m, x: torch.sigmoid(x),
        "leaky relu": lambda m, x: F.leaky_relu(x, 0.2),
        "elu": lambda m, x: F.elu(x),
        "selu": lambda m, x: F.selu(x),
        "celu": lambda m, x: F.celu(x),
        "relu6": lambda m, x: F.relu6(x),
        "hardtanh": lambda m, x: F.hardtanh(x),
        "hardswish": lambda m, x: F.hardswish(x),
        "hardsigmoid": lambda m, x: F.hardsigmoid(x),
        "mish": lambda m, x: F.mish(x),
        "softplus": lambda m, x: F.softplus(x),
        "softsign": lambda m, x: F.softsign(x),
        "logsigmoid": lambda m, x: F.logsigmoid(x),
        "threshold": lambda m, x: F.threshold(x, 0.1, -1.0),
        "clamp": lambda m, x: x.clamp(-0.5, 0.7),
        "pow": lambda m, x: x.pow(3),
        "exp log sqrt": lambda m, x: (x.exp() + 1).log().sqrt(),
        "abs sign": lambda m, x: x.abs() * x.sign(),
        "where": lambda m, x: torch.where(x > 0, x, 2 * x),
        "masked fill": lambda m, x: x.masked_fill(x < 0, 0.5),
        "in place": lambda m, x: F.relu((x * x).add_(x), inplace=True),
        "to float32 and back": lambda m, x: (x.float() * 0 + 1).double() * x,
        "clone detach": lambda m, x: x.clone() + x.detach(),
        "numbers": lambda m, x: (1 - x) / 3 + 2 * x - 5,
        "maximum": lambda m, x: torch.maximum(x, -0.5 * x),
        "lerp": lambda m, x: torch.lerp(x, x * x, 0.3),
        "addcmul": lambda m, x: torch.addcmul(x, x, x, value=0.5),
        "glu": lambda m, x: F.glu(x, 1),
        "erf": lambda m, x: torch.erf(x),
        "zeros_like": lambda m, x: x + torch.zeros_like(x) + torch.ones_like(x),
        "full like": lambda m, x: x * torch.full_like(x, 3.0),
    }
    for name, f in functions.items():
        extra = {"d1": moved(1)} if name == "glu" else {}
        yield make("pointwise family", name, f, x, IMAGE, "pointwise", **extra)
    yield make("prelu", "prelu one slope", lambda m, x: F.prelu(x, m.a), x, IMAGE, "pointwise", {"a": torch.tensor([0.3])})
    yield make(
        "prelu", "prelu per channel", lambda m, x: F.prelu(x, m.a), x, IMAGE, "pointwise", {"a": torch.linspace(0.1, 0.6, 6)}
    )
    for shape in ((1, 6, 1, 1), (6, 5, 7), (7,), (1,), (4, 1, 5, 1)):
        weight = torch.linspace(0.5, 1.5, int(torch.tensor(shape).prod())).view(shape)
        text = "x".join(map(str, shape))
        yield make("broadcasting", f"mul by {text}", lambda m, x: x * m.w, x, IMAGE, "pointwise", {"w": weight})
        yield make("broadcasting", f"div and add by {text}", lambda m, x: x / m.w + m.w, x, IMAGE, "pointwise", {"w": weight})
    yield make(
        "broadcasting",
        "outer sum",
        lambda m, x: x.unsqueeze(1) + x.unsqueeze(2),
        (4, 5, 3),
        SEQUENCE,
        "pointwise",
        d1=Column(dim=1, gather=True),
    )
    for name, f in (
        ("dropout", lambda m, x: F.dropout(x, 0.4)),
        ("dropout of channels", lambda m, x: F.dropout2d(x, 0.4)),
        ("dropout twice", lambda m, x: F.dropout(F.dropout(x, 0.3).exp(), 0.3)),
        ("rand_like", lambda m, x: x * torch.rand_like(x)),
    ):
        yield Case(
            row="dropout", name=name, op=lambda f=f: Fn(f), shapes=(x,), columns=columns(IMAGE), family="pointwise", random=True
        )


def reductions() -> Iterator[Case]:
    x = (4, 6, 5, 7)

    def summed(*dims: int) -> dict[str, Column]:
        return {f"d{d}": Column(dim=d, results=2) for d in dims}

    kinds: list[tuple[str, str, Callable[..., Any], tuple[int, ...]]] = [
        ("sum", "sum of all", lambda m, x: x.sum(), (0, 1, 2, 3)),
        ("sum", "sum over space", lambda m, x: x.sum((2, 3)), (2, 3)),
        ("sum", "sum keepdim", lambda m, x: x.sum(1, keepdim=True), (1,)),
        ("mean", "mean of all", lambda m, x: x.mean(), (0, 1, 2, 3)),
        ("mean", "mean over batch", lambda m, x: x.mean(0), (0,)),
        ("mean", "mean over space keepdim", lambda m, x: x.mean((-2, -1), keepdim=True), (2, 3)),
        ("amax / max", "amax", lambda m, x: x.amax((2, 3)), (2, 3)),
        ("amax / max", "amin keepdim", lambda m, x: x.amin(1, keepdim=True), (1,)),
        ("amax / max", "max over a dim", lambda m, x: x.max(2)[0], (2,)),
        ("amax / max", "max of all", lambda m, x: x.max(), (0, 1, 2, 3)),
        ("var / std / norm", "var over space", lambda m, x: x.var((2, 3)), (2, 3)),
        ("var / std / norm", "var biased keepdim", lambda m, x: x.var(1, unbiased=False, keepdim=True), (1,)),
        ("var / std / norm", "var of all", lambda m, x: x.var(), (0, 1, 2, 3)),
        ("var / std / norm", "std", lambda m, x: x.std(-1), (3,)),
        ("var / std / norm", "var_mean", lambda m, x: torch.var_mean(x, (0, 2, 3), correction=0), (0, 2, 3)),
        ("var / std / norm", "vector norm", lambda m, x: torch.linalg.vector_norm(x, dim=(2, 3)), (2, 3)),
        ("var / std / norm", "norm of all", lambda m, x: x.norm(), (0, 1, 2, 3)),
        ("var / std / norm", "norm 1 keepdim", lambda m, x: x.norm(p=1, dim=1, keepdim=True), (1,)),
        ("var / std / norm", "weight norm by hand", lambda m, x: F.normalize(x, dim=1), (1,)),
        ("logsumexp", "logsumexp", lambda m, x: x.logsumexp(1), (1,)),
        ("mean", "global response", lambda m, x: x / (x.pow(2).mean((2, 3), keepdim=True) + 1).sqrt(), (2, 3)),
    ]
    for row, name, f, dims in kinds:
        yield make(row, name, f, x, IMAGE, "reduction", **summed(*dims))
    yield make("argmax", "argmax", lambda m, x: (x.argmax(1), x * 2), x, IMAGE, "reduction")
    yield make(
        "argmax",
        "argmin of all",
        lambda m, x: (x.argmin(), x * 2),
        x,
        IMAGE,
        "reduction",
        **{f"d{d}": whole(d, "the place counts in the flat tensor") for d in range(4)},
    )
    yield make("amax / max", "max with its place", lambda m, x: x.max(3, keepdim=True), x, IMAGE, "reduction")
    yield make("prod", "prod", lambda m, x: x.prod(2), x, IMAGE, "reduction", d2=whole(2, "products do not add up"))


CASES = (*shapes(), *pointwise(), *reductions())
