"""A graph's layers as ParaDL's formulas want them: what one sample costs on one device, and the sizes of its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.graph import Graph
from fourfold.graph.spec import computed_as
from fourfold.ops.nest import Nest, Window
from fourfold.ops.window import SlidingWindow
from fourfold.oracle.prices.kernels import FREE_TARGETS, kernel_of
from fourfold.oracle.prices.prices import Prices
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lowering.lower import lower
from fourfold.plans.lowering.program import Compute
from fourfold.plans.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One op that does something. Counts are of numbers, not bytes; `inputs`, `outputs` and halos of one sample."""

    path: str
    forward: float = 0.0  # seconds of one sample
    backward: float = 0.0
    update: float = 0.0  # seconds of a step
    weights: int = 0
    inputs: float = 0.0
    outputs: float = 0.0
    halo_inputs: float = 0.0  # on one side, the first domain dim being split
    halo_outputs: float = 0.0
    filters: int = 0  # 0 where filters, channels or places do not exist
    channels: int = 0
    places: int = 0  # W_l H_l: output positions

    @property
    def split(self) -> bool:
        """Whether a filter or channel split divides its weights and so exchanges its outputs."""
        return bool(self.weights and self.filters)


def layers_of(graph: Graph, batch: int, prices: Prices, *, optimizer: str) -> tuple[Layer, ...]:
    """The layers with the prices of this batch on one device, by sample."""
    program = lower(graph, Plan(graph=graph.hash, batch=batch, mesh=Mesh.of(data=1), inputs={"data": "batch"}))
    concrete = program.graph
    trained = {p.name for p in concrete.parameters if p.trainable}
    stored = {p.name for p in concrete.parameters} | {c.name for c in concrete.constants}
    live = dict.fromkeys(concrete.reached & _dependent(concrete, trained), True)
    seen: set[str] = set()
    out = []
    for step in program.computes():
        if step.op.target.startswith(FREE_TARGETS) or step.op.name not in concrete.dependent:
            continue
        own = [name for name in step.op.operands if name in trained and name not in seen]
        seen.update(own)
        out.append(_layer(step, concrete, batch, prices, live, own, stored, optimizer))
    return tuple(out)


def _dependent(graph: Graph, trained: set[str]) -> set[str]:
    """Values that depend on a trained parameter, and so have a gradient if the loss reads them."""
    known = set(trained)
    for op in graph.ops:
        if known & set(op.operands) and not op.target.startswith("aten.detach"):
            known.update(name for name in op.results if graph.values[name].is_float)
    return known


def _layer(
    step: Compute,
    graph: Graph,
    batch: int,
    prices: Prices,
    live: dict[str, bool],
    own: list[str],
    stored: set[str],
    optimizer: str,
) -> Layer:
    dtypes = computed_as(prices.precision)
    kernel = kernel_of(step, graph, {"data": 0}, live, dtypes)
    time, values, nest = prices.kernel(kernel, 0), graph.values, step.nest
    weights = sum(values[name].numel for name in own)
    width = sum(spec.bytes for name, spec in zip(step.op.operands, kernel.operands, strict=True) if name in own)
    inputs = sum(values[name].numel for name in step.op.operands if name not in stored) / batch
    outputs = values[step.op.results[0]].numel / batch
    before, after = _halo(nest, values[step.op.operands[0]].shape, values[step.op.results[0]].shape)
    return Layer(
        path=step.op.path,
        forward=time.forward / batch,
        backward=time.backward / batch if any(kernel.gradients) else 0.0,
        update=prices.update(optimizer, float(width), 0) if width else 0.0,
        weights=weights,
        inputs=inputs,
        outputs=outputs,
        halo_inputs=before / batch,
        halo_outputs=after / batch,
        filters=_size(nest, "filter") if nest.anchor and own else 0,
        channels=_size(nest, "channel") if nest.anchor and own else 0,
        places=_places(nest) if nest.anchor else 0,
    )


def _size(nest: Nest, label: str) -> int:
    return max((loop.size // loop.unit // loop.outer for loop in nest.loops_with_label(label)), default=0)


def _places(nest: Nest) -> int:
    """Output positions of a layer with domain dims."""
    sizes = [loop.size for loop in nest.loops if any(label.startswith("domain:") for label in loop.labels)]
    return math.prod(sizes) if sizes else 0


def _halo(nest: Nest, x: tuple[int, ...], y: tuple[int, ...]) -> tuple[float, float]:
    """Numbers in floor(k/2) border rows of input and output, k the window along the first domain dim."""
    for dim, terms in enumerate(nest.operands[0] if nest.operands else ()):
        for term in terms:
            if isinstance(term, Window) and isinstance(term.need, SlidingWindow) and "domain:0" in nest.loop(term.loop).labels:
                rows = term.need.dilation * (term.need.kernel - 1) // 2
                return rows * math.prod(x) / x[dim], rows * math.prod(y) / max(y[dim], 1)
    return 0.0, 0.0
