"""A captured graph as it runs under autocast: every cast that autocast hides becomes an op, every value has its true dtype.

Which operands are cast is not kept in a table here but asked of torch: each op is called once on shapes alone that claim to
be on the device, beneath torch's own autocast. What it casts is seen; what it gives says the dtypes of the results. The
plain graph is the one that runs; this one is for times and bytes.

As autocast does, a trained parameter is cast once and the copy shared by all its uses; other values are cast at each use.
Left out: casts of what an op makes inside (a loss that casts its own logarithms); they are part of its kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.errors import CaptureFailed
from fourfold.graph.spec import Device, Dtype, Graph, Op, Ref, TensorSpec, map_leaves

TRIAL_BATCH = 2  # dtypes do not depend on it
_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_CAST = "aten._to_copy.default"
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
"""On a GPU cuDNN takes these whole, and autocast gives it float16 whatever dtype it was asked for (ATen's AutocastRNN.cpp).
Without a GPU they fall apart into cells, which would tell another story."""


def as_computed(graph: Graph, precision: str, kind: str) -> Graph:
    """The graph whose times and bytes are those of a precision on a kind of device: in bf16, the one with autocast's casts."""
    return under_autocast(graph, device="cpu" if kind == "cpu" else "cuda") if precision == "bf16" else graph


def under_autocast(graph: Graph, *, device: str = "cuda", dtype: str = "bfloat16") -> Graph:
    """The graph with autocast's casts written out, for a kind of device (cuda or cpu; it need not be there)."""
    concrete = graph.at(graph.batch or TRIAL_BATCH)
    shadows = {name: _Shadow(_empty(spec), device) for name, spec in concrete.values.items()}
    writer = _Writer(graph)
    with _autocast(device, getattr(torch, dtype)):
        for op, sized in zip(graph.ops, concrete.ops, strict=True):
            casts, found = _traced(sized, shadows, device)
            dtypes = dict(zip(op.results, (str(t.dtype).removeprefix("torch.") for t in found), strict=True))
            writer.add(op, casts, dtypes)
            specs = {name: TensorSpec(concrete.values[name].shape, dtype) for name, dtype in dtypes.items()}
            shadows.update({name: _Shadow(_empty(spec), device) for name, spec in specs.items()})  # strides do not matter
    return replace(graph, values=writer.values, ops=tuple(writer.ops))


class _Shadow(Tensor):
    """A tensor of shape and dtype alone that claims to be on a device, so that calls of it pass through autocast."""

    shape_only: Tensor

    @staticmethod
    def __new__(cls, shape_only: Tensor, device: str) -> _Shadow:
        where = torch.device(device, 0) if device != "cpu" else torch.device("cpu")
        made: _Shadow = torch.Tensor._make_wrapper_subclass(
            cls, shape_only.shape, shape_only.stride(), dtype=shape_only.dtype, device=where
        )
        made.shape_only = shape_only
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function} was called outside of the mode that answers it")


class _Watch(TorchDispatchMode):
    """Answers calls with shapes, and notes casts of the operands. `listed`: autocast itself knows the op, so that all of its
    casts come first and later ones are the op's own."""

    def __init__(self, operands: Mapping[int, int], device: str, *, listed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands, self.device, self.listed = operands, device, listed
        self.casts: dict[int, str] = {}  # position among the operands -> dtype
        self.begun = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(function) == _CAST and id(args[0]) in self.operands and not (self.listed and self.begun):
            self.casts[self.operands[id(args[0])]] = str(kwargs["dtype"]).removeprefix("torch.")
        elif str(function) != _CAST:
            self.begun = True
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        args, kwargs = pytree.tree_map_only(_Shadow, lambda t: t.shape_only, (args, kwargs))
        return pytree.tree_map_only(Tensor, lambda t: _Shadow(t, self.device), function(*args, **kwargs))


def _traced(op: Op, shadows: Mapping[str, _Shadow], device: str) -> tuple[dict[int, str], list[Any]]:
    """Which operands of an op autocast casts, and the tensors it gives."""
    own = [shadows[name].shape_only for name in op.operands]
    if device == "cuda" and op.target.startswith(_RECURRENT):
        halves = [torch.empty(shadows[name].shape, dtype=torch.float16, device="meta") for name in op.results]
        return {k: "float16" for k, t in enumerate(own) if t.is_floating_point()}, halves
    casts, found = _called(op, own, device)
    if "float32" in casts.values() and _listed(op, device):
        wide = [t.float() if t.is_floating_point() else t for t in own]
        if _called(op, wide, device)[0]:  # it takes float32 down: what it took up was the op's own doing
            casts = {}
    return casts, found


def _called(op: Op, operands: Sequence[Tensor], device: str) -> tuple[dict[int, str], list[Any]]:
    own = [_Shadow(tensor, device) for tensor in operands]  # one object for each use
    left = iter(own)

    def leaf(item: Any) -> Any:
        if isinstance(item, Ref):
            return next(left)
        if isinstance(item, Dtype):
            return getattr(torch, item.name)
        return torch.device("meta") if isinstance(item, Device) else item

    args, kwargs = map_leaves(op.args, leaf), map_leaves(dict(op.kwargs), leaf)
    watch = _Watch({id(t): k for k, t in enumerate(own)}, device, listed=_listed(op, device))
    try:
        with watch:
            found = [t for t in pytree.tree_leaves(_overload(op)(*args, **kwargs)) if isinstance(t, Tensor)]
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise CaptureFailed(
            f"{op.path} cannot be followed under autocast on {device}: {reason}; use another precision"
        ) from error
    return watch.casts, found


def _overload(op: Op) -> Any:
    _, name, variant = (op.inplace or op.target).split(".")
    return getattr(getattr(torch.ops.aten, name), variant)


def _listed(op: Op, device: str) -> bool:
    """Whether autocast has this op in one of its lists."""
    schema = _overload(op)._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEYS[device]))


class _Writer:
    """Collects the ops with casts between them."""

    def __init__(self, graph: Graph) -> None:
        self.values = dict(graph.values)
        self.ops: list[Op] = []
        self.shared = {p.name for p in graph.parameters if p.trainable}

    def add(self, op: Op, casts: Mapping[int, str], dtypes: Mapping[str, str]) -> None:
        names = [
            self._cast(op, k, name, casts[k]) if casts.get(k, self.values[name].dtype) != self.values[name].dtype else name
            for k, name in enumerate(op.operands)
        ]
        left = iter(names)
        args, kwargs = map_leaves((op.args, dict(op.kwargs)), lambda item: Ref(next(left)) if isinstance(item, Ref) else item)
        self.ops.append(replace(op, args=args, kwargs=kwargs))
        for result, dtype in dtypes.items():
            self.values[result] = TensorSpec(self.values[result].shape, dtype)

    def _cast(self, op: Op, position: int, value: str, dtype: str) -> str:
        name = f"{value}_{dtype}" if value in self.shared else f"{op.name}_{position}_{dtype}"
        if name not in self.values:
            self.values[name] = TensorSpec(self.values[value].shape, dtype)
            self.ops.append(
                Op(
                    name=name,
                    target=_CAST,
                    args=(Ref(value),),
                    kwargs={"dtype": Dtype(dtype)},
                    results=(name,),
                    module=op.module,
                    pointwise=True,
                )
            )
        return name


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast by its switches: the context manager turns itself off where the device is not there. Without its cache, so
    that every cast is seen."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])
