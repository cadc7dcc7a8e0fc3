"""Ranges of plain numbers stay numbers. `torch.arange(2, 5).tolist()`, which losses write for the dims they reduce, depends on
no data, but torch.export takes whatever is read out of a tensor for unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary


class KnownRanges(TorchFunctionMode):
    """While something is traced: the numbers of such ranges are known. A traced tensor's list is made of its items."""

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakTensorKeyDictionary()  # a range, or one of its numbers

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and args[0] in self._known:
            return self._known[args[0]]
        out = func(*args, **(kwargs or {}))
        if func is torch.arange and not kwargs and all(type(number) is int for number in args):
            self._known[out] = range(*args)
        elif func is Tensor.unbind and args[0] in self._known:
            self._known.update(zip(out, self._known[args[0]], strict=True))
        return out
