"""What a loss divides by, over a whole batch, before the first micro-batch runs: a small graph of the data alone.

Class-index losses divide by the number of targets they do not ignore, or by the weights of those targets' classes; masked
ones by the sum of a mask. Both add up over micro-batches. They must not depend on what the network answers: that is not
known yet, and a gradient would flow through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fourfold.graph import Graph, Op, Ref, TensorSpec
from fourfold.graph.spec import map_leaves
from fourfold.ops.nest import Nest
from fourfold.plans.lowering.sample_dims import ancestors


class Counts:
    """The ops of the denominators, collected."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[str, TensorSpec] = {}
        self.ops: list[Op] = []

    def known(self, names: Iterable[str]) -> bool:
        """Whether values follow from the data alone."""
        upstream = ancestors(self.graph, names)
        drawn = {n for op in self.graph.ops if op.random for n in op.results}
        return not upstream & (drawn | {p.name for p in self.graph.parameters if p.trainable})

    def of_targets(self, op: Op, nest: Nest) -> str:
        """What a class-index loss divides by."""
        target, *weight = op.operands[1:]
        shape, base = self.graph.values[target].shape, f"{op.name}_count"
        valid = self._put(op, f"{base}_valid", "aten.ne.Scalar", (Ref(target), nest.detail["ignore"]), (shape, "bool"))
        if not weight:
            return self._put(op, base, "aten.sum.default", (Ref(valid),), ((), "int64"))
        kind = self.graph.values[weight[0]].dtype
        safe = self._put(op, f"{base}_safe", "aten.where.ScalarOther", (Ref(valid), Ref(target), 0), (shape, "int64"))
        each = self._put(op, f"{base}_each", "aten.index.Tensor", (Ref(weight[0]), (Ref(safe),)), (shape, kind))
        used = self._put(op, f"{base}_used", "aten.mul.Tensor", (Ref(each), Ref(valid)), (shape, kind))
        return self._put(op, base, "aten.sum.default", (Ref(used),), ((), kind))

    def _put(self, op: Op, name: str, target: str, args: tuple[Any, ...], spec: tuple[tuple[Any, ...], str]) -> str:
        while name in self.graph.values or name in self.values:
            name += "_"
        self.values[name] = TensorSpec(*spec)
        pointwise = target.split(".")[1] in ("ne", "where", "mul")
        self.ops.append(
            Op(name=name, target=target, args=args, kwargs={}, results=(name,), module=op.module, pointwise=pointwise)
        )
        return name

    def add(self, ops: Iterable[Op], values: Mapping[str, TensorSpec], numbers: Mapping[str, float]) -> None:
        """Take over the ops of a sum, with the numbers of its scales put in."""

        def put_in(leaf: Any) -> Any:
            return numbers[leaf.name] if isinstance(leaf, Ref) and leaf.name in numbers else leaf

        for op in ops:
            self.ops.append(replace(op, args=map_leaves(op.args, put_in)))
            self.values.update({name: values[name] for name in op.results})

    def finished(self, outputs: Iterable[str]) -> Graph | None:
        """The graph of the denominators, from as few inputs as they need; None if there are none."""
        outputs = tuple(dict.fromkeys(outputs))
        if not outputs:
            return None
        ops = used([*self.graph.ops, *self.ops], outputs)
        read = {n for op in ops for n in (*op.operands, *op.results)}
        return replace(
            self.graph,
            values={n: spec for n, spec in {**self.graph.values, **self.values}.items() if n in read},
            inputs=tuple(n for n in self.graph.inputs if n in read),
            targets=tuple(n for n in self.graph.targets if n in read),
            parameters=tuple(p for p in self.graph.parameters if p.name in read),
            constants=tuple(c for c in self.graph.constants if c.name in read),
            ops=ops,
            loss="",
            outputs=outputs,
            writes=(),
            aliases=(),
        )


def used(ops: Iterable[Op], wanted: Iterable[str]) -> tuple[Op, ...]:
    """The ops that the wanted values are made by, in order."""
    needed, kept = set(wanted), []
    for op in reversed(list(ops)):
        if needed & set(op.results):
            needed.update(op.operands)
            kept.append(op)
    return tuple(reversed(kept))
