"""How a rank runs its share of one op: a registry of builders, and their common parts.

A builder looks once at a `Compute` step and this rank's place and returns a function of local tensors. Most ops need
none: the plain ATen call on local tensors is their share. A shard that holds nothing never calls a kernel (some return
wrong shapes silently): it gives zeros of the right shape, attached to all inputs, so that every rank takes part in every
collective of backward.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.graph import Device, Dtype, Ref
from fourfold.graph.spec import map_leaves
from fourfold.index import IndexSet
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.comm.exchange import is_inexact, take
from fourfold.runtime.comm.world import World

Run = Callable[..., Any]
Builder = Callable[[Compute, "RankContext"], Run]
JointBuilder = Callable[[Compute, "RankContext", tuple[str, ...]], Run]

_BUILDERS: dict[str, Builder] = {}


def kernel(*names: str) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        for name in names:
            _BUILDERS[name] = builder
        return builder

    return register


def joint_kernel(*names: str) -> Callable[[JointBuilder], Builder]:
    """Registers a builder for ops whose joint loop is divided over ranks; it also takes the axes that divide it. Where no axis
    does, the op runs plain."""

    def register(builder: JointBuilder) -> Builder:
        def build_joint(step: Compute, local: RankContext) -> Run:
            axes = step.axes_of("joint")
            if not axes:
                return plain(step, local)
            local.world.group(axes)  # created now, because all ranks must take part
            return builder(step, local, axes)

        return kernel(*names)(build_joint)

    return register


@dataclass(slots=True)
class Randomness:
    """Where random masks come from. Exact: drawn for the whole tensor and cut, equal under every split. Otherwise per shard."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    exact: bool = False

    def generator(self, device: torch.device, *where: object) -> torch.Generator:
        text = repr((self.seed, self.step, self.microbatch, *where)).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.Generator(device).manual_seed(number)


@dataclass(frozen=True)
class RankContext:
    """This rank as kernels see it: its place in the mesh, its dtypes, its random numbers."""

    world: World
    randomness: Randomness = field(default_factory=Randomness)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    _indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def index(self, rows: tuple[int, ...]) -> Tensor:
        """Rows as a tensor, copied to the device once."""
        if rows not in self._indices:
            self._indices[rows] = torch.tensor(rows, device=self.device)
        return self._indices[rows]

    @property
    def device(self) -> torch.device:
        return self.world.device

    def box(self, layout: Layout) -> tuple[IndexSet, ...]:
        return layout.box(self.world.coords)

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return layout.local_shape(self.world.coords)

    def cut(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a whole tensor."""
        return take(tensor, tuple(s.spans for s in self.box(layout)))

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes.get(name) or getattr(torch, name)

    def literal(self, value: Any) -> Any:
        """A captured argument as torch takes it."""

        def leaf(item: Any) -> Any:
            if isinstance(item, Dtype):
                return self.dtype(item.name)
            return self.device if isinstance(item, Device) else item

        return map_leaves(value, leaf)


class Arguments:
    """The call of an op with tensors filled in: parsed once, applied every step."""

    def __init__(self, step: Compute, local: RankContext) -> None:
        self.args = local.literal(step.op.args)
        self.kwargs = local.literal(step.op.kwargs)
        self.is_flat = not any(isinstance(a, (tuple, dict)) and _has_ref(a) for a in (*self.args, *self.kwargs.values()))
        self.positions = [i for i, a in enumerate(self.args) if isinstance(a, Ref)]
        self.keywords = [k for k, a in self.kwargs.items() if isinstance(a, Ref)]

    def fill(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        if not self.is_flat:
            it = iter(tensors)
            args = map_leaves(self.args, lambda leaf: next(it) if isinstance(leaf, Ref) else leaf)
            return list(args), map_leaves(self.kwargs, lambda leaf: next(it) if isinstance(leaf, Ref) else leaf)
        args = list(self.args)
        for position, tensor in zip(self.positions, tensors, strict=False):
            args[position] = tensor
        if not self.keywords:
            return args, self.kwargs
        kwargs = dict(self.kwargs)
        for name, tensor in zip(self.keywords, tensors[len(self.positions) :], strict=True):
            kwargs[name] = tensor
        return args, kwargs


def _has_ref(value: Any) -> bool:
    if isinstance(value, Ref):
        return True
    if isinstance(value, dict):
        return any(map(_has_ref, value.values()))
    return isinstance(value, tuple) and any(map(_has_ref, value))


def overload(target: str) -> Any:
    """The callable of a target such as ``aten.relu.default``, or of an op that the user registered."""
    library, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, library), name), variant)


class _Attach(torch.autograd.Function):
    """A value whose backward gives some tensors the gradient zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) if is_inexact(t) else None for t in tensors]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        zeros = [torch.zeros(k[0], dtype=k[1], device=k[2]) if k is not None else None for k in ctx.like]
        return grads[0], *zeros


def attach(value: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """`value` with `tensors` attached to its graph: its backward gives them the gradient zero."""
    if is_inexact(value) and any(t.requires_grad for t in tensors):
        return _Attach.apply(value, *tensors)  # type: ignore[no-untyped-call]
    return value


def build(step: Compute, local: RankContext) -> Run:
    """The function that runs this rank's share of a step."""
    shapes = [local.shape(layout) for layout in step.gives]
    collective = bool(step.axes_of("joint"))
    if not collective and step.op.operands and all(math.prod(shape) == 0 for shape in shapes) and shapes:
        return _build_empty(step, local, shapes)
    return _BUILDERS.get(step.nest.kernel, plain)(step, local)


def _build_empty(step: Compute, local: RankContext, shapes: list[tuple[int, ...]]) -> Run:
    specs = [_result_dtype(step, local, i) for i in range(len(shapes))]

    def run(*tensors: Tensor) -> Any:
        out = []
        for shape, name in zip(shapes, specs, strict=True):
            first = next((t for t in tensors if is_inexact(t)), None)
            dtype = first.dtype if first is not None and name is None else (name or torch.get_default_dtype())
            out.append(attach(torch.zeros(shape, dtype=dtype, device=local.device), tensors))
        return out[0] if len(out) == 1 and len(step.op.results) == 1 and not _returns_tuple(step) else tuple(out)

    return run


def _returns_tuple(step: Compute) -> bool:
    return step.op.results[0] != step.op.name


def _result_dtype(step: Compute, local: RankContext, index: int) -> torch.dtype | None:
    name = step.dtypes[index]
    return None if name.startswith("float") and name != "float64" and not local.dtypes else local.dtype(name)


@kernel("plain", "replicated")
def plain(step: Compute, local: RankContext) -> Run:
    arguments, call = Arguments(step, local), overload(step.op.target)
    all_tensors = arguments.positions == list(range(len(arguments.args)))
    if arguments.is_flat and all_tensors and not arguments.kwargs:
        return call

    def run(*tensors: Tensor) -> Any:
        args, kwargs = arguments.fill(tensors)
        return call(*args, **kwargs)

    return run


def is_split(step: Compute, loop: str) -> bool:
    """Whether some axis of more than one rank splits a loop (or one tied to it)."""
    tied = {other.name for other in step.nest.loops if other.tie and other.tie == step.nest.loop(loop).tie}
    return any(name == loop or name in tied for name in step.choice.values() if name is not None)


def adds_bias(step: Compute, local: RankContext) -> bool:
    """Whether this rank adds the bias: along the axes that split a summed loop only the first rank with a share does."""
    axes = step.axes_of("sum")
    if not axes:
        return True
    operand = next(i for i, dims in enumerate(step.nest.operands) if _holds(step, dims, axes))
    layout = step.needs[operand]
    mesh, mine = local.world.mesh, local.world.coords
    for rank in mesh.group(local.world.rank, axes):
        coords = mesh.coords(rank)
        if math.prod(layout.local_shape(coords)):
            return coords == mine
    return mine == mesh.coords(mesh.group(local.world.rank, axes)[0])


def _holds(step: Compute, dims: Any, axes: tuple[str, ...]) -> bool:
    loops = {step.choice[a] for a in axes}
    return all(any(loop in terms for terms in dims) for loop in loops)
