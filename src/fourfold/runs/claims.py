"""Whose weights are whose, where several `Parallel`s share some, as the two of a GAN do.

That is right where every rank uses the module's own tensor in place, because each then sees what the other's optimizer wrote. A
divided weight is a copy, and neither would see the other's updates.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from fourfold.errors import Infeasible


class _Use(NamedTuple):
    """How an owner uses a tensor."""

    in_place: bool
    changes: bool


_claims: WeakKeyDictionary[Any, dict[int, _Use]] = WeakKeyDictionary()


def claim(owner: Any, weights: Mapping[str, Tensor], in_place: Collection[str], changing: Collection[str]) -> None:
    """Note the tensors an owner uses; refuse those of another that is still alive if one of them changes them, unless both use
    them in place."""
    mine = {id(tensor): _Use(key in in_place, key in changing) for key, tensor in weights.items()}
    if _divided(mine):
        gc.collect()  # an owner that nobody uses any more may not be gone yet
    divided = _divided(mine)
    for key, tensor in weights.items():
        if id(tensor) in divided:
            raise Infeasible(
                f"'{key}' belongs to another Parallel that is still in use, and not both keep it whole: "
                "neither would see the other's updates; use plans that keep shared weights whole (data), put both "
                "losses into one module, or delete the first Parallel"
            )
    _claims[owner] = mine


def _divided(mine: Mapping[int, _Use]) -> set[int]:
    """Tensors that someone else has too, that one of them changes, and that are not used in place by both."""
    shared = [(tensor, use, other[tensor]) for other in _claims.values() for tensor, use in mine.items() if tensor in other]
    return {t for t, one, two in shared if (one.changes or two.changes) and not (one.in_place and two.in_place)}
