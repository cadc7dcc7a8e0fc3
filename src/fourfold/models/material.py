"""Storage and values for what a factory left on meta: parameters by each module's own `reset_parameters`, data by a seed.

Planning needs shapes only, running needs numbers. A tensor whose values only its author knows (a parameter or buffer of
a module without `reset_parameters`) is refused by name rather than made up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.errors import InvalidInput
from fourfold.models.spec import Case

UNSET = -(2**62)  # marks integers that nothing has set


def materialise(case: Case, *, seed: int = 0) -> Case:
    """The case with nothing on meta."""
    torch.manual_seed(seed)
    for module in (case.module, case.loss):
        if isinstance(module, nn.Module):
            _fill(module)
    generator = torch.Generator().manual_seed(seed)
    inputs = case.inputs
    if isinstance(inputs, tuple):
        case = case._replace(inputs=tuple(_data(t, generator) for t in inputs))
    else:
        case = case._replace(inputs={k: _data(v, generator) for k, v in inputs.items()})
    return case._replace(targets=tuple(_data(t, generator) for t in case.targets))


def _data(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers; integers become zeros, the one value that is surely a valid label or token."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _fill(module: nn.Module) -> None:
    made: dict[int, Tensor] = {}  # tied tensors stay one
    touched: list[tuple[str, nn.Module]] = []
    for path, sub in module.named_modules():
        own = [(sub._parameters, k) for k in sub._parameters] + [(sub._buffers, k) for k in sub._buffers]
        metas = [(store, k) for store, k in own if (t := store[k]) is not None and t.is_meta]
        for store, key in metas:
            tensor = store[key]
            assert tensor is not None
            store[key] = made.setdefault(id(tensor), _empty(tensor))
        if metas:
            touched.append((path, sub))
    for path, sub in touched:
        reset = getattr(sub, "reset_parameters", None) or getattr(sub, "_reset_parameters", None)
        if reset is None:
            raise InvalidInput(
                f"{path or 'the model'} ({type(sub).__name__}) is on meta and has no reset_parameters to initialise it; "
                "add one, or build the model on a real device"
            )
        reset()
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        unset = tensor.isnan() if tensor.is_floating_point() else tensor == UNSET if tensor.dtype == torch.int64 else None
        if id(tensor) in {id(t) for t in made.values()} and unset is not None and bool(unset.any()):
            raise InvalidInput(f"{path} is on meta and no reset_parameters sets it; build the model on a real device")


def _empty(tensor: Tensor) -> Tensor:
    """Storage that shows whether it was written."""
    value = float("nan") if tensor.is_floating_point() else UNSET if tensor.dtype == torch.int64 else 0
    fresh = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fresh, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
