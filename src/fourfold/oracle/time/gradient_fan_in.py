"""Sums of gradients: a value that several ops read gets a gradient from each, and the engine adds them up, one kernel each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fourfold.graph.spec import TensorSpec
from fourfold.oracle.prices.kernels import Kernel
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lowering.program import Compute, Program, Repeat


def sum_kernel(spec: TensorSpec) -> Kernel:
    """Two gradients of a shape added."""
    return Kernel(
        target="aten.add.Tensor",
        way="gradients",
        arguments="",
        operands=(spec, spec),
        results=(spec,),
        gradients=(False, False),
        flops=float(spec.numel),
    )


def gradient_sums(
    program: Program, coords: Coords, live: frozenset[str], dtypes: Mapping[str, str]
) -> Iterator[tuple[str, Kernel]]:
    """Every sum of two gradients that backward makes on one rank, with the value whose gradient it is."""
    count: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for step in program.steps:
        for inner in step.bodies[0] if isinstance(step, Repeat) else (step,):
            if isinstance(inner, Compute) and any(result in live for result in inner.op.results):
                for name, need in zip(inner.op.operands, inner.needs, strict=True):
                    if name in live:
                        count[name] = count.get(name, 0) + 1
                        shapes.setdefault(name, need.local_shape(coords))
    for name, times in count.items():
        dtype = program.graph.values[name].dtype
        for _ in range(times - 1):
            yield name, sum_kernel(TensorSpec(shapes[name], dtypes.get(dtype, dtype)))
