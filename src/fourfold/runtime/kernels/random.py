"""Random masks that do not depend on the split (exact) or at least agree between replicas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fourfold.errors import Infeasible
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.kernels.base import RankContext, Run, kernel


def uniform(step: Compute, local: RankContext, layout: Layout, dtype: torch.dtype, *more: object) -> Tensor:
    """Numbers in [0, 1) for this rank's part of a tensor."""
    if local.randomness.exact:
        generator = local.randomness.generator(local.device, step.op.name, *more)
        shape, rows = list(layout.shape), step.rows
        if rows is not None:
            shape[rows.dim] = rows.size
        whole = torch.rand(shape, generator=generator, dtype=torch.float32, device=local.device)
        if rows is not None:
            whole = whole.index_select(rows.dim, local.index(rows.index))
        return local.cut(whole, layout).to(dtype)
    where = (step.rows, *(s.spans for s in local.box(layout)))
    generator = local.randomness.generator(local.device, step.op.name, where, *more)
    return torch.rand(local.shape(layout), generator=generator, dtype=torch.float32, device=local.device).to(dtype)


def normal(step: Compute, local: RankContext, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, from two uniform ones each (Box and Muller)."""
    radius = (-2 * torch.log1p(-uniform(step, local, layout, torch.float64))).sqrt()
    return (radius * torch.cos(2 * math.pi * uniform(step, local, layout, torch.float64, "angle"))).to(dtype)


def drop(x: Tensor, p: float, step: Compute, local: RankContext, layout: Layout, *more: object) -> Tensor:
    """Dropout."""
    if p >= 1.0:
        return x * 0
    return x * ((uniform(step, local, layout, x.dtype, *more) >= p).to(x.dtype) / (1 - p))


@kernel("random")
def random(step: Compute, local: RankContext) -> Run:
    name, args = step.op.target.split(".")[1], step.op.args
    layout = step.gives[0]
    if name in ("dropout", "feature_dropout"):
        p, train = args[1], args[2]
        if not train or p == 0:
            return lambda x: x
        if name == "feature_dropout":
            from fourfold.plans.layout.ownership import Own

            layout = Layout((*layout.dims[:2], *(Own.whole(1) for _ in layout.dims[2:])))
        return lambda x: drop(x, p, step, local, layout)
    if name in ("rand", "randn"):
        draw = uniform if name == "rand" else normal
        dtype = local.dtype(step.dtypes[0])
        return lambda: draw(step, local, layout, dtype)
    if name == "rand_like":
        return lambda x: uniform(step, local, layout, x.dtype)
    if name == "randn_like":
        return lambda x: normal(step, local, layout, x.dtype)
    if name == "bernoulli":
        p = args[1] if len(args) > 1 else step.op.kwargs.get("p")
        return lambda x: (uniform(step, local, layout, x.dtype) < (x if p is None else p)).to(x.dtype)
    raise Infeasible(f"{step.op.path}: random op {step.op.target} cannot be drawn alike on every rank")
