"""Whose weights are whose, where several `Parallel`s share some, as the two of a GAN do.

That is right where every rank uses the module's own tensor in place, because each then sees what the other's optimizer wrote. A
divided weight is a copy, and neither would see the other's updates.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from fourfold.errors import Infeasible

_claims: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()  # by owner: tensors, and whether they are used in place


def claim(owner: Any, weights: Mapping[str, Tensor], in_place: Collection[str]) -> None:
    """Note the tensors an owner uses; refuse those of another that is still alive, unless both use them in place."""
    mine = {id(tensor): key in in_place for key, tensor in weights.items()}
    if _divided(mine):
        gc.collect()  # an owner that nobody uses any more may not be gone yet
    divided = _divided(mine)
    for key, tensor in weights.items():
        if id(tensor) in divided:
            raise Infeasible(f"'{key}' belongs to another Parallel that is still in use, and not both keep it whole: "
                             "neither would see the other's updates; use plans that keep shared weights whole (data), put both "
                             "losses into one module, or delete the first Parallel")  # fmt: skip
    _claims[owner] = mine


def _divided(mine: Mapping[int, bool]) -> set[int]:
    """Tensors that someone else has too, and that are not used in place by both."""
    others = list(_claims.values())
    return {tensor for tensor, whole in mine.items() for other in others if tensor in other and not (whole and other[tensor])}
