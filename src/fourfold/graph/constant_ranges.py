"""Numbers read out of `torch.arange` stay constants while a model is exported. Losses write `torch.arange(2, 5).tolist()` for
the dims they reduce: it depends on no data, but torch.export treats every number read out of a tensor as unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary


class ConstantRanges(TorchFunctionMode):
    """While something is traced: the numbers of such ranges are known, until something is written into them. A traced tensor's
    list is made of its items."""

    def __init__(self) -> None:
        super().__init__()
        self._ranges: Any = WeakTensorKeyDictionary()  # and the version of the tensor they are the numbers of
        self._numbers: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and (number := _unchanged(self._numbers, args[0])) is not None:
            return number
        out = func(*args, **(kwargs or {}))
        if func is torch.arange and not kwargs and all(type(number) is int for number in args):
            self._ranges[out] = range(*args), out._version
        elif func is Tensor.unbind and (numbers := _unchanged(self._ranges, args[0])) is not None:
            self._numbers.update((one, (number, one._version)) for one, number in zip(out, numbers, strict=True))
        return out


def _unchanged(known: Any, tensor: Tensor) -> Any:
    """What is known of a tensor, None if it was written to since: views have the version of what they view."""
    found, version = known.get(tensor, (None, None))
    return found if tensor._version == version else None
