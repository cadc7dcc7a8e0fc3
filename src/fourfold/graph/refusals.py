"""What can be refused by looking at a module, before anything is traced: hooks on gradients, modules without a graph, tensors
that lie on one memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fourfold.errors import CaptureFailed
from fourfold.graph.export_watch import hook_name

_REMEDY = "remove it, and change the gradients after backward (forward_backward) instead"


def refuse_hooks(whole: nn.Module) -> None:
    """Refuse hooks that change gradients and hang on modules or parameters, where no trace sees them."""
    for hook in (*modules._global_backward_hooks.values(), *modules._global_backward_pre_hooks.values()):
        raise CaptureFailed(f"all modules have the backward hook {hook_name(hook)}, which capture cannot carry; {_REMEDY}")
    for path, module in whole.named_modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            for hook in hooks.values():
                what = f"{_module_name(path, module)} has the backward hook {hook_name(hook)}"
                raise CaptureFailed(f"{what}, which capture cannot carry; {_REMEDY}")
    for key, parameter in whole.named_parameters():
        for hook in [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]:
            what = f"parameter '{_shown(key)}' has the hook {hook_name(hook)}"
            raise CaptureFailed(f"{what}, which capture cannot carry; {_REMEDY}")


def refuse_modules(whole: nn.Module) -> None:
    """Refuse what is known to have no graph: lazy modules without weights, batch norms whose factor is a count."""
    for key, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        if is_lazy(tensor):
            raise CaptureFailed(f"'{_shown(key)}' of a lazy module has no shape yet; call the model once before")
    for path, module in whole.named_modules():
        counts = isinstance(module, _BatchNorm) and module.momentum is None and module.num_batches_tracked is not None
        if counts and module.training:
            what = f"{_module_name(path, module)} averages over all its calls (momentum=None)"
            raise CaptureFailed(f"{what}, by a factor that a graph cannot hold; give it a momentum, as 0.1")


def refuse_overlaps(whole: nn.Module, written: Collection[str]) -> None:
    """Refuse stored tensors that lie on the same memory without being the same tensor, if one of them changes: shards are
    copies, so that the other would not."""
    stored = dict([*whole.named_parameters(), *whole.named_buffers()])
    changing = {key for key, tensor in stored.items() if tensor.requires_grad or key in written}
    for one, two in _overlaps(stored):
        if {one, two} & changing:
            what = f"'{_shown(one)}' and '{_shown(two)}' are two tensors on one memory"
            raise CaptureFailed(f"{what}, which shards of them cannot be; make them one parameter, or copies")


def _overlaps(stored: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Keys of tensors of which one begins before the other ends."""
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for key, tensor in stored.items():
        if tensor.numel() and tensor.layout is torch.strided:
            item = tensor.element_size()
            begin = int(tensor.storage_offset()) * item
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            storages.setdefault(tensor.untyped_storage()._cdata, []).append((begin, begin + (reach + 1) * item, key))
    for spans in storages.values():
        far, farthest = -1, ""
        for begin, end, key in sorted(spans):
            if begin < far:
                yield farthest, key
            far, farthest = max((far, farthest), (end, key))


def _shown(key: str) -> str:
    return key.removeprefix("model.")


def _module_name(path: str, module: nn.Module) -> str:
    inner = path.removeprefix("model").removeprefix(".")
    return f"module '{inner}'" if inner else type(module).__name__
