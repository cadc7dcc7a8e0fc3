"""Reshapes and creations on a shard: sizes come from the local layout."""

from __future__ import annotations

import torch

from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import Arguments, RankContext, Run, attach, is_split, kernel, overload, plain


@kernel("reshape")
def reshape(step: Compute, local: RankContext) -> Run:
    shape = local.shape(step.gives[0])
    return lambda x: x.reshape(shape)


@kernel("expand")
def expand(step: Compute, local: RankContext) -> Run:
    shape = local.shape(step.gives[0])
    return lambda x, *like: attach(x.expand(shape), like)


@kernel("identity")
def identity(step: Compute, local: RankContext) -> Run:
    return lambda x: x


@kernel("split")
def split(step: Compute, local: RankContext) -> Run:
    dim = step.nest.detail["dim"]
    sizes = [local.shape(layout)[dim] for layout in step.gives]
    return lambda x: torch.split(x, sizes, dim)


@kernel("select")
def select(step: Compute, local: RankContext) -> Run:
    dim, index = step.nest.detail["dim"], step.nest.detail["index"]
    if not is_split(step, f"i{dim}"):
        return plain(step, local)
    rows = list(local.box(step.needs[0])[dim])
    shape = local.shape(step.gives[0])
    if index in rows:
        at = rows.index(index)
        return lambda x: x.select(dim, at)
    return lambda x: attach(x.new_zeros(shape), (x,))


@kernel("create")
def create(step: Compute, local: RankContext) -> Run:
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
