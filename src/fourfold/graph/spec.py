"""The captured network as a plain value: tensors, ops, parameters, with the batch size left open. No torch here.

Everything a plan, a rule or the oracle asks of a model is asked of a `Graph`. Sizes that depend on the batch are
`Size(coef, const)`, meaning ``coef * batch + const``; `Graph.at(batch)` replaces them by plain integers, and rules only
ever see such a concrete graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from fourfold.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Size:
    """``coef * batch + const``."""

    coef: int
    const: int

    def at(self, batch: int) -> int:
        return self.coef * batch + self.const


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor value used as an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype used as an argument, by its torch name without the prefix."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device argument of the captured program; the runtime puts its own device there."""


ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


_DOUBLE = {"float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128"}


def computed_as(precision: str) -> dict[str, str]:
    """What the dtypes of a graph become when it is run in a precision: double in fp64, otherwise what they are. (bf16 is
    autocast, which casts op by op: see `autocast.py`.)"""
    return _DOUBLE if precision == "fp64" else {}


def check_precision(precision: str, device: str) -> None:
    """Refuse what a kind of device (cpu, cuda; of a cluster: gpu, fpga) does not compute in, for a plan as for a run."""
    if precision == "tf32" and device == "cpu":
        raise InvalidInput("tf32 is a mode of GPUs, these ranks run on processors; use fp32")


def item_bytes(dtype: str, precision: str) -> int:
    """Bytes of an element of a graph's dtype when the graph is run in a precision."""
    return ITEM_BYTES[computed_as(precision).get(dtype, dtype)]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor; `shape` may hold `Size` entries until `Graph.at`."""

    shape: tuple[Any, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, kw_only=True)
class Op:
    """One ATen call. `args` and `kwargs` are plain literals with `Ref`, `Dtype`, `Device` and `Size` inside."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str, ...]
    module: str
    pointwise: bool = False
    random: bool = False
    inplace: str = ""  # the in-place target it was written as, if it was

    @cached_property
    def path(self) -> str:
        """How users name this op: module path and op name."""
        return f"{self.module}.{self.name}" if self.module else self.name

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors read, in argument order."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A stored tensor of the module: `key` is its name in the module's state_dict (the first, where tied)."""

    name: str
    key: str
    trainable: bool
    buffer: bool = False
    persistent: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor baked into the program, with its bytes."""

    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model and its loss, ending in a scalar.

    `inputs` and `targets` are value names in the order the user gives them. `writes` maps buffers to the values they take
    after a step. `batch` is the batch size the model was captured with if that is the only one possible, else None.
    """

    values: Mapping[str, TensorSpec]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    constants: tuple[Constant, ...]
    ops: tuple[Op, ...]
    loss: str
    outputs: tuple[str, ...]
    writes: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    aliases: tuple[tuple[str, str], ...] = field(default=())  # extra state_dict key -> parameter key, where tied

    @cached_property
    def hash(self) -> str:
        """Content hash; independent of the batch size unless the capture was static."""
        return hashlib.sha256(repr(canonical(self)).encode()).hexdigest()[:16]

    def at(self, batch: int) -> Graph:
        """This graph with every `Size` replaced for the given global batch; the same value each time, with what was derived."""
        known: dict[int, Graph] = self.memo.setdefault("at", {})
        if batch not in known:
            values = {k: TensorSpec(with_batch(v.shape, batch), v.dtype) for k, v in self.values.items()}
            ops = (replace(op, args=with_batch(op.args, batch), kwargs=with_batch(op.kwargs, batch)) for op in self.ops)
            known[batch] = replace(self, values=values, ops=tuple(ops))
        return known[batch]

    def batch_dim(self, name: str) -> int | None:
        """Which dim of a value is the batch itself (size = batch), if one is."""
        shape = self.values[name].shape
        return next((d for d, size in enumerate(shape) if size == Size(1, 0)), None)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Derived facts others keep with the graph; never part of its identity."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: self.__dict__[f.name] for f in fields(self)}

    @cached_property
    def consumers(self) -> dict[str, list[Op]]:
        out: dict[str, list[Op]] = {name: [] for name in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.operands):
                out[name].append(op)
        return out

    @cached_property
    def dependent(self) -> frozenset[str]:
        """Names of the ops whose results depend on the inputs or are drawn at random; the others read stored tensors alone."""
        known, out = {*self.inputs, *self.targets}, set()
        for op in self.ops:
            if op.random or known & set(op.operands):
                out.add(op.name)
                known.update(op.results)
        return frozenset(out)

    @cached_property
    def reached(self) -> frozenset[str]:
        """The values a gradient of the loss comes to."""
        live = {self.loss} - {""}
        for op in reversed(self.ops):
            if live & set(op.results) and not op.target.startswith("aten.detach"):
                live.update(name for name in op.operands if self.values[name].is_float)
        return frozenset(live)

    @cached_property
    def live(self) -> frozenset[str]:
        """The values that have a gradient: it comes to them, and they depend on a trainable parameter by other ways than
        through a detach."""
        trained = {p.name for p in self.parameters if p.trainable}
        for op in self.ops:
            if trained & set(op.operands) and not op.target.startswith("aten.detach"):
                trained.update(name for name in op.results if self.values[name].is_float)
        return self.reached & trained

    @cached_property
    def producer(self) -> dict[str, Op]:
        return {name: op for op in self.ops for name in op.results}


def refs(literal: Any) -> Iterator[Ref]:
    """Every `Ref` inside a literal, in order."""
    if isinstance(literal, Ref):
        yield literal
    elif isinstance(literal, (tuple, list)):
        for item in literal:
            yield from refs(item)
    elif isinstance(literal, Mapping):
        for item in literal.values():
            yield from refs(item)


def map_leaves(literal: Any, change: Callable[[Any], Any]) -> Any:
    """The literal with `change` applied to every leaf."""
    if isinstance(literal, (tuple, list)):
        return tuple(map_leaves(item, change) for item in literal)
    if isinstance(literal, Mapping):
        return {key: map_leaves(item, change) for key, item in literal.items()}
    return change(literal)


def with_batch(literal: Any, batch: int) -> Any:
    return map_leaves(literal, lambda leaf: leaf.at(batch) if isinstance(leaf, Size) else leaf)


def canonical(value: Any) -> Any:
    """A nested tuple that prints the same for equal graphs."""
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(canonical(getattr(value, f.name)) for f in fields(value)))
    if isinstance(value, Mapping):
        return tuple((k, canonical(v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(canonical(v) for v in value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value
