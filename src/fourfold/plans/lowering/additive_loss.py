"""The loss of a batch as a sum over its micro-batches: exactly, or a refusal.

A captured loss ends in a *tail*: ops that are linear in a few *terms*, each a reduction over the batch. Every mean among the
terms becomes the sum over the micro-batch times a scale that is fed: one over the number of elements in the whole batch, or
over what the loss itself divides by (class-index cross entropy counts the targets it does not ignore, weighted). What
does not depend on the batch is divided by the number of micro-batches. Then the losses of the micro-batches, and their
gradients, add up to those of the batch. `samples` sees to it that below the terms every sample is on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import Infeasible
from fourfold.graph import Graph, Op, Ref
from fourfold.graph.spec import map_leaves, with_batch
from fourfold.ops.loss import MEAN, SUM
from fourfold.ops.nest import Nest, nest_of
from fourfold.plans.lowering.loss_counts import Counts
from fourfold.plans.lowering.loss_writer import LossWriter
from fourfold.plans.lowering.sample_dims import Mixed, Samples, Spread, ancestors, kind_of

_ADDITIVE = (
    "add",
    "sub",
    "rsub",
    "neg",
    "clone",
    "alias",
    "contiguous",
    "detach",
    "to",
    "_to_copy",
    "view",
    "reshape",
    "cat",
    "flatten",
    "squeeze",
    "unsqueeze",
    "stack",
    "sum",
    "mean",
    "permute",
    "transpose",
    "t",
    "expand",
    "select",
)
"""Ops linear in all their tensors together; numbers beside them are added."""
_SCALING = ("mul", "div", "dot", "mv", "mm", "matmul")
"""Ops linear in one tensor, the others being factors."""
_SUMMING = ("sum", "mm", "bmm", "matmul", "einsum")
"""Ops that plainly add up over a `sum` loop."""


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """A graph whose losses over micro-batches add up to the loss of the batch.

    `scales` are scalar inputs appended to the graph's targets. Those in `fixed` have a known value; a scale in `counted` is one
    over the sum, over all micro-batches, of the output of that name of `counts`, a graph of inputs and targets without a loss.
    """

    graph: Graph
    scales: tuple[str, ...] = ()
    fixed: Mapping[str, float]
    counts: Graph | None = None
    counted: Mapping[str, str]
    notes: tuple[str, ...] = ()


def microbatch_loss(graph: Graph, batch: int, microbatches: int) -> MicroLoss:
    """The loss of a batch of this size in this many micro-batches; refuses a loss that is no sum over samples. The same value
    each time, with what was derived from its graph."""
    known: dict[tuple[int, int], MicroLoss] = graph.memo.setdefault("microbatched", {})
    if (batch, microbatches) not in known:
        known[batch, microbatches] = _microbatched(graph, batch, microbatches)
    return known[batch, microbatches]


def _microbatched(graph: Graph, batch: int, microbatches: int) -> MicroLoss:
    if microbatches == 1:
        return MicroLoss(graph=graph, fixed={}, counted={})
    if graph.batch is not None:
        raise Infeasible(
            f"the model fixes its batch at {graph.batch}, so {microbatches} micro-batches cannot be smaller; use 1 micro-batch"
        )
    tail = _Tail(graph, batch, microbatches)
    loss = tail.share(graph.loss)
    notes = _notes(tail.samples, graph, batch // microbatches)
    return tail.micro_loss(loss, notes)


def _refused(why: str) -> Infeasible:
    return Infeasible(f"{why}, so the loss is not a sum over micro-batches; use 1 micro-batch")


class _Tail:
    """Rewrites the tail of a loss, from the loss back to the terms."""

    def __init__(self, graph: Graph, batch: int, microbatches: int, writer: LossWriter | None = None) -> None:
        self.graph, self.batch, self.microbatches = graph, batch, microbatches
        self.concrete, self.samples = graph.at(batch), Samples(graph)
        self.shares: dict[str, str] = {}
        self.numbers: dict[str, str] = {}
        self.counts = Counts(graph)
        self.at = {op.name: op for op in self.concrete.ops}
        self.probed = {op.name: op for op in self.samples.probe.ops}
        # What mixes samples cannot be an output any more.
        self.outputs = tuple(n for n in graph.outputs if not isinstance(self.samples.states.get(n), Mixed))
        self.writer = writer or LossWriter(graph, ancestors(graph, [*self.outputs, *(value for _, value in graph.writes)]))

    def share(self, name: str) -> str:
        """The new value that adds up, over micro-batches, to the named one over the batch."""
        if name not in self.shares:
            state = self.samples.states[name]
            number = self._number(name)
            if number is not None:
                self.shares[name] = self.writer.scale(self.graph.producer.get(name), number, 1 / self.microbatches)
            elif self.samples.sized(name) or name not in self.graph.producer:
                assert isinstance(state, Mixed)
                raise _refused(state.why)
            else:
                self.shares[name] = self._rewritten(self.graph.producer[name], name)
        return self.shares[name]

    def _number(self, name: str) -> str | None:
        """A value that the batch does not change but by its size, with the size of the whole batch in it; None for others."""
        if self.samples.states[name] is None:
            return name
        op = self.graph.producer.get(name)
        if op is None or self.samples.sized(name) or len(op.results) > 1:
            return None
        if name not in self.numbers:
            named = {n: self._number(n) for n in op.operands}
            if None in named.values():
                return None
            args, kwargs = (with_batch(_renamed(literal, named), self.batch) for literal in (op.args, op.kwargs))
            self.numbers[name] = self.writer.replace(op, replace(op, args=args, kwargs=kwargs))
        return self.numbers[name]

    def _rewritten(self, op: Op, name: str) -> str:
        states = [self.samples.states[n] for n in op.operands]
        if any(isinstance(state, Spread) for state in states):
            return self._term(op)
        if len(op.results) == 1 and self.graph.values[name].is_float and kind_of(op) in _ADDITIVE:
            return self._added(op)
        if len(op.results) == 1 and kind_of(op) in _SCALING and not op.kwargs.get("rounding_mode"):
            return self._multiplied(op)
        raise self._not_linear(op)

    def _not_linear(self, op: Op) -> Infeasible:
        """The refusal of an op of the tail, unless what it reads is at fault already."""
        for name in op.operands:
            self.share(name)
        return _refused(f"{op.path} ({op.target}) is not linear in a sum over the batch")

    def _added(self, op: Op) -> str:
        """A linear op: every tensor and every number gives its share."""
        named = {n: self.share(n) for n in op.operands}
        args, kwargs = (with_batch(_renamed(literal, named), self.batch) for literal in (op.args, op.kwargs))
        if kind_of(op) in ("add", "sub", "rsub"):
            args = tuple(a / self.microbatches if isinstance(a, (int, float)) and i < 2 else a for i, a in enumerate(args))
        return self.writer.replace(op, replace(op, args=args, kwargs=kwargs))

    def _multiplied(self, op: Op) -> str:
        """A product or quotient: the one factor that is a sum over the batch gives its share."""
        numbers = {n: self._number(n) for n in op.operands}
        sums = [n for n in op.operands if numbers[n] is None]
        if kind_of(op) == "div" and len(sums) == 2:
            return self._divided(op, *op.operands)
        first = op.args[0].name if isinstance(op.args[0], Ref) else ""
        if len(sums) != 1 or (kind_of(op) == "div" and first != sums[0]):
            raise self._not_linear(op)
        args = with_batch(_renamed(op.args, {**numbers, sums[0]: self.share(sums[0])}), self.batch)
        return self.writer.replace(op, replace(op, args=args))

    def _term(self, op: Op) -> str:
        """A reduction over the batch, as a sum."""
        found = self.samples.loop(op, self.probed[op.name])
        mixed = next((s for s in map(self.samples.states.get, op.operands) if isinstance(s, Mixed)), None)
        if mixed is not None or isinstance(found, Mixed):
            raise _refused((mixed or found).why)  # type: ignore[union-attr]
        nest = nest_of(self.at[op.name], self.concrete)
        kind = kind_of(op)
        if found[0].kind == "sum" and kind == "mean":
            overload = "default" if op.target == "aten.mean.default" else "dim_IntList"
            total = replace(op, target=f"aten.sum.{overload}")
            return self.writer.scale(op, self.writer.replace(op, total), 1 / nest.detail["count"])
        if found[0].kind == "sum" and kind in _SUMMING:
            return self.writer.replace(op, op)
        if found[0].kind == "sum" and nest.kernel in ("elementwise_loss", "cross_entropy"):
            return self._loss(op, nest)
        raise _refused(f"{op.path} mixes samples")

    def _loss(self, op: Op, nest: Nest) -> str:
        if nest.detail["reduction"] == SUM:
            return self.writer.replace(op, op)
        assert nest.detail["reduction"] == MEAN
        if nest.kernel == "elementwise_loss":
            total = self.writer.replace(op, _summed(op, nest.detail["position"]))
            return self.writer.scale(op, total, 1 / nest.detail["count"])
        total = self.writer.replace(op, _summed(op, 3))
        if nest.detail["soft"]:
            x = self.concrete.values[op.operands[0]].shape
            return self.writer.scale(op, total, x[1] / math.prod(x))
        return self.writer.scale(op, total, self._count(op, nest))

    def _count(self, op: Op, nest: Nest) -> str:
        if not self.counts.known(op.operands[1:]):
            raise _refused(f"{op.path} divides by a number of targets that the network itself decides")
        return self.counts.of_targets(op, nest)

    def _divided(self, op: Op, above: str, below: str) -> str:
        """A sum over the batch divided by another that follows from the data alone: the sum of a mask, say."""
        scalar = self.graph.values[below].shape == () and self.graph.values[above].is_float
        if not scalar or not self.counts.known([below]):
            raise self._not_linear(op)
        inner = _Tail(self.graph, self.batch, self.microbatches, LossWriter(self.graph, self.graph.values, self.writer.values))
        count = inner.share(below)
        if inner.writer.counted:
            raise self._not_linear(op)
        self.counts.add(inner.writer.ops, self.writer.values, inner.writer.fixed)
        return self.writer.scale(op, self.share(above), count)

    def micro_loss(self, loss: str, notes: tuple[str, ...]) -> MicroLoss:
        """The rewritten graph, whose loss is this value."""
        dropped = [n for n in self.graph.outputs if n not in self.outputs]
        if dropped:
            notes = (*notes, f"outputs that mix samples are not given under micro-batches: {', '.join(dropped)}")
        return MicroLoss(
            graph=self.writer.rewritten(loss, self.outputs),
            scales=self.writer.scales,
            fixed=self.writer.fixed,
            counts=self.counts.finished(self.writer.counted.values()),
            counted=self.writer.counted,
            notes=notes,
        )


def _summed(op: Op, position: int) -> Op:
    """A loss with its reduction set to the sum."""
    if len(op.args) > position:
        return replace(op, args=(*op.args[:position], SUM, *op.args[position + 1 :]))
    return replace(op, kwargs={**op.kwargs, "reduction": SUM})


def _renamed(literal: Any, names: Mapping[str, str | None]) -> Any:
    """A literal with its references renamed."""
    return map_leaves(literal, lambda leaf: Ref(names.get(leaf.name) or leaf.name) if isinstance(leaf, Ref) else leaf)


def _notes(samples: Samples, graph: Graph, smallest: int) -> tuple[str, ...]:
    """What is done per micro-batch that a whole batch would do once; refuses norms left with nothing to take statistics of."""
    upstream = ancestors(graph, [graph.loss])
    norms = [op for op in samples.norms if op.results[0] in upstream]
    for op in norms:
        shape = graph.at(smallest).values[op.operands[0]].shape
        if kind_of(op) == "batch_norm" and math.prod(shape) == shape[1]:
            raise Infeasible(
                f"{op.path} would take its statistics of 1 value per channel in a micro-batch of {smallest}; "
                "use fewer micro-batches"
            )
    shared = [op for op in samples.probe.ops if upstream & set(op.results) and samples.states[op.results[0]] is None]
    drawn = [op for op in shared if nest_of(op, samples.probe).kernel == "random"]
    tracked = {op.module for op in samples.norms}
    makers = [graph.producer[value] for _, value in graph.writes if value in graph.producer]
    kinds = (
        ("batch norm", [op for op in norms if kind_of(op) == "batch_norm"], "takes its statistics"),
        ("instance norm", [op for op in norms if kind_of(op) == "instance_norm"], "updates its running statistics"),
        ("noise that all samples share", drawn, "is drawn"),
        ("a buffer", [op for op in makers if op.module not in tracked], "is updated"),
    )
    return tuple(
        f"{name} ({_named(found)}) {does} per micro-batch, as one device with the same micro-batches would"
        for name, found, does in kinds
        if found
    )


def _named(ops: list[Op]) -> str:
    return (ops[0].module or ops[0].name) + (f" and {len(ops) - 1} more" if len(ops) > 1 else "")
