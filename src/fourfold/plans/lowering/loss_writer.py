"""Writes the graph of a micro-batch's loss: new ops in the place of old ones, and products with scalar inputs, the scales."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fourfold.graph import Graph, Op, Ref, TensorSpec
from fourfold.plans.lowering.loss_counts import used


class LossWriter:
    """Collects new ops by the op they replace or follow. `keep`: values that stay as they are. A scale in `fixed` has a known
    value, one in `counted` is one over a count of that name. Writers that share `values` give no name twice."""

    def __init__(self, graph: Graph, keep: Collection[str], values: dict[str, TensorSpec] | None = None) -> None:
        self.graph, self.keep = graph, keep
        self.values = dict(graph.values) if values is None else values
        self.fixed: dict[str, float] = {}
        self.counted: dict[str, str] = {}
        self.ops: list[Op] = []
        self._by_place: dict[str, list[Op]] = {}

    @property
    def scales(self) -> tuple[str, ...]:
        return (*self.fixed, *self.counted)

    def replace(self, op: Op, instead: Op) -> str:
        """Put an op where another stood, under its name unless the other stays too; the name of its result."""
        if not set(op.results).isdisjoint(self.keep):
            name = self._fresh(f"{op.name}_share")
            self.values[name] = self.values[op.results[0]]
            instead = replace(instead, name=name, results=(name,))
        self._put(op.name, instead)
        return instead.results[0]

    def scale(self, op: Op | None, value: str, by: float | str) -> str:
        """Put the product of a value and a new scale behind an op, or first of all; the name of the product. `by`: a number,
        or the name of a count that divides."""
        spec = self.values[value]
        spec = spec if spec.is_float else TensorSpec(spec.shape, "float32")
        scale, result = self._fresh(f"{value}_scale"), self._fresh(f"{value}_scaled")
        self.values[scale], self.values[result] = TensorSpec((), spec.dtype), spec
        product = Op(
            name=result,
            target="aten.mul.Tensor",
            args=(Ref(value), Ref(scale)),
            kwargs={},
            results=(result,),
            module=op.module if op is not None else "",
            pointwise=True,
        )
        self._put(op.name if op is not None else "", product)
        if isinstance(by, str):
            self.counted[scale] = by
        else:
            self.fixed[scale] = by
        return result

    def rewritten(self, loss: str, outputs: Sequence[str]) -> Graph:
        """The graph with the new ops and this loss, the scales behind its targets."""
        ops = list(self._by_place.get("", ()))
        for op in self.graph.ops:
            new = self._by_place.get(op.name, [])
            ops += new if any(other.name == op.name for other in new) else [op, *new]
        writes = [value for _, value in self.graph.writes]
        return replace(
            self.graph,
            values=self.values,
            targets=(*self.graph.targets, *self.scales),
            ops=used(ops, [loss, *outputs, *writes]),
            loss=loss,
            outputs=tuple(outputs),
        )

    def _put(self, place: str, op: Op) -> None:
        self._by_place.setdefault(place, []).append(op)
        self.ops.append(op)

    def _fresh(self, name: str) -> str:
        taken = {*self.values, *(op.name for op in self.graph.ops)}
        while name in taken:
            name += "_"
        return name
