"""Cases of ops that look through windows: convolutions, pooling, interpolation, padding; one to three dims, uneven sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from matrix import Case, Column, Fn

SIZES: dict[int, tuple[tuple[int, ...], ...]] = {1: ((16,), (15,)), 2: ((8, 9),), 3: ((6, 7, 8),)}
"""Even and odd sizes; of two and three ranks at least one has uneven shards in each."""

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE_AVG = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
ADAPTIVE_MAX = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}


def domains(count: int, **fields: Any) -> dict[str, Column]:
    return {f"domain:{i}": Column(dim=2 + i, **fields) for i in range(count)}


def spatial(count: int, halo: int, *, anchor: bool = False, **fields: Any) -> dict[str, Column]:
    """Columns of an op on ``[N, C, d0, d1...]``."""
    columns = {"batch": Column(dim=0), "filter": Column(dim=1)}
    if anchor:  # behind another layer divided alike
        columns["filter"] = Column(dim=1, split="filter", gather=True)
        columns["channel"] = Column(dim=1, split="channel", results=2)
    return columns | domains(count, halo=halo, **fields)


def case(
    row: str, name: str, op: Callable[[], nn.Module], shape: tuple[int, ...], columns: dict[str, Column], **more: Any
) -> Case:
    return Case(row=row, name=f"{name} on {'x'.join(map(str, shape))}", op=op, shapes=(shape,), columns=columns, **more)


def reach(kernel: int, stride: int = 1, dilation: int = 1) -> int:
    """Rows beyond its share that a rank may need: the window's reach, and a stride where shards and strides do not meet."""
    return dilation * (kernel - 1) + (stride if stride > 1 else 0)


def convolutions() -> Iterator[Case]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("conv 3 pad 1", {"kernel_size": 3, "padding": 1}),
        ("conv 3 stride 2", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("conv 3 pad 0", {"kernel_size": 3}),
        ("conv 3 dilation 2", {"kernel_size": 3, "dilation": 2, "padding": 2}),
        ("conv 4 stride 2 (even kernel)", {"kernel_size": 4, "stride": 2, "padding": 1}),
        ("conv 2 pad 0 (even kernel)", {"kernel_size": 2, "bias": False}),
        ("conv 1", {"kernel_size": 1}),
        ("conv 1 stride 2", {"kernel_size": 1, "stride": 2}),
        ("conv 5 pad 2, halo wider than a shard", {"kernel_size": 5, "padding": 2}),
        ("conv 3 padding same", {"kernel_size": 3, "padding": "same"}),
        ("conv 4 padding same (even kernel)", {"kernel_size": 4, "padding": "same", "dilation": 1}),
        ("conv 3 padding valid", {"kernel_size": 3, "padding": "valid"}),
        ("conv 3 reflect padding", {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
        ("conv 3 replicate padding", {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"}),
        ("conv 3 circular padding", {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
        ("conv 3 groups 2", {"kernel_size": 3, "padding": 1, "groups": 2}),
        ("conv 3 depthwise", {"kernel_size": 3, "padding": 1, "groups": 6}),
        ("conv 3 depthwise stride 2, two filters each", {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 6}),
    ]
    for row, args in kinds:
        for count, sizes in SIZES.items():
            for size in sizes:
                groups, channels = args.get("groups", 1), 6 if "groups" in args else 4
                halo = reach(args["kernel_size"], args.get("stride", 1), args.get("dilation", 1))
                columns = spatial(count, halo, anchor=True)
                if "padding_mode" in args:  # the padded tensor is a tensor of its own, divided evenly again
                    padded = 16 * math.prod(s + 2 for s in size)
                    columns = spatial(count, halo + 4, anchor=True)
                    columns["filter"] = Column(dim=1, split="filter", extra=padded)
                if groups > 1:  # by groups nothing travels; with fewer groups than ranks the channels of a group do
                    columns["filter"] = Column(dim=1, split="filter", gather=True)
                    columns["channel"] = Column(dim=1, split="channel", results=2, share=True)
                op = _module(CONV[count], channels, 12 if "two filters" in row else 6, args)
                yield case(row, row, op, (4, channels, *size), columns, family="conv")
    yield case(
        "stride 2 on odd shards 9+9",
        "conv 3 stride 2 on 9+9",
        _module(CONV[2], 4, 4, {"kernel_size": 3, "stride": 2, "padding": 1}),
        (2, 4, 18, 9),
        spatial(2, 4, anchor=True),
        ranks=(2, 3, 4),
        family="conv",
    )
    wide = {"kernel_size": 9, "padding": 4}
    yield case(
        "halo wider than a neighbour's shard",
        "conv 9 pad 4",
        _module(CONV[1], 4, 4, wide),
        (2, 4, 10),
        spatial(1, 8, anchor=True),
        ranks=(2, 3, 4),
        family="conv",
    )
    yield case(
        "halo wider than a neighbour's shard",
        "conv 7 pad 3 dilation 2",
        _module(CONV[2], 3, 3, {"kernel_size": 5, "padding": 4, "dilation": 2}),
        (2, 3, 7, 8),
        spatial(2, 8, anchor=True),
        ranks=(2, 3, 4)[:2],
        family="conv",
    )
    yield case(
        "width 15 (uneven)",
        "conv 3 pad 1 width 15",
        _module(CONV[2], 4, 4, {"kernel_size": 3, "padding": 1}),
        (2, 4, 5, 15),
        spatial(2, 2, anchor=True),
        ranks=(2, 3, 4),
        family="conv",
    )


def _module(kind: Any, channels: int, filters: int, args: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: kind(channels, filters, **args)


def transposed() -> Iterator[Case]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("transposed conv k2 s2", {"kernel_size": 2, "stride": 2}),
        ("transposed conv k3", {"kernel_size": 3}),
        ("transposed conv k3 s2 p1 op1", {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}),
        ("transposed conv k4 s2 p1", {"kernel_size": 4, "stride": 2, "padding": 1}),
        ("transposed conv k2 s3 (stride > kernel)", {"kernel_size": 2, "stride": 3}),
        ("transposed conv k3 dilation 2", {"kernel_size": 3, "dilation": 2, "padding": 1}),
        ("transposed conv k3 s2 groups 2", {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2}),
    ]
    for row, args in kinds:
        for count, sizes in {1: ((8,), (7,)), 2: ((5, 6),), 3: ((3, 4, 5),)}.items():
            for size in sizes:
                halo = -(-args.get("dilation", 1) * (args["kernel_size"] - 1) // args.get("stride", 1)) + 1
                columns = spatial(count, halo, anchor=True)
                if "groups" in args:
                    columns["channel"] = Column(dim=1, split="channel", results=2, share=True)
                yield case(row, row, _module(TRANSPOSED[count], 6, 6, args), (4, 6, *size), columns, family="conv")


def pools() -> Iterator[Case]:
    kinds: list[tuple[str, dict[int, Any], dict[str, Any]]] = [
        ("max pool 2", MAX, {"kernel_size": 2}),
        ("max pool 3 stride 2 pad 1", MAX, {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("max pool 3 stride 2 ceil mode", MAX, {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
        ("max pool 3 stride 1 dilation 2", MAX, {"kernel_size": 3, "stride": 1, "dilation": 2, "padding": 1}),
        ("avg pool 2", AVG, {"kernel_size": 2}),
        ("avg pool 3 stride 2 pad 1", AVG, {"kernel_size": 3, "stride": 2, "padding": 1}),
        (
            "avg pool 3 stride 2 pad 1, pad not counted",
            AVG,
            {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
        ),
        ("avg pool 3 stride 2 ceil mode", AVG, {"kernel_size": 3, "stride": 2, "ceil_mode": True, "padding": 1}),
        (
            "avg pool 2 stride 2 ceil mode, pad not counted",
            AVG,
            {"kernel_size": 2, "stride": 2, "ceil_mode": True, "padding": 1, "count_include_pad": False},
        ),
    ]
    for row, kind, args in kinds:
        for count, sizes in SIZES.items():
            for size in sizes:
                halo = reach(args["kernel_size"], args.get("stride", args["kernel_size"]), args.get("dilation", 1))
                yield case(row, row, _pool(kind[count], args), (4, 4, *size), spatial(count, halo), family="pool")
    for count in (2, 3):
        args = {"kernel_size": 3, "stride": 2, "divisor_override": 5}
        yield case(
            "avg pool divisor override",
            "avg pool 3 stride 2 divisor 5",
            _pool(AVG[count], args),
            (4, 4, *SIZES[count][0]),
            spatial(count, reach(3, 2)),
            family="pool",
        )
    yield case(
        "max pool (2, 3) stride (1, 2)",
        "max pool (2, 3) stride (1, 2)",
        lambda: nn.MaxPool2d((2, 3), (1, 2), (1, 0)),
        (4, 4, 8, 9),
        spatial(2, 5),
        family="pool",
    )
    for count, sizes in SIZES.items():
        for size in sizes:
            for kind, name in ((ADAPTIVE_AVG, "average"), (ADAPTIVE_MAX, "max")):
                for row, out in (
                    (f"global {name} pool", (1,) * count),
                    (f"adaptive {name} pool, divisible", tuple(s // 2 if s % 2 == 0 else s for s in size)),
                    (f"adaptive {name} pool, not divisible", tuple(s - 3 for s in size)),
                ):
                    columns = spatial(count, 4, results=2 if out[0] == 1 else 0)
                    if out[0] == 1 and name == "max":
                        columns = spatial(count, 0, results=2)
                    yield case(
                        row,
                        f"{row} to {'x'.join(map(str, out))}",
                        _adaptive(kind[count], out),
                        (4, 4, *size),
                        columns,
                        family="pool",
                    )


def _pool(kind: Any, args: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: kind(**args)


def _adaptive(kind: Any, out: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: kind(out)


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def interpolations() -> Iterator[Case]:
    for count, sizes in SIZES.items():
        for size in sizes:
            smooth, up, down = LINEAR[count], tuple(2 * s for s in size), tuple(s - 3 for s in size)
            kinds: list[tuple[str, dict[str, Any]]] = [
                ("nearest upsample x2", {"scale_factor": 2, "mode": "nearest"}),
                ("nearest to a size", {"size": tuple(s + 5 for s in size), "mode": "nearest"}),
                ("nearest-exact x1.5", {"scale_factor": 1.5, "mode": "nearest-exact"}),
                ("nearest-exact down", {"size": down, "mode": "nearest-exact"}),
                ("linear family x2", {"scale_factor": 2, "mode": smooth}),
                ("linear family x2 align corners", {"scale_factor": 2, "mode": smooth, "align_corners": True}),
                ("linear family to a size", {"size": up, "mode": smooth, "align_corners": True}),
                ("linear family x1.7", {"scale_factor": 1.7, "mode": smooth}),
                ("linear family x1.7, scale recomputed", {"scale_factor": 1.7, "mode": smooth, "recompute_scale_factor": True}),
                ("linear family down x0.6", {"scale_factor": 0.6, "mode": smooth}),
                ("linear family down to a size", {"size": down, "mode": smooth}),
            ]
            if count == 2:
                kinds += [
                    ("bicubic x2", {"scale_factor": 2, "mode": "bicubic"}),
                    ("bicubic align corners", {"size": (11, 13), "mode": "bicubic", "align_corners": True}),
                    ("bicubic down", {"size": (5, 6), "mode": "bicubic"}),
                    ("bilinear antialias", {"size": (5, 6), "mode": "bilinear", "antialias": True}),
                ]
            for name, args in kinds:
                row = "bilinear upsample" if name == "linear family x2" else name
                halo = 5 if "bicubic" in name else 3
                columns = spatial(count, halo)
                yield case(row, name, _interpolate(args), (2, 4, *size), columns, family="interpolation")
    columns = spatial(1, 0)
    why = "torch's backward does not match its forward for such a factor; its own kernel runs"
    columns["domain:0"] = Column(dim=2, expect="whole", why=why)
    op = _interpolate({"scale_factor": 2.2, "mode": "nearest"})
    yield case("nearest by a fraction that doubles", "nearest x2.2 of 4", op, (2, 4, 4), columns, family="interpolation")


def _interpolate(args: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: Fn(lambda m, x: F.interpolate(x, **args))


def paddings() -> Iterator[Case]:
    for count, sizes in SIZES.items():
        for size in sizes:
            for mode in ("constant", "reflect", "replicate", "circular"):
                amounts = (1, 2) * count
                row = {"reflect": "reflect / circular padding", "circular": "reflect / circular padding"}.get(
                    mode, f"{mode} padding"
                )
                value = {"value": 1.5} if mode == "constant" else {}
                op = _pad(amounts, {"mode": mode, **value})
                yield case(row, f"pad {mode} {count}-D", op, (4, 4, *size), spatial(count, 6), family="padding")
    yield case("negative padding", "pad -1, 2", _pad((-1, 2, 1, -2), {}), (4, 4, 8, 9), spatial(2, 4), family="padding")
    yield case("negative padding", "crop by pad -2, -1", _pad((-2, -1), {}), (4, 4, 8, 9), spatial(2, 4), family="padding")


def _pad(amounts: tuple[int, ...], args: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: Fn(lambda m, x: F.pad(x, amounts, **args))


def thin() -> Iterator[Case]:
    """Fewer samples, rows or outputs than ranks: shards that hold nothing."""
    ops: list[tuple[str, Callable[[], nn.Module], int]] = [
        ("conv 3 pad 1", lambda: nn.Conv2d(4, 4, 3, padding=1), 2),
        ("conv 3 stride 2", lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1), 4),
        ("transposed conv k2 s2", lambda: nn.ConvTranspose2d(4, 4, 2, stride=2), 3),
        ("max pool 2", lambda: nn.MaxPool2d(2), 4),
        ("avg pool 3 stride 2 pad 1", lambda: nn.AvgPool2d(3, 2, 1), 4),
        ("adaptive average pool to 2", lambda: nn.AdaptiveAvgPool2d(2), 4),
        ("global average pool", lambda: nn.AdaptiveAvgPool2d(1), 4),
        ("adaptive max pool to 2", lambda: nn.AdaptiveMaxPool2d(2), 4),
        ("batch norm", lambda: nn.BatchNorm2d(4), 0),
        ("group norm", lambda: nn.GroupNorm(2, 4), 0),
        ("instance norm", lambda: nn.InstanceNorm2d(4, affine=True), 0),
        ("bilinear upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), 3),
        ("circular padding", lambda: Fn(lambda m, x: F.pad(x, (1, 1, 1, 1), mode="circular")), 6),
        ("relu", nn.ReLU, 0),
        ("sum", lambda: Fn(lambda m, x: x.sum((2, 3))), 4),
    ]
    for name, op, halo in ops:
        results = 2 if "global" in name or name == "sum" else 0
        anchored = "conv" in name
        columns = spatial(2, halo, anchor=anchored, results=results)
        if name == "group norm":
            columns["filter"] = Column(dim=1, share=True)
        yield case("empty shards", f"thin {name}", op, (1, 4, 2, 3), columns, ranks=(2, 3, 4), family="thin")


CASES = (*convolutions(), *transposed(), *pools(), *interpolations(), *paddings(), *thin())
