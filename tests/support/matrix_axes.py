"""Cases on two mesh axes, 2 x 2 ranks: two dims of a tensor divided, or one dim twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from matrix import Case, Column, Fn

IMAGE = {"batch": 0, "filter": 1, "domain:0": 2, "domain:1": 3}
SEQUENCE = {"batch": 0, "domain:0": 1, "filter": 2}
IMAGE_PAIRS = (
    ("batch", "filter"),
    ("batch", "domain:0"),
    ("filter", "domain:1"),
    ("domain:0", "domain:1"),
    ("domain:1", "domain:1"),
)
SEQUENCE_PAIRS = (("batch", "domain:0"), ("batch", "filter"), ("domain:0", "filter"), ("domain:0", "domain:0"))
PAIRS = tuple(dict.fromkeys(f"{a} x {b}" for a, b in (*IMAGE_PAIRS, *SEQUENCE_PAIRS)))


def images() -> Iterator[Case]:
    ids = torch.arange(4 * 5 * 7).view(4, 5, 7) % 6
    ops: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
        ("conv 3 pad 1", lambda: nn.Conv2d(6, 5, 3, padding=1), {"halo": 2}),
        ("conv 3 stride 2", lambda: nn.Conv2d(6, 5, 3, stride=2, padding=1), {"halo": 4}),
        ("conv 4 stride 2", lambda: nn.Conv2d(6, 5, 4, stride=2, padding=1), {"halo": 5}),
        ("depthwise conv", lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), {"halo": 2}),
        ("transposed conv k3 s2", lambda: nn.ConvTranspose2d(6, 5, 3, stride=2, padding=1), {"halo": 3}),
        ("max pool 3 stride 2 pad 1", lambda: nn.MaxPool2d(3, 2, 1), {"halo": 4}),
        ("avg pool 3 stride 2 pad 1", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), {"halo": 4}),
        ("global average pool", lambda: nn.AdaptiveAvgPool2d(1), {"results": 2}),
        ("global max pool", lambda: nn.AdaptiveMaxPool2d(1), {"results": 2}),
        ("adaptive max pool to 2 x 3", lambda: nn.AdaptiveMaxPool2d((2, 3)), {"halo": 4}),
        ("bilinear upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), {"halo": 3}),
        ("circular padding", lambda: Fn(lambda m, x: F.pad(x, (1, 2, 2, 1), mode="circular")), {"halo": 6}),
        ("flip", lambda: Fn(lambda m, x: x.flip(2, 3)), {"share": True}),
        ("batch norm", lambda: nn.BatchNorm2d(6), {}),
        ("group norm", lambda: nn.GroupNorm(3, 6), {"share": True}),
        ("instance norm running", lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), {}),
        ("softmax", lambda: nn.Softmax(1), {}),
        ("variance", lambda: Fn(lambda m, x: x.var((1, 2, 3))), {}),
        ("amax", lambda: Fn(lambda m, x: x.amax((2, 3))), {}),
        ("mean", lambda: Fn(lambda m, x: x.mean((0, 2))), {"results": 4}),
        ("flatten", lambda: Fn(lambda m, x: x.flatten(1).tanh()), {}),
        ("cat", lambda: Fn(lambda m, x: torch.cat([x, x * x], 3)), {}),
        ("cross-entropy", lambda: Fn(lambda m, x: F.cross_entropy(x, m.ids, ignore_index=2), ids=ids), {"results": 4}),
        ("MSE", lambda: Fn(lambda m, x: F.mse_loss(x, torch.zeros_like(x))), {"results": 4}),
    ]
    for name, op, bound in ops:
        anchor = "conv" in name
        columns = {}
        for a, b in IMAGE_PAIRS:
            fields = dict(bound)
            if anchor and "filter" in (a, b):
                fields["gather"] = True
                fields |= {"split": "filter"} if a == "filter" else {"second_split": "filter"}
            columns[f"{a} x {b}"] = Column(dim=IMAGE[a], second=IMAGE[b], **fields)
        yield Case(row=name, name=f"2 x 2 {name}", op=op, shapes=((4, 6, 5, 7),), columns=columns, ranks=(4,), family="axes")


def sequences() -> Iterator[Case]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(4, 7, 3, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(4, 7, 12))

    ops: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
        ("linear", lambda: nn.Linear(12, 5), {}),
        ("layer norm", lambda: nn.LayerNorm(12), {}),
        ("layer norm over two dims", lambda: nn.LayerNorm((7, 12)), {}),
        ("RMS norm", lambda: nn.RMSNorm(12), {}),
        ("view of merged dims", lambda: Fn(lambda m, x: x.reshape(-1, 12).tanh().view(4, 7, 12)), {}),
        ("attention block", Block, {"extra": 10 * 4 * 7 * 12}),
    ]
    for name, op, bound in ops:
        columns = {}
        for a, b in SEQUENCE_PAIRS:
            fields = dict(bound)
            if name in ("linear", "attention block") and b == "filter":
                fields |= {"gather": True, "second_split": "filter"}
            columns[f"{a} x {b}"] = Column(dim=SEQUENCE[a], second=SEQUENCE[b], **fields)
        yield Case(row=name, name=f"2 x 2 {name}", op=op, shapes=((4, 7, 12),), columns=columns, ranks=(4,), family="axes")


CASES = (*images(), *sequences())
