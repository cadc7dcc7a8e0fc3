"""A graph as plain data for JSON, and back. Nothing but data: reading it builds values of this room and runs no code.

What JSON has stays as it is, and its lists are tuples. Anything else is an object with one key that says what it is: a value of
this room by its name, as ``{"Ref": ["conv2d_1"]}`` or ``{"Size": [2, 0]}``, its fields in order; ``{"map": [[key, item]...]}``,
``{"bytes": base64}``, ``{"complex": [re, im]}``, ``{"float": "-inf"}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from fourfold.graph.spec import Constant, Device, Dtype, Graph, Op, Parameter, Ref, Size, TensorSpec

VERSION = 1  # counted up with every change of what is written here
_VALUES = {kind.__name__: kind for kind in (Constant, Device, Dtype, Graph, Op, Parameter, Ref, Size, TensorSpec)}


def graph_data(graph: Graph) -> Any:
    """The graph as JSON has it."""
    return _written(graph)


def graph_from(data: Any) -> Graph:
    """The graph that was written; a `ValueError` where the data are of another form."""
    try:
        found = _read(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no graph: {error}") from error
    if not isinstance(found, Graph):
        raise ValueError(f"no graph but a {type(found).__name__}")
    return found


def _written(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [_written(value.real), _written(value.imag)]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case tuple() | list():
            return [_written(item) for item in value]
        case Mapping():
            return {"map": [[key, _written(item)] for key, item in value.items()]}
    name = type(value).__name__
    return {name: [_written(getattr(value, field.name)) for field in fields(_VALUES[name])]}


_READ: Mapping[str, Callable[[Any], Any]] = {
    "map": lambda pairs: {key: _read(item) for key, item in pairs},
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*map(_read, parts)),
    "float": float,
}


def _read(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_read, data))
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name in _READ:
        return _READ[name](content)
    kind = _VALUES[name]
    return kind(**dict(zip((field.name for field in fields(kind)), map(_read, content), strict=True)))
