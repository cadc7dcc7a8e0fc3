"""One process that rounds otherwise: how far a network carries what the order of sums alone changes.

A split run adds in another order, so that every op's result may differ in its last place. Within `OtherRounding` every
result of every op, forward and backward, is moved by at most one unit in the last place at random. What comes out is as
right as before; how far it lies from the plain run is the noise that no comparison of two such runs can go below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.runtime.comm.exchange import is_inexact


class OtherRounding(TorchDispatchMode):
    """Moves what ops compute; views, writes in place and integers are left alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if func._schema.is_mutable or any(r.alias_info is not None for r in returns):
            return out
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and is_inexact(leaf) and leaf.numel():
                self._move(torch.view_as_real(leaf) if leaf.is_complex() else leaf)
        return out

    def _move(self, tensor: Tensor) -> None:
        device = tensor.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        draw = torch.randint(-1, 2, tensor.shape, generator=self.generators[device], device=device).to(tensor.dtype)
        tensor.mul_(1 + draw * torch.finfo(tensor.dtype).eps)


def nudged(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each element up or down by one unit in the last place of a dtype."""
    if tensor.is_complex():
        return torch.view_as_complex(nudged(torch.view_as_real(tensor.detach().resolve_conj()), dtype, generator))
    if dtype == torch.bfloat16:
        return _rounded_either_way(tensor.detach(), generator)
    exact = tensor.detach().to(dtype)
    up = torch.rand(exact.shape, generator=generator) < 0.5
    return torch.nextafter(exact, torch.where(up, torch.inf, -torch.inf).to(dtype))


def _rounded_either_way(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each element rounded to one of its two neighbours in bf16, in the tensor's own dtype."""
    near = tensor.to(torch.bfloat16)
    side = torch.where(tensor > near.to(tensor.dtype), torch.inf, -torch.inf).to(torch.bfloat16)
    far = torch.where(tensor == near.to(tensor.dtype), near, torch.nextafter(near, side))
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, near, far).to(tensor.dtype)
