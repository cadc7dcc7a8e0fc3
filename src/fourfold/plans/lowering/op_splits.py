"""Which splits an op gets besides those that the plan states for it, before its layouts are worked out.

A rule of a plan may cover ops that lack the split; an op that cannot pass a partial sum may divide its features instead; and
the nest of an anchor may have to be cut at whole heads, groups or gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Nest, intern_nest, nest_of
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lowering.dim_hints import Hints


def applicable_splits(nest: Nest, explicit: Mapping[str, str]) -> dict[str, str]:
    """Of the splits that a rule of the plan states, those this op has; along the other axes it follows its inputs."""
    return {a: s for a, s in explicit.items() if s == "replicate" or nest.loops_with_label(s)}


def scattered_splits(
    op: Op, nest: Nest, given: list[Layout | None], splits: Mapping[str, str], graph: Graph, mesh: Mesh
) -> dict[str, str]:
    """The axes along which an operand is partial and the op, which cannot pass a partial sum, is split by features: the sum is
    then a reduce-scatter, which moves half the bytes of an all-reduce. `given`: layouts of the operands, None for free ones."""
    out: dict[str, str] = {}
    if nest.anchor:
        return out
    for axis in mesh.names:
        for i, (name, layout) in enumerate(zip(op.operands, given, strict=True)):
            if layout is None or axis not in layout.partial or axis in splits or i in nest.linear:
                continue
            loop = _feature_loop(nest, i, name, graph, mesh.extent(axis))
            if loop is not None:
                out[axis] = loop
    return out


def _feature_loop(nest: Nest, operand: int, name: str, graph: Graph, extent: int) -> str | None:
    """The split of an op along the feature dim of an operand that a matrix product makes; None if it has none so wide."""
    producer = graph.producer.get(name)
    if producer is None:
        return None
    source = nest_of(producer, graph)
    features = {loop.name for loop in source.loops_with_label("filter")}
    dims = [d for d, terms in enumerate(source.results[0]) if features & set(terms)]
    if not dims or len(nest.operands[operand][dims[0]]) != 1:
        return None
    term = nest.operands[operand][dims[0]][0]
    if not isinstance(term, str) or nest.loop(term).kind != "map" or nest.loop(term).size < extent:
        return None
    return f"loop:{term}"


def nest_with_hints(op: Op, graph: Graph, by_value: Hints) -> Nest:
    """The op's nest, its loops cut as `dim_hints.block_hints` says of its result."""
    nest = nest_of(op, graph)
    hints = by_value.get(op.results[0], {}) if nest.anchor else {}
    if not hints:
        return nest
    loops = {loop.name: loop for loop in nest.loops}
    for dim, (outer, unit) in hints.items():
        terms = nest.results[0][dim]
        if len(terms) == 1 and isinstance(terms[0], str) and loops[terms[0]].size % (outer * unit) == 0:
            loops[terms[0]] = replace(loops[terms[0]], outer=outer, unit=unit)
    return intern_nest(replace(nest, loops=tuple(loops.values())), graph)
