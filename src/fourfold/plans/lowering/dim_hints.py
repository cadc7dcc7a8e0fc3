"""What later ops need of a dim, read off the graph before lowering: backwards for blocks, forwards for the domain.

`block_hints`: how to cut the output features of a product so that the heads, groups, chunks or gates it holds stay whole:
a dim is `outer` equal blocks, each cut at multiples of `unit` (fused QKV of 12 heads of 64: outer 3, unit 64).
`domain_dims`: which dims of an input are the domain, by the first op that says so.
"""

from __future__ import annotations

import math

from fourfold.graph import Graph
from fourfold.ops.nest import Concat, Nest, Window, nest_of

Hints = dict[str, dict[int, tuple[int, int]]]


def block_hints(graph: Graph) -> Hints:
    """The hints of a graph, found once."""
    if "hints" not in graph.memo:
        graph.memo["hints"] = _block_hints(graph)
    hints: Hints = graph.memo["hints"]
    return hints


def _block_hints(graph: Graph) -> Hints:
    hints: Hints = {}
    for op in reversed(graph.ops):
        nest = nest_of(op, graph)
        if nest.anchor and not any(len(terms) > 1 for dims in nest.operands for terms in dims):
            continue
        for name, dims in zip(op.operands, nest.operands, strict=True):
            for dim, terms in enumerate(dims):
                found = _hint(nest, terms, op.results, hints)
                if found != (1, 1):
                    hints.setdefault(name, {}).setdefault(dim, found)
    return hints


def _hint(nest: Nest, terms: tuple[object, ...], results: tuple[str, ...], hints: Hints) -> tuple[int, int]:
    if not terms:
        return (1, 1)
    first = terms[0]
    if isinstance(first, Concat) and len(terms) == 1:
        sizes = {nest.loop(name).size for name in first.loops}
        if len(sizes) != 1:
            return (1, 1)
        outer, unit = _downstream(nest, first.loops[0], results, hints)
        return outer * len(first.loops), unit
    if isinstance(first, int) and len(terms) == 2 and isinstance(terms[1], str):
        outer, unit = _downstream(nest, terms[1], results, hints)
        return outer * first, unit
    if not isinstance(first, str):
        return (1, 1)
    outer, unit = _downstream(nest, first, results, hints)
    inner = math.prod(t if isinstance(t, int) else nest.loop(t).size for t in terms[1:] if isinstance(t, (int, str)))
    if nest.anchor:
        outer, unit = 1, 1
    return outer, unit * inner


def _downstream(nest: Nest, loop: str, results: tuple[str, ...], hints: Hints) -> tuple[int, int]:
    for name, dims in zip(results, nest.results, strict=True):
        for dim, terms in enumerate(dims):
            if terms == (loop,) and dim in hints.get(name, {}):
                return hints[name][dim]
    return (1, 1)


def domain_dims(graph: Graph, name: str) -> dict[str, int]:
    """``domain:i`` -> dim of an input."""
    found: dict[str, dict[str, int]] = graph.memo.setdefault("domains", {})
    if name not in found:
        found[name] = _domain_dims(graph, name)
    return found[name]


def _domain_dims(graph: Graph, name: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for dim in range(len(graph.values[name].shape)):
        label = _first_label(graph, name, dim)
        if label is not None and label.startswith("domain:"):
            out.setdefault(label, dim)
    return out


def _first_label(graph: Graph, name: str, dim: int) -> str | None:
    """The label of the first labelled loop that a dim reaches."""
    queue, seen = [(name, dim)], {(name, dim)}
    while queue:
        value, at = queue.pop(0)
        for op in graph.consumers[value]:
            nest = nest_of(op, graph)
            for operand, dims in zip(op.operands, nest.operands, strict=True):
                if operand != value:
                    continue
                for loop_name in (t.loop if isinstance(t, Window) else t for t in dims[at]):
                    if not isinstance(loop_name, str):
                        continue
                    loop = nest.loop(loop_name)
                    if loop.labels:
                        return loop.labels[0]
                    for result, terms in ((r, t) for r, t in zip(op.results, nest.results, strict=True)):
                        for d, term in enumerate(terms):
                            if loop_name in term and (result, d) not in seen:
                                seen.add((result, d))
                                queue.append((result, d))
    return None
