"""The attributes of a module around a call: restored afterwards, and compared.

Modules keep more than parameters and buffers: counters, caches, lists of heads that several submodules share. A trace writes
into them, and torch.export puts copies back where objects were shared. `preserve_attributes` restores the very objects:
containers with the contents they had, random generators in the state they had. `plain_state` is what can be
compared of them: numbers, texts, generators and the shape of containers, not tensors.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_OWN = frozenset(vars(nn.Module()))  # what every module has
_DEPTH = 6  # containers within containers


@contextmanager
def preserve_attributes(root: nn.Module) -> Iterator[None]:
    """Restore every submodule's attributes on leaving: the same objects with the same contents."""
    before = [(vars(module), dict(vars(module))) for module in root.modules()]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, attributes in before:
        _remember(list(attributes.values()), contents, _DEPTH)
    try:
        yield
    finally:
        for container, kept in contents.values():
            _refill(container, kept)
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)


def _remember(values: list[Any], contents: dict[int, tuple[Any, Any]], depth: int) -> None:
    """Copy the contents of containers, and of those in them."""
    for value in values:
        if isinstance(value, _GENERATORS):
            contents[id(value)] = (value, generator_state(value))
        elif isinstance(value, _CONTAINERS) and id(value) not in contents:
            contents[id(value)] = (value, value.copy())
        elif not isinstance(value, tuple):
            continue
        if depth and not isinstance(value, _GENERATORS):
            _remember(list(value.values() if isinstance(value, dict) else value), contents, depth - 1)


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, random.Random):
        container.setstate(kept)
    elif isinstance(container, np.random.Generator):
        container.bit_generator.state = kept
    elif isinstance(container, np.random.RandomState):
        container.set_state(kept)
    elif not _same_items(container, kept):  # one that nobody changed may be read-only
        container.clear()
        container.extend(kept) if isinstance(container, (list, deque)) else container.update(kept)


def _same_items(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return list(map(id, one)) == list(map(id, two)) and list(map(id, one.values())) == list(map(id, two.values()))
    return {*map(id, one)} == {*map(id, two)} if isinstance(one, set) else list(map(id, one)) == list(map(id, two))


def generator_state(generator: Any) -> Any:
    """The state of a random generator of Python's or NumPy's."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def plain_state(root: nn.Module) -> dict[str, Any]:
    """By name, the attributes of all submodules that a user set, with tensors and foreign objects left out."""
    return {
        f"{path}.{name}" if path else name: _fingerprint(value, _DEPTH)
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _fingerprint(value: Any, depth: int) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    if isinstance(value, Tensor):
        return Tensor  # whatever kind of tensor stands for it while it is traced
    if isinstance(value, _GENERATORS):
        return repr(generator_state(value))
    if isinstance(value, float):
        return repr(value)  # NaN is not equal to itself
    if isinstance(value, _PLAIN):
        return value
    if depth and isinstance(value, dict):
        return {key: _fingerprint(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, deque)):
        return [_fingerprint(item, depth - 1) for item in value]
    return len(value) if isinstance(value, (set, dict, list, tuple, deque)) else type(value)


def tensors_of(root: nn.Module) -> dict[str, Tensor]:
    """By name, the tensors that submodules hold without having registered them."""
    found: dict[str, Tensor] = {}
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in _OWN:
                _tensors(value, f"{path}.{name}" if path else name, found, _DEPTH)
    return found


def _tensors(value: Any, name: str, found: dict[str, Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            _tensors(item, f"{name}[{key!r}]", found, depth - 1)
    elif depth and isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            _tensors(item, f"{name}[{i}]", found, depth - 1)
