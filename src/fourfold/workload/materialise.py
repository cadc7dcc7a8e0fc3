"""Storage and values for what a factory left on meta: parameters by each module's own `reset_parameters`, data by a seed.

Planning needs shapes only, running needs numbers. A tensor whose values only its author knows (a parameter or buffer of
a module without `reset_parameters`) is refused by name rather than made up.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import InvalidInput
from fourfold.models import Example

UNSET = -(2**62)  # marks integers that nothing has set


def materialise(example: Example, *, seed: int = 0) -> Example:
    """The example with nothing on meta."""
    torch.manual_seed(seed)
    for module in (example.module, example.loss):
        if isinstance(module, nn.Module):
            _fill(module, seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = example.inputs
    if isinstance(inputs, tuple):
        example = example._replace(inputs=tuple(_data(t, generator) for t in inputs))
    else:
        example = example._replace(inputs={k: _data(v, generator) for k, v in inputs.items()})
    return example._replace(targets=tuple(_data(t, generator) for t in example.targets))


def _data(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return synthetic_tensor(tensor, generator) if tensor.is_meta else tensor


def synthetic_tensor(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of a tensor's shape; integers are zeros, the one value that is surely a valid label or token."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def initial_values(module: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """Values for a submodule's own meta tensors by its own reset, under a seed of its own; the module itself stays as it is."""
    metas = {**module._parameters, **module._buffers}
    metas = {name: tensor for name, tensor in metas.items() if tensor is not None and tensor.is_meta}
    twin = copy.copy(module)  # shares everything but its own tensors
    own = module._parameters.items()
    twin._parameters = {n: nn.Parameter(_empty(p), p.requires_grad) if p is not None and n in metas else p for n, p in own}
    twin._buffers = {n: _empty(b) if n in metas else b for n, b in module._buffers.items()}
    reset = getattr(twin, "reset_parameters", None) or getattr(twin, "_reset_parameters", None)
    if reset is None:
        raise InvalidInput(
            f"{path or 'the model'} ({type(module).__name__}) is on meta and has no reset_parameters to initialise "
            f"{', '.join(metas)}; add one, or build the model on a real device"
        )
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        reset()
    values = {n: t.detach() for n, t in {**twin._parameters, **twin._buffers}.items() if n in metas and t is not None}
    for name, tensor in values.items():
        unset = tensor.isnan() if tensor.is_floating_point() else tensor == UNSET
        if bool(unset.any()):
            where = f"{path}.{name}" if path else name
            raise InvalidInput(f"{where} is on meta and no reset_parameters sets it; build the model on a real device")
    return values


def _fill(module: nn.Module, seed: int) -> None:
    """Give every meta tensor of a module its values; tied tensors stay one, with the values of the first that holds them."""
    made: dict[int, Any] = {}
    for path, sub in module.named_modules():
        stores: list[dict[str, Any]] = [sub._parameters, sub._buffers]
        metas = [(store, k) for store in stores for k, t in store.items() if t is not None and t.is_meta]
        values = initial_values(sub, path, seed) if metas else {}
        for store, key in metas:
            old = store[key]
            value = nn.Parameter(values[key], old.requires_grad) if isinstance(old, nn.Parameter) else values[key]
            store[key] = made.setdefault(id(old), value)


def _empty(tensor: Any) -> Tensor:
    """Storage that shows whether it was written."""
    value = float("nan") if tensor.is_floating_point() else UNSET if tensor.dtype == torch.int64 else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
