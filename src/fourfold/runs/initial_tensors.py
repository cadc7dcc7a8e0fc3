"""Where a rank's stored tensors come from: a real module's tensors, or fresh values for a module built on meta.

A meta-built model is never whole anywhere: one submodule at a time is given memory, initialised by its own
`reset_parameters` under a seed of its own, cut to this rank's shards and let go. Every rank draws the same values, so
shards fit together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fourfold.graph.capture import WithLoss
from fourfold.plans.layout.layout import Layout
from fourfold.runtime.comm.exchange import take
from fourfold.runtime.comm.world import World
from fourfold.workload.materialise import initial_values

Loader = Callable[[str, Layout], Tensor]


def cut(tensor: Tensor, layout: Layout, world: World) -> Tensor:
    """This rank's part of a whole tensor: the tensor itself where it is whole, else a copy of the part."""
    part = take(tensor, tuple(s.spans for s in layout.box(world.coords)))
    return part if part is tensor else part.clone(memory_format=torch.contiguous_format)


def loader(whole: WithLoss, world: World, *, seed: int = 0) -> Loader:
    """Gives a rank its part of the tensors of a model, by state_dict key, or of its loss, by `loss.` and the key there."""
    fresh: dict[str, Tensor] = {}
    of_loss = {key for key, _ in (*whole.named_parameters(), *whole.named_buffers()) if key.startswith("loss.")}

    def load(key: str, layout: Layout) -> Tensor:
        owner_name, _, name = key.rpartition(".")
        owner = (whole if key in of_loss else whole.model).get_submodule(owner_name)
        tensor = getattr(owner, name).detach()
        if tensor.is_meta:
            if key not in fresh:
                fresh.clear()
                prefix = f"{owner_name}." if owner_name else ""
                fresh.update({prefix + n: t for n, t in initial_values(owner, owner_name, seed).items()})
            tensor = fresh[key]
        return cut(tensor.to(world.device), layout, world)

    return load
