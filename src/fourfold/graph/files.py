"""A graph as plain data for JSON, and back. Nothing but data: reading it builds values of this room and runs no code.

Literals of ops are written as they are where JSON has them. What it has not is an object with one key that says what it is:
``{"ref": name}``, ``{"dtype": name}``, ``{"size": [coef, const]}``, ``{"device": null}``, ``{"map": {...}}``,
``{"complex": [re, im]}``, ``{"float": "-inf"}``. Lists are tuples.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from fourfold.graph.spec import Constant, Device, Dtype, Graph, Op, Parameter, Ref, Size, TensorSpec

VERSION = 1  # counted up with every change of what is written here


def graph_data(graph: Graph) -> dict[str, Any]:
    """The graph as JSON has it."""
    return {
        "values": [[name, [_written(size) for size in spec.shape], spec.dtype] for name, spec in graph.values.items()],
        "inputs": list(graph.inputs),
        "targets": list(graph.targets),
        "parameters": [[p.name, p.key, p.trainable, p.buffer, p.persistent] for p in graph.parameters],
        "constants": [[c.name, base64.b64encode(c.data).decode()] for c in graph.constants],
        "ops": [_op_data(op) for op in graph.ops],
        "loss": graph.loss,
        "outputs": list(graph.outputs),
        "writes": [list(pair) for pair in graph.writes],
        "batch": graph.batch,
        "aliases": [list(pair) for pair in graph.aliases],
    }


def graph_from(data: Mapping[str, Any]) -> Graph:
    """The graph that was written. Data of another form raises KeyError, TypeError or ValueError."""
    return Graph(
        values={name: TensorSpec(tuple(map(_read, shape)), dtype) for name, shape, dtype in data["values"]},
        inputs=tuple(data["inputs"]),
        targets=tuple(data["targets"]),
        parameters=tuple(
            Parameter(name=name, key=key, trainable=trainable, buffer=buffer, persistent=persistent)
            for name, key, trainable, buffer, persistent in data["parameters"]
        ),
        constants=tuple(Constant(name=name, data=base64.b64decode(text, validate=True)) for name, text in data["constants"]),
        ops=tuple(_op(entry) for entry in data["ops"]),
        loss=data["loss"],
        outputs=tuple(data["outputs"]),
        writes=tuple((buffer, value) for buffer, value in data["writes"]),
        batch=data["batch"],
        aliases=tuple((key, first) for key, first in data["aliases"]),
    )


def _op_data(op: Op) -> dict[str, Any]:
    return {
        "name": op.name,
        "target": op.target,
        "args": _written(op.args),
        "kwargs": {key: _written(value) for key, value in op.kwargs.items()},
        "results": list(op.results),
        "module": op.module,
        "pointwise": op.pointwise,
        "random": op.random,
        "inplace": op.inplace,
    }


def _op(data: Mapping[str, Any]) -> Op:
    return Op(
        name=data["name"],
        target=data["target"],
        args=_read(data["args"]),
        kwargs={key: _read(value) for key, value in data["kwargs"].items()},
        results=tuple(data["results"]),
        module=data["module"],
        pointwise=data["pointwise"],
        random=data["random"],
        inplace=data["inplace"],
    )


def _written(literal: Any) -> Any:
    match literal:
        case None | bool() | int() | str():
            return literal
        case float():
            return literal if math.isfinite(literal) else {"float": repr(literal)}
        case complex():
            return {"complex": [_written(literal.real), _written(literal.imag)]}
        case Ref():
            return {"ref": literal.name}
        case Dtype():
            return {"dtype": literal.name}
        case Size():
            return {"size": [literal.coef, literal.const]}
        case Device():
            return {"device": None}
        case tuple() | list():
            return [_written(item) for item in literal]
        case Mapping():
            return {"map": {key: _written(item) for key, item in literal.items()}}
    raise TypeError(f"{type(literal).__name__} is no literal of a graph")


_READ: Mapping[str, Callable[[Any], Any]] = {
    "ref": Ref,
    "dtype": Dtype,
    "size": lambda pair: Size(*pair),
    "device": lambda nothing: Device(),
    "map": lambda entries: {key: _read(item) for key, item in entries.items()},
    "complex": lambda parts: complex(*map(_read, parts)),
    "float": float,
}


def _read(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_read, data))
    if isinstance(data, dict):
        ((kind, content),) = data.items()
        return _READ[kind](content)
    return data
