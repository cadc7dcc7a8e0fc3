"""Random kernels, strides, paddings, dilations, groups, sizes and rank counts: whatever the numbers, a split op equals eager.

The first half runs on pooled ranks, a few dozen examples per family, always the same ones; the second half are laws of the
index arithmetic beneath, which need no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fourfold.index import IndexSet
from fourfold.ops.nest import Loop
from fourfold.ops.shape import common_factors
from fourfold.ops.window import SlidingWindow, TransposedWindow
from matrix import Case, Column, Fn, judged
from matrix_windows import ADAPTIVE_AVG, ADAPTIVE_MAX, AVG, CONV, LINEAR, MAX, TRANSPOSED

few = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
many = settings(max_examples=200, derandomize=True, deadline=None)
RANKS = st.sampled_from([2, 3, 4])


def check(op: Callable[[], nn.Module], shape: tuple[int, ...], column: str, how: Column, ranks: int) -> None:
    """One cell is ok; a split by features may also be refused where there are fewer than ranks."""
    case = Case(row="", name=f"random {shape}", op=op, shapes=(shape,), columns={column: how}, ranks=(ranks,))
    (cell,) = judged([case])
    thin = cell.status == "refused" and how.split and f"axis ranks has {ranks} ranks" in cell.detail
    assert cell.status == how.expect or thin, f"{column} over {ranks} of {shape}: {cell.status}, {cell.detail}"


@st.composite
def splits(draw: Any, count: int, halo: list[int], *, anchor: bool) -> tuple[str, Column]:
    """A column for ``[N, C, d0...]``: mostly a domain."""
    names = ["batch", "filter", "channel"][: 3 if anchor else 2] + [f"domain:{i}" for i in range(count)] * 3
    name = draw(st.sampled_from(names))
    if name == "batch":
        return name, Column(dim=0)
    if name == "filter":
        return name, Column(dim=1, split="filter" if anchor else "", gather=True)
    if name == "channel":
        return name, Column(dim=1, split="channel", results=2, share=True)
    index = int(name[7:])
    return name, Column(dim=2 + index, halo=halo[index])


def each(draw: Any, count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(count))


@few
@given(data=st.data(), count=st.integers(1, 3), ranks=RANKS, groups=st.sampled_from([1, 1, 2, 3]), bias=st.booleans())
def test_any_convolution_equals_eager(data: Any, count: int, ranks: int, groups: int, bias: bool) -> None:
    kernel, stride, dilation = each(data.draw, count, 1, 5 - count), each(data.draw, count, 1, 3), each(data.draw, count, 1, 2)
    padding, size = each(data.draw, count, 0, 3), each(data.draw, count, 3, 14 - 3 * count)
    assume(all(s + 2 * p > d * (k - 1) for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    halo = [d * (k - 1) + 2 * s for d, k, s in zip(dilation, kernel, stride, strict=True)]
    column, how = data.draw(splits(count, halo, anchor=True))
    channels, filters = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    check(
        lambda: CONV[count](channels, filters, kernel, stride, padding, dilation, groups, bias),
        (3, channels, *size),
        column,
        how,
        ranks,
    )


@few
@given(data=st.data(), count=st.integers(1, 3), ranks=RANKS, groups=st.sampled_from([1, 1, 2]))
def test_any_transposed_convolution_equals_eager(data: Any, count: int, ranks: int, groups: int) -> None:
    kernel, stride, dilation = each(data.draw, count, 1, 4), each(data.draw, count, 1, 3), each(data.draw, count, 1, 2)
    size = each(data.draw, count, 2, 9 - 2 * count)
    padding = tuple(data.draw(st.integers(0, d * (k - 1))) for d, k in zip(dilation, kernel, strict=True))
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    parts = zip(size, stride, padding, dilation, kernel, extra, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + e >= 0 for n, s, p, d, k, e in parts))
    halo = [-(-d * (k - 1) // s) + 2 + p + e for d, k, s, p, e in zip(dilation, kernel, stride, padding, extra, strict=True)]
    column, how = data.draw(splits(count, halo, anchor=True))
    channels, filters = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    check(
        lambda: TRANSPOSED[count](channels, filters, kernel, stride, padding, extra, groups, True, dilation),
        (3, channels, *size),
        column,
        how,
        ranks,
    )


@few
@given(data=st.data(), count=st.integers(1, 3), ranks=RANKS, ceil=st.booleans(), average=st.booleans(), inside=st.booleans())
def test_any_pooling_equals_eager(data: Any, count: int, ranks: int, ceil: bool, average: bool, inside: bool) -> None:
    kernel, stride = each(data.draw, count, 1, 4), each(data.draw, count, 1, 3)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    dilation = (1,) * count if average else each(data.draw, count, 1, 2)
    size = each(data.draw, count, 3, 15 - 3 * count)
    assume(all(s + 2 * p > d * (k - 1) for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    assume(not average or all(s >= k for s, k in zip(size, kernel, strict=True)))  # torch refuses these in three dims
    halo = [d * (k - 1) + 2 * s + 1 for d, k, s in zip(dilation, kernel, stride, strict=True)]
    column, how = data.draw(splits(count, halo, anchor=False))
    op: Callable[[], nn.Module] = lambda: (  # noqa: E731
        AVG[count](kernel, stride, padding, ceil, inside)
        if average
        else MAX[count](kernel, stride, padding, dilation, ceil_mode=ceil)
    )
    check(op, (3, 4, *size), column, how, ranks)


@few
@given(data=st.data(), count=st.integers(1, 3), ranks=RANKS, average=st.booleans())
def test_any_adaptive_pooling_equals_eager(data: Any, count: int, ranks: int, average: bool) -> None:
    size, out = each(data.draw, count, 1, 15 - 3 * count), each(data.draw, count, 1, 9)
    kind = ADAPTIVE_AVG if average else ADAPTIVE_MAX
    halo = [2 * (-(-s // o)) + 2 for s, o in zip(size, out, strict=True)]
    column, how = data.draw(splits(count, halo, anchor=False))
    how = Column(dim=how.dim, halo=how.halo, results=2)
    check(lambda: kind[count](out), (3, 4, *size), column, how, ranks)


@few
@given(
    data=st.data(),
    count=st.integers(1, 3),
    ranks=RANKS,
    mode=st.sampled_from(["nearest", "nearest-exact", "linear", "bicubic"]),
)
def test_any_interpolation_equals_eager(data: Any, count: int, ranks: int, mode: str) -> None:
    count = 2 if mode == "bicubic" else count
    size = each(data.draw, count, 2, 14 - 3 * count)
    args: dict[str, Any] = {"mode": LINEAR[count] if mode == "linear" else mode}
    if mode in ("linear", "bicubic") and data.draw(st.booleans()):
        args["align_corners"] = True
    if data.draw(st.booleans()):
        args["size"] = each(data.draw, count, 1, 16)
    else:
        args["scale_factor"] = data.draw(st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0, 2.5, 3.0]))
    assume("size" in args or all(int(s * args["scale_factor"]) >= 1 for s in size))
    column, how = data.draw(splits(count, [max(size) + 4] * count, anchor=False))
    if (
        mode == "nearest"
        and "scale_factor" in args
        and column.startswith("domain")
        and _kept_or_doubled(size, args["scale_factor"])
    ):
        how = Column(dim=how.dim, expect="whole")  # torch's backward does not match its forward there
    check(lambda: Fn(lambda m, x: F.interpolate(x, **args)), (3, 4, *size), column, how, ranks)


def _kept_or_doubled(size: tuple[int, ...], scale: float) -> bool:
    return any(int(s * scale) in (s, 2 * s) and scale not in (1.0, 2.0) and _differs(s, int(s * scale), scale) for s in size)


def _differs(size: int, out: int, scale: float) -> bool:
    return any(min(int(o / scale), size - 1) != o * size // out for o in range(out))


@st.composite
def factorised(draw: Any, numel: int) -> tuple[int, ...]:
    """A shape of `numel` elements."""
    out: list[int] = []
    while numel > 1 and len(out) < 4:
        divisors = [d for d in range(1, numel + 1) if numel % d == 0]
        out.append(draw(st.sampled_from(divisors)))
        numel //= out[-1]
    return (*out, numel) if numel > 1 or not out else tuple(out)


@few
@given(data=st.data(), numel=st.sampled_from([24, 36, 48, 60, 72, 90]), ranks=RANKS)
def test_any_chain_of_reshapes_equals_eager(data: Any, numel: int, ranks: int) -> None:
    """Gathered where the factors do not allow better; the values are right all the same."""
    shapes = [data.draw(factorised(numel)) for _ in range(4)]
    dim = data.draw(st.integers(0, len(shapes[0]) - 1))

    def chain(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for shape in shapes[1:]:
            x = torch.tanh(x.reshape(shape)) + x.reshape(shape).flip(0)
        return x

    case = Case(
        row="",
        name=f"reshapes {shapes}",
        op=lambda: Fn(chain),
        shapes=(shapes[0],),
        columns={"dim": Column(dim=dim)},
        ranks=(ranks,),
    )
    (cell,) = judged([case])
    assert cell.status in ("ok", "whole"), f"{shapes} divided on {dim} over {ranks}: {cell.detail}"


@many
@given(data=st.data(), numel=st.sampled_from([1, 12, 24, 36, 48, 60, 90]))
def test_a_reshape_is_a_regrouping_of_common_factors(data: Any, numel: int) -> None:
    before, after = data.draw(factorised(numel)), data.draw(factorised(numel))
    loops: list[Loop] = []
    sides = common_factors(before, after, loops)
    sizes = {loop.name: loop.size for loop in loops}
    for shape, dims in zip((before, after), sides, strict=True):
        assert [math.prod(t if isinstance(t, int) else sizes[t] for t in terms) for terms in dims] == list(shape)
    orders = [[t for terms in dims for t in terms if isinstance(t, str)] for dims in sides]
    assert [t for t in orders[0] if sizes[t] > 1] == [t for t in orders[1] if sizes[t] > 1]


@many
@given(
    size=st.integers(1, 20),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    pad=st.integers(0, 4),
    dilation=st.integers(1, 3),
    data=st.data(),
)
def test_a_sliding_window_needs_what_its_taps_read(
    size: int, kernel: int, stride: int, pad: int, dilation: int, data: Any
) -> None:
    window = SlidingWindow(size=size, kernel=kernel, stride=stride, pad=pad, dilation=dilation)
    low = data.draw(st.integers(0, 12))
    outputs = IndexSet.of(20, [(low, low + data.draw(st.integers(0, 5)))])
    read = {o * stride - pad + dilation * k for o in outputs for k in range(kernel)}
    inside = {i for i in read if 0 <= i < size}
    assert inside <= set(window(outputs))
    assert not inside or (min(read) <= min(window(outputs)) and max(window(outputs)) <= max(read))


@many
@given(
    size=st.integers(1, 20),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    pad=st.integers(0, 4),
    dilation=st.integers(1, 3),
    data=st.data(),
)
def test_a_transposed_window_needs_every_input_that_writes_there(
    size: int, kernel: int, stride: int, pad: int, dilation: int, data: Any
) -> None:
    window = TransposedWindow(size=size, kernel=kernel, stride=stride, pad=pad, dilation=dilation)
    low = data.draw(st.integers(0, 30))
    outputs = IndexSet.of(60, [(low, low + data.draw(st.integers(0, 5)))])
    writers = {i for i in range(size) for k in range(kernel) if i * stride - pad + dilation * k in set(outputs)}
    assert writers <= set(window(outputs))
    assert len(window(outputs)) <= max(0, len(outputs) + dilation * (kernel - 1)) // stride + 1
