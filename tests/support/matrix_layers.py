"""Cases of norms, products, look-ups, recurrent layers, softmax and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from matrix import Case, Column, Fn
from matrix_shapes import IMAGE, SEQUENCE, columns, make, whole
from matrix_windows import SIZES

BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def layer(
    row: str,
    name: str,
    op: Callable[[], nn.Module],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    family: str,
    more: tuple[tuple[int, ...], ...] = (),
    fields: dict[str, Any] | None = None,
    **by_dim: Column,
) -> Case:
    """A case around a module of its own."""
    return Case(
        row=row, name=name, op=op, shapes=(shape, *more), columns=columns(names, **by_dim), family=family, **(fields or {})
    )


def space(count: int) -> tuple[str, ...]:
    return ("batch", "filter", *(f"domain:{i}" for i in range(count)))


def norms() -> Iterator[Case]:
    for count, sizes in SIZES.items():
        shape, names = (4, 6, *sizes[-1]), space(count)
        kinds: list[tuple[str, str, Callable[[], nn.Module], bool]] = [
            ("batch norm", "batch norm", lambda k=count: BATCH_NORM[k](6), True),
            (
                "batch norm",
                "batch norm momentum 0.3, no affine",
                lambda k=count: BATCH_NORM[k](6, momentum=0.3, affine=False),
                True,
            ),
            (
                "batch norm",
                "batch norm without running stats",
                lambda k=count: BATCH_NORM[k](6, track_running_stats=False),
                True,
            ),
            ("batch norm (eval)", "batch norm eval", lambda k=count: BATCH_NORM[k](6), False),
            ("group norm", "group norm 3", lambda: nn.GroupNorm(3, 6), True),
            ("group norm", "group norm 1", lambda: nn.GroupNorm(1, 6, affine=False), True),
            ("group norm", "group norm 2", lambda: nn.GroupNorm(2, 6), True),
            ("instance norm", "instance norm", lambda k=count: INSTANCE_NORM[k](6), True),
            ("instance norm", "instance norm affine", lambda k=count: INSTANCE_NORM[k](6, affine=True), True),
            ("instance norm", "instance norm running", lambda k=count: INSTANCE_NORM[k](6, track_running_stats=True), True),
            (
                "instance norm (eval)",
                "instance norm running eval",
                lambda k=count: INSTANCE_NORM[k](6, track_running_stats=True),
                False,
            ),
            ("layer norm", "layer norm over channels and space", lambda s=shape: nn.LayerNorm(s[1:]), True),
        ]
        for row, name, op, train in kinds:
            whole_groups = {"d1": Column(dim=1, share=True)} if row == "group norm" else {}
            yield layer(row, f"{name} {count}-D", op, shape, names, "norm", fields={"train": train}, **whole_groups)
    t = (4, 7, 6)
    yield layer("batch norm", "batch norm of features", lambda: nn.BatchNorm1d(6), (7, 6), ("batch", "filter"), "norm")
    yield layer("layer norm", "layer norm", lambda: nn.LayerNorm(6), t, SEQUENCE, "norm")
    yield layer("layer norm", "layer norm no affine", lambda: nn.LayerNorm(6, elementwise_affine=False), t, SEQUENCE, "norm")
    yield layer("layer norm", "layer norm over two dims", lambda: nn.LayerNorm((7, 6)), t, SEQUENCE, "norm")
    yield layer("RMS norm", "RMS norm", lambda: nn.RMSNorm(6), t, SEQUENCE, "norm")
    yield layer("RMS norm", "RMS norm eps", lambda: nn.RMSNorm(6, eps=1e-3, elementwise_affine=False), t, SEQUENCE, "norm")
    yield make(
        "RMS norm",
        "RMS norm written out",
        lambda m, x: m.w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        t,
        SEQUENCE,
        "norm",
        {"w": torch.linspace(0.5, 1.5, 6)},
        d2=Column(dim=2, results=2),
    )


def products() -> Iterator[Case]:
    t = (4, 7, 6)

    def anchored(names: tuple[str, ...], dim: int = -1) -> dict[str, Column]:
        last = len(names) - 1 if dim == -1 else dim
        out = {name: Column(dim=d) for d, name in enumerate(names) if d != last}
        out["filter"] = Column(dim=last, split="filter", gather=True)
        out["channel"] = Column(dim=last, split="channel", results=2)
        return out

    def product(
        row: str, name: str, op: Callable[[], nn.Module], shape: tuple[int, ...], names: tuple[str, ...], **by: Column
    ) -> Case:
        return Case(row=row, name=name, op=op, shapes=(shape,), columns=anchored(names) | by, family="product")

    w, b = torch.randn(6, 5), torch.randn(5)
    yield product("linear", "linear", lambda: nn.Linear(6, 5), t, SEQUENCE)
    yield product("linear", "linear without bias", lambda: nn.Linear(6, 5, bias=False), t, SEQUENCE)
    yield product("linear", "linear of features", lambda: nn.Linear(6, 5), (7, 6), ("batch", "filter"))
    yield product("linear", "linear 4-D", lambda: nn.Linear(6, 5), (4, 3, 5, 6), ("batch", "domain:0", "domain:1", "filter"))
    yield product("addmm", "addmm", lambda: Fn(lambda m, x: torch.addmm(m.b, x, m.w), w=w, b=b), (7, 6), ("batch", "filter"))
    yield product(
        "addmm",
        "addmm beta alpha",
        lambda: Fn(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), w=w, b=torch.randn(7, 5)),
        (7, 6),
        ("batch", "filter"),
    )
    yield product("matmul", "matmul", lambda: Fn(lambda m, x: x @ m.w, w=w), t, SEQUENCE)
    yield product("matmul", "matmul by a transposed weight", lambda: Fn(lambda m, x: x @ m.w.T, w=w.T), t, SEQUENCE)
    yield product(
        "matmul",
        "matmul from the left",
        lambda: Fn(lambda m, x: m.w @ x.transpose(1, 2), w=w.T),
        t,
        SEQUENCE,
        filter=Column(dim=2, results=2),
        channel=Column(dim=2, results=2),
        **{"domain:0": Column(dim=1)},
    )
    yield product(
        "matmul",
        "matmul by a vector",
        lambda: Fn(lambda m, x: x @ m.w, w=w[:, 0]),
        t,
        SEQUENCE,
        filter=Column(dim=2, results=2),
    )
    yield product(
        "matmul",
        "matmul of a broadcast batch",
        lambda: Fn(lambda m, x: x @ m.w, w=torch.randn(1, 3, 6, 5)),
        (4, 3, 7, 6),
        ("batch", "domain:0", "domain:1", "filter"),
    )
    yield product("bmm", "bmm", lambda: Fn(lambda m, x: torch.bmm(x, m.w), w=torch.randn(4, 6, 5)), t, SEQUENCE)
    yield product(
        "bmm",
        "bmm with itself",
        lambda: Fn(lambda m, x: torch.bmm(x, x.transpose(1, 2))),
        t,
        SEQUENCE,
        filter=Column(dim=2, split="filter", gather=True, share=True),
        **{"domain:0": Column(dim=1, gather=True)},
    )
    for shape in ((4, 7, 5), (4, 1, 5), (1, 1, 1), (4, 7, 1)):
        name = f"baddbmm bias {'x'.join(map(str, shape))}"
        yield product(
            "baddbmm",
            name,
            lambda s=shape: Fn(
                lambda m, x: torch.baddbmm(m.b, x, m.w, beta=0.7, alpha=1.5), w=torch.randn(4, 6, 5), b=torch.randn(s)
            ),
            t,
            SEQUENCE,
        )
    for name, equation, shape in (
        ("ntd,df->ntf", "ntd,df->ntf", (6, 5)),
        ("ntd,ntf->ndf", "ntd,ntf->ndf", (4, 7, 5)),
        ("ntd,nsd->nts", "ntd,nsd->nts", (4, 5, 6)),
        ("ntd,dz", "ntd,dz", (6, 5)),
        ("...d,df->...f", "...d,df->...f", (6, 5)),
    ):
        by: dict[str, Column] = {}
        if equation == "ntd,ntf->ndf":
            by = {
                "domain:0": Column(dim=1, results=2),
                "filter": Column(dim=2),
                "channel": Column(dim=1, split="channel", results=2),
            }
        yield product(
            "einsum",
            f"einsum {name}",
            lambda e=equation, s=shape: Fn(lambda m, x: torch.einsum(e, x, m.w), w=torch.randn(s)),
            t,
            SEQUENCE,
            **by,
        )
    yield product(
        "linear",
        "two linears, gelu between",
        lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)),
        t,
        SEQUENCE,
        filter=Column(dim=2, split="filter", gather=True, results=3),
        channel=Column(dim=2, split="channel", results=4),
    )


def lookups() -> Iterator[Case]:
    names = ("batch", "domain:0")
    for name, op in (
        ("embedding", lambda: nn.Embedding(11, 6)),
        ("embedding padding_idx 2", lambda: nn.Embedding(11, 6, padding_idx=2)),
        ("embedding padding_idx 0", lambda: nn.Embedding(11, 6, padding_idx=0)),
    ):
        by = {n: Column(dim=d) for d, n in enumerate(names)}
        by["filter"] = Column(dim=9, split="filter")
        by["channel"] = Column(dim=9, split="channel", results=2)
        yield Case(row="embedding", name=name, op=op, shapes=((4, 7),), columns=by, family="lookup", high=11)


def recurrent() -> Iterator[Case]:
    t = (4, 5, 6)
    kinds: list[tuple[str, Callable[[], nn.Module]]] = [
        ("LSTM", lambda: nn.LSTM(6, 3, batch_first=True)),
        ("LSTM bidirectional", lambda: nn.LSTM(6, 3, batch_first=True, bidirectional=True)),
        ("LSTM two layers", lambda: nn.LSTM(6, 3, num_layers=2, batch_first=True)),
        (
            "LSTM no bias, two layers, both ways",
            lambda: nn.LSTM(6, 3, num_layers=2, bias=False, batch_first=True, bidirectional=True),
        ),
        ("GRU", lambda: nn.GRU(6, 3, batch_first=True)),
        ("GRU bidirectional", lambda: nn.GRU(6, 3, num_layers=2, batch_first=True, bidirectional=True)),
        ("RNN", lambda: nn.RNN(6, 3, batch_first=True)),
    ]
    for name, op in kinds:
        yield Case(row="LSTM / GRU / RNN", name=name, op=op, shapes=(t,), columns={"batch": Column(dim=0)}, family="recurrent")
    yield Case(
        row="LSTM / GRU / RNN",
        name="LSTM time first",
        op=lambda: nn.LSTM(6, 3),
        shapes=((5, 4, 6),),
        columns={"batch": Column(dim=1)},
        family="recurrent",
    )
    why = "a hidden or time split would cost a collective per step"
    yield Case(
        row="LSTM / GRU / RNN",
        name="LSTM behind a divided layer",
        op=lambda: nn.LSTM(6, 3, batch_first=True),
        shapes=(t,),
        columns={"domain:0": whole(1, why), "filter": whole(2, why)},
        family="recurrent",
    )


def softmaxes() -> Iterator[Case]:
    x = (4, 6, 5, 7)
    for dim in range(4):
        yield make("softmax", f"softmax dim {dim}", lambda m, x, d=dim: x.softmax(d), x, IMAGE, "softmax")
        yield make("log softmax", f"log softmax dim {dim}", lambda m, x, d=dim: x.log_softmax(d), x, IMAGE, "softmax")
    yield make("softmax", "softmax dim -1 in float32", lambda m, x: x.softmax(-1, dtype=torch.float64), x, IMAGE, "softmax")
    yield make("softmax", "softmin", lambda m, x: F.softmin(x, 1), x, IMAGE, "softmax")


def attentions() -> Iterator[Case]:
    q = (2, 6, 7, 4)

    def case(
        name: str, f: Callable[..., Any], *, more: Any = (q, q), row: str = "attention", tensors: Any = None, **by: Column
    ) -> Case:
        plain = {"batch": Column(dim=0), "filter": Column(dim=1), "domain:0": Column(dim=2, extra=2 * 2 * 6 * 7 * 4)}
        return Case(
            row=row, name=name, op=lambda: Fn(f, **(tensors or {})), shapes=(q, *more), columns=plain | by, family="attention"
        )

    sdpa = F.scaled_dot_product_attention
    yield case("attention", lambda m, q, k, v: sdpa(q, k, v))
    yield case("attention causal", lambda m, q, k, v: sdpa(q, k, v, is_causal=True))
    yield case("attention scale", lambda m, q, k, v: sdpa(q, k, v, scale=0.3))
    for shape in ((7, 7), (2, 1, 7, 7), (1, 6, 7, 7), (2, 6, 7, 7), (2, 1, 1, 7)):
        text = "x".join(map(str, shape))
        mask = torch.ones(shape, dtype=torch.bool).tril() | (
            torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
        )
        mask[..., 0] = True
        yield case(
            f"attention bool mask {text}",
            lambda m, q, k, v: sdpa(q, k, v, m.mask),
            tensors={"mask": mask},
            row="attention with mask",
        )
        bias = torch.linspace(-1, 1, int(torch.tensor(shape).prod())).view(shape)
        yield case(
            f"attention bias {text}",
            lambda m, q, k, v: sdpa(q, k, v, m.mask),
            tensors={"mask": bias},
            row="attention with mask",
        )
    kv = (2, 3, 7, 4)
    yield case(
        "attention grouped",
        lambda m, q, k, v: sdpa(q, k, v, enable_gqa=True),
        more=(kv, kv),
        row="grouped attention",
        filter=Column(dim=1, share=True),
    )
    yield case(
        "attention grouped causal",
        lambda m, q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        more=(kv, kv),
        row="grouped attention",
        filter=Column(dim=1, share=True),
    )
    few = (2, 2, 7, 4)
    yield case(
        "attention fewer key heads than ranks",
        lambda m, q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        more=(few, few),
        row="grouped attention",
        filter=Column(dim=1, split="filter", extra=4 * 2 * 2 * 7 * 4),
    )
    one = (2, 1, 7, 4)
    yield case(
        "attention one key head",
        lambda m, q, k, v: sdpa(q, k, v, enable_gqa=True),
        more=(one, one),
        row="grouped attention",
        filter=Column(dim=1, split="filter", extra=4 * 2 * 7 * 4),
    )
    thin = (2, 2, 7, 4)
    yield Case(
        row="attention",
        name="attention fewer heads than ranks",
        op=lambda: Fn(lambda m, q, k, v: sdpa(q, k, v, is_causal=True)),
        shapes=(thin, thin, thin),
        columns={"filter": Column(dim=1)},
        ranks=(3, 4),
        family="attention",
    )
    long = (2, 6, 9, 4)
    yield case(
        "attention over longer keys",
        lambda m, q, k, v: sdpa(q, k, v),
        more=(long, long),
        **{"domain:0": Column(dim=2, extra=2 * 2 * 6 * 9 * 4)},
    )
    yield case(
        "attention causal over longer keys",
        lambda m, q, k, v: sdpa(q, k, v, is_causal=True),
        more=(long, long),
        **{"domain:0": Column(dim=2, extra=2 * 2 * 6 * 9 * 4)},
    )
    wide = (2, 6, 7, 5)
    yield case(
        "attention other value width",
        lambda m, q, k, v: sdpa(q, k, v),
        more=(q, wide),
        **{"domain:0": Column(dim=2, extra=2 * 6 * 7 * 9)},
    )
    yield case(
        "attention written out", lambda m, q, k, v: (q @ k.transpose(2, 3) / 2).softmax(-1) @ v, row="attention written out"
    )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(4, 7, 3, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 7, 12))

    yield Case(
        row="attention block",
        name="fused qkv, three heads",
        op=Block,
        shapes=((4, 7, 12),),
        family="attention",
        columns={
            "batch": Column(dim=0),
            "domain:0": Column(dim=1, extra=2 * 4 * 7 * 12),
            "filter": Column(dim=2, split="filter", gather=True, results=2),
        },
    )


def thin() -> Iterator[Case]:
    """Fewer samples, positions or features than ranks."""
    ids = torch.tensor([1])
    ops: list[tuple[str, Callable[[], nn.Module], Any]] = [
        ("linear", lambda: nn.Linear(4, 5), (1, 2, 4)),
        ("layer norm", lambda: nn.LayerNorm(4), (1, 2, 4)),
        ("RMS norm", lambda: nn.RMSNorm(4), (1, 2, 4)),
        ("softmax", lambda: nn.Softmax(1), (1, 2, 4)),
        ("mean", lambda: Fn(lambda m, x: x.mean((0, 1))), (1, 2, 4)),
        ("var", lambda: Fn(lambda m, x: x.var(1)), (1, 2, 4)),
        ("cat", lambda: Fn(lambda m, x: torch.cat([x, x], 1)), (1, 2, 4)),
        ("view", lambda: Fn(lambda m, x: x.reshape(-1, 4).exp().view(1, 2, 4)), (1, 2, 4)),
        ("flip", lambda: Fn(lambda m, x: x.flip(1)), (1, 2, 4)),
        ("MSE", lambda: Fn(lambda m, x: F.mse_loss(x, torch.zeros_like(x))), (1, 2, 4)),
        ("cross-entropy", lambda: Fn(lambda m, x: F.cross_entropy(x[:, 0], m.ids), ids=ids), (1, 2, 4)),
        ("LSTM", lambda: nn.LSTM(4, 3, batch_first=True), (1, 2, 4)),
        (
            "attention",
            lambda: Fn(lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)),
            (1, 2, 4),
        ),
    ]
    for name, op, shape in ops:
        by = {"batch": Column(dim=0, extra=100), "domain:0": Column(dim=1, extra=100), "filter": Column(dim=2, extra=100)}
        why = "a time or hidden split would cost a collective per step"
        if name == "LSTM":
            by |= {"domain:0": whole(1, why), "filter": whole(2, why)}
        if name == "view":
            by["batch"] = whole(0, "a batch of one vanishes in the merged dim")
        if name == "attention":
            by["filter"] = whole(2, "the width of a head is not divided")
        yield Case(row="empty shards", name=f"thin {name}", op=op, shapes=(shape,), columns=by, ranks=(2, 3, 4), family="thin")


CASES = (*norms(), *products(), *lookups(), *recurrent(), *softmaxes(), *attentions(), *thin())
