"""Redundant work and memory: what ranks compute or hold beyond an ideal division of the plan.

Work: a kernel split over n ranks ideally takes 1/n of the whole kernel's time; it does not (launches, operands that are not
split, small shapes), and an op that an axis does not split is done by all of its ranks. Bytes: an even division leaves a
rank 1/n of every tensor. Both are told of a stage's first rank, which has the largest shards.

Left out: what the allocator and workspaces take; activations of segments that are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fourfold.graph.spec import ITEM_BYTES, TensorSpec, computed_as, item_bytes
from fourfold.optimizers import OPTIMIZERS
from fourfold.oracle.prices.kernels import Kernel, kernel_of
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.lowered_plan import LoweredStage
from fourfold.plans.lowering.program import Compute, Program, Step, inside


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKernel:
    """One op of a stage, forward and backward of a micro-batch: seconds on one rank and of the whole kernel on one device."""

    path: str
    local: float
    whole: float
    split: int  # ranks the kernel is divided over
    copies: int  # ranks that do the same

    @property
    def excess(self) -> float:
        """Seconds past an ideal division over the ranks that divide it."""
        return self.local - self.whole / self.split

    @property
    def repeated(self) -> float:
        """Seconds an ideal division over the others would save."""
        return self.local * (1 - 1 / self.copies)


def split_kernels(part: LoweredStage, prices: Prices, live: frozenset[str]) -> list[SplitKernel]:
    """The kernels of a stage and their times unsplit. If only one of the two was measured, both are priced by formula."""
    program, rank = part.program, part.stage.ranks[0]
    coords = program.mesh.coords(0)
    gradients = dict.fromkeys(live, True)
    dtypes = computed_as(prices.precision)
    formula = replace(prices, kernels={})
    out = []
    for step in steps_of(program.steps):
        local_kernel = kernel_of(step, program.graph, coords, gradients, dtypes)
        kernels = local_kernel, _unsplit(local_kernel, step)
        times = [prices.kernel(kernel, rank) for kernel in kernels]
        if times[0].source != times[1].source:
            times = [formula.kernel(kernel, rank) for kernel in kernels]
        local, whole = (_seconds(t, any(k.gradients)) for t, k in zip(times, kernels, strict=True))
        split = _extent(program.mesh, step.split_axes)
        out.append(SplitKernel(path=step.op.path, local=local, whole=whole, split=split, copies=program.mesh.size // split))
    return out


def _seconds(time: KernelTime, backward: bool) -> float:
    return time.forward + (time.backward if backward else 0.0)


def _extent(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.extent(axis) for axis in axes)


def _unsplit(kernel: Kernel, step: Compute) -> Kernel:
    """The same op on the whole tensors."""
    operands = tuple(TensorSpec(need.shape, spec.dtype) for need, spec in zip(step.needs, kernel.operands, strict=True))
    results = tuple(TensorSpec(give.shape, spec.dtype) for give, spec in zip(step.gives, kernel.results, strict=True))
    return replace(kernel, way=step.nest.kernel, operands=operands, results=results, flops=float(step.nest.flops))


def steps_of(steps: Iterable[Step]) -> Iterator[Compute]:
    """All compute steps, those of passes once for each."""
    return (inner for step in steps for inner in inside(step) if isinstance(inner, Compute))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor one rank has throughout (weights, gradients, optimizer) or until backward (activations), and all of it."""

    kind: str
    local: int  # bytes
    whole: int
    count: int = 1  # such tensors at a time

    def repeated(self, ranks: int) -> float:
        """Bytes beyond an even division."""
        return self.count * max(self.local - self.whole / ranks, 0.0)


def held_tensors(part: LoweredStage, optimizer: str, in_flight: int, precision: str) -> list[HeldTensor]:
    """The tensors of a stage's first rank. `in_flight`: micro-batches between forward and backward."""
    sizes = {dtype: item_bytes(dtype, precision) for dtype in ITEM_BYTES}
    return [*_stored(part, optimizer, sizes), *_saved(part.program, in_flight, sizes)]


def _stored(part: LoweredStage, optimizer: str, sizes: Mapping[str, int]) -> Iterator[HeldTensor]:
    program, values = part.program, part.program.graph.values
    coords = program.mesh.coords(0)
    trained = {p.name for p in program.graph.parameters if p.trainable}
    for parameter in program.graph.parameters:
        layout = program.stored.get(parameter.name)
        if layout is None:
            continue
        local, whole = _bytes(layout, coords, sizes[values[parameter.name].dtype])
        yield HeldTensor(kind="weights", local=local, whole=whole)
        if parameter.name in trained:
            yield HeldTensor(kind="gradients", local=local, whole=whole)
    for name, layout in program.updates.items():
        if OPTIMIZERS[optimizer].state:
            local, whole = _bytes(layout, coords, sizes[values[name].dtype])
            yield HeldTensor(kind="optimizer", local=local, whole=whole, count=OPTIMIZERS[optimizer].state)


def _saved(program: Program, in_flight: int, sizes: Mapping[str, int]) -> Iterator[HeldTensor]:
    """What ops keep for backward by their rules, each slot once."""
    coords, values = program.mesh.coords(0), program.graph.values
    seen: set[str] = set(program.stored)
    again = {k for low, high in program.segments for k in range(low, high)}
    for step in steps_of(step for k, step in enumerate(program.steps) if k not in again):
        operands = [*zip(step.inputs, step.op.operands, step.needs, (values[n].dtype for n in step.op.operands), strict=True)]
        results = [*zip(step.outputs, step.op.results, step.gives, step.dtypes, strict=True)]
        for k in step.nest.saved:
            slot, name, layout, dtype = operands[k] if k >= 0 else results[-k - 1]
            if slot not in seen and name not in program.stored:  # weights that are gathered are let go after forward
                seen.add(slot)
                local, whole = _bytes(layout, coords, sizes[dtype])
                yield HeldTensor(kind="activations", local=local, whole=whole, count=in_flight)


def _bytes(layout: Layout, coords: dict[str, int], size: int) -> tuple[int, int]:
    """Of one rank's part and of the whole."""
    return math.prod(layout.local_shape(coords)) * size, math.prod(layout.shape) * size
