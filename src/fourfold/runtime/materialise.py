"""Where a rank's stored tensors come from: a real module's tensors, or fresh values for a module built on meta.

A meta-built model is never whole anywhere: one submodule at a time is given memory, initialised by its own
`reset_parameters` under a seed of its own, cut to this rank's shards and let go. Every rank draws the same values, so
shards fit together.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fourfold.errors import InvalidInput
from fourfold.plans.layout import Layout
from fourfold.runtime.exchange import take
from fourfold.runtime.world import World

Loader = Callable[[str, Layout], Tensor]


def cut(tensor: Tensor, layout: Layout, world: World) -> Tensor:
    """This rank's part of a whole tensor: the tensor itself where it is whole, else a copy of the part."""
    part = take(tensor, tuple(s.spans for s in layout.box(world.coords)))
    return part if part is tensor else part.clone(memory_format=torch.contiguous_format)


def loader(model: nn.Module, world: World, *, seed: int = 0) -> Loader:
    """Gives a rank its part of the tensors of a module, by state_dict key."""
    fresh: dict[str, Tensor] = {}

    def load(key: str, layout: Layout) -> Tensor:
        owner_name, _, name = key.rpartition(".")
        owner = model.get_submodule(owner_name)
        tensor = getattr(owner, name).detach()
        if tensor.is_meta:
            if key not in fresh:
                fresh.clear()
                fresh.update(initialised(owner, owner_name, seed))
            tensor = fresh[key]
        return cut(tensor.to(world.device), layout, world)

    return load


def initialised(module: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """Values for the direct parameters and buffers of one meta-built submodule, by full key; the module stays on meta."""
    reset = getattr(module, "reset_parameters", None)
    prefix = f"{path}." if path else ""
    if reset is None:
        names = [prefix + n for n, _ in module.named_parameters(recurse=False)]
        names += [prefix + n for n, _ in module.named_buffers(recurse=False)]
        raise InvalidInput(
            f"{type(module).__name__} '{path}' was built on meta and has no reset_parameters to initialise {', '.join(names)}; "
            "add the method or build the module on a real device"
        )
    twin = copy.copy(module)  # shares everything but its own tensors
    twin._parameters = {n: _real(p) for n, p in module._parameters.items()}
    twin._buffers = {n: None if b is None else torch.empty_like(b, device="cpu") for n, b in module._buffers.items()}
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        twin.reset_parameters()  # type: ignore[operator]
    state = {**twin._parameters, **twin._buffers}
    return {prefix + n: t.detach() for n, t in state.items() if t is not None}


def _real(parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
