"""Reshapes, slices and creations on a shard: sizes come from the local layout, rows from the global index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.ops.nest import Window
from fourfold.ops.window import Rows
from fourfold.plans.program import Compute
from fourfold.runtime.kernels.base import Arguments, Local, Run, attached, is_split, kernel, overload, plain


@kernel("reshape")
def reshape(step: Compute, local: Local) -> Run:
    shape = local.shape(step.gives[0])
    return lambda x: x.reshape(shape)


@kernel("expand")
def expand(step: Compute, local: Local) -> Run:
    shape = local.shape(step.gives[0])
    return lambda x, *like: attached(x.expand(shape), like)


@kernel("identity")
def identity(step: Compute, local: Local) -> Run:
    return lambda x: x


@kernel("split")
def split(step: Compute, local: Local) -> Run:
    dim = step.nest.detail["dim"]
    sizes = [local.shape(layout)[dim] for layout in step.gives]
    return lambda x: torch.split(x, sizes, dim)


@kernel("slice")
def slice_(step: Compute, local: Local) -> Run:
    """Split along the sliced dim, the fetch has brought just the rows kept."""
    return (lambda x: x) if is_split(step, f"i{step.nest.detail['dim']}") else plain(step, local)


@kernel("select")
def select(step: Compute, local: Local) -> Run:
    dim, index = step.nest.detail["dim"], step.nest.detail["index"]
    if not is_split(step, f"i{dim}"):
        return plain(step, local)
    rows = list(local.box(step.needs[0])[dim])
    shape = local.shape(step.gives[0])
    if index in rows:
        at = rows.index(index)
        return lambda x: x.select(dim, at)
    return lambda x: attached(x.new_zeros(shape), (x,))


@kernel("rows")
def rows(step: Compute, local: Local) -> Run:
    """Slices with a step, flips, rolls and paddings along split dims."""
    windows = {d: t[0] for d, t in enumerate(step.nest.operands[0]) if t and isinstance(t[0], Window)}
    if not any(is_split(step, w.loop) for w in windows.values()):
        return plain(step, local)
    moves = []
    for dim, window in windows.items():
        assert isinstance(window.need, Rows)
        held = {row: k for k, row in enumerate(local.box(step.needs[0])[dim])}
        taps = [window.need.taps[o][0] for o in local.box(step.gives[0])[dim]]
        inside = [held[t] for t in taps if t >= 0]
        first = next((k for k, t in enumerate(taps) if t >= 0), len(taps))
        last = len(taps) - next((k for k, t in enumerate(reversed(taps)) if t >= 0), 0) if inside else first
        moves.append((dim, torch.tensor(inside, dtype=torch.long, device=local.device), first, len(taps) - last))
    fill = step.nest.detail["fill"]

    def run(x: Tensor) -> Tensor:
        for dim, index, before, after in moves:
            x = x.index_select(dim, index)
            if before or after:
                x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], value=fill)
        return x

    return run


@kernel("create")
def create(step: Compute, local: Local) -> Run:
    arguments, call = Arguments(step, local), overload(step.op.target)
    arguments.kwargs.pop("pin_memory", None)
    arguments.kwargs.pop("layout", None)
    arguments.kwargs["device"] = local.device
    name = step.op.target.split(".")[1]
    if name in ("full", "zeros", "ones", "empty"):
        arguments.args = (local.shape(step.gives[0]), *arguments.args[1:])
        if name == "empty":
            call = torch.ops.aten.zeros.default
        return lambda: call(*arguments.args, **arguments.kwargs)
    layout = step.gives[0]
    return lambda: local.cut(call(*arguments.args, **arguments.kwargs), layout)
