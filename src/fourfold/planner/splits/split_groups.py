"""A graph as groups of ops: an op that is split by choice (the anchor) with the ops that follow its layout.

A follower has no choice of its own: it takes the layout of its largest operand (`plans.lowering.op_layouts`). So the split of
an anchor decides all layouts of its group, and one split for each group remains to be chosen. Ops that read stored tensors or
inputs alone belong to every group that reads their results, as in `plans.lowering.lower` they are placed by their readers.

A group is a graph of its own, whose inputs are the values it reads of others: lowering it under a split gives what it needs
of them, what it makes, and what the oracle prices. Networks repeat their blocks: equal groups have equal `key`s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fourfold.graph import Graph, Op, Ref
from fourfold.graph.spec import map_leaves
from fourfold.ops.nest import Nest, nest_of
from fourfold.plans.lowering.stages import part_of


@dataclass(frozen=True, kw_only=True)
class SplitGroup:
    """An anchor and its followers. `reads`: values of other groups, with who makes them; `number`: names as positions, the same
    in all groups with this key; `saved`: values its ops keep for backward."""

    index: int
    anchor: Op
    graph: Graph
    reads: tuple[tuple[str, int], ...]
    number: dict[str, int]
    saved: frozenset[str]
    key: str


def split_groups(graph: Graph, batch: int, live: frozenset[str]) -> tuple[SplitGroup, ...]:
    """The groups of a graph in the order of their anchors; rules are asked at this batch. `live`: values with a gradient."""
    concrete = graph.at(batch)
    nests = {op.name: nest_of(op, concrete) for op in concrete.ops}
    owner, members = _owners(concrete, nests)
    out = []
    for index, names in enumerate(members):
        part = _part(graph, names, owner)
        reads = tuple((name, owner[name]) for name in part.inputs if name in owner)
        number, key = _structure(part, live)
        saved = frozenset(value for op in part.ops for value in _saved(op, nests[op.name]))
        anchor = next(op for op in part.ops if op.name == names[0])
        out.append(SplitGroup(index=index, anchor=anchor, graph=part, reads=reads, number=number, saved=saved, key=key))
    return tuple(out)


def _owners(graph: Graph, nests: dict[str, Nest]) -> tuple[dict[str, int], list[list[str]]]:
    """Who makes each value, and the names of every group's ops, its anchor first."""
    owner: dict[str, int] = {}
    members: list[list[str]] = []
    for op in graph.ops:
        made = [name for name in op.operands if name in owner]
        if nests[op.name].anchor and op.name in graph.dependent:
            members.append([])
            home = len(members) - 1
        elif made:
            home = owner[max(made, key=lambda name: graph.values[name].numel)]  # the first of equals
        else:
            continue
        members[home].append(op.name)
        owner.update(dict.fromkeys(op.results, home))
    return owner, members


def _part(graph: Graph, names: list[str], owner: dict[str, int]) -> Graph:
    """The ops of a group as a graph, with those that read stored tensors or inputs alone and are read here."""
    wanted, inside = set(names), []
    needed: set[str] = set()
    for op in reversed(graph.ops):
        free = not any(result in owner for result in op.results)
        if op.name in wanted or (free and needed & set(op.results)):
            inside.append(op)
            needed.update(op.operands)
    ops = tuple(reversed(inside))
    made = {name for op in ops for name in op.results}
    read = [name for name in dict.fromkeys(name for op in ops for name in op.operands) if name not in made]
    inputs = tuple(name for name in read if name in owner or name in graph.inputs)
    return part_of(graph, ops, set(read), inputs)


def _saved(op: Op, nest: Nest) -> Iterable[str]:
    return (op.operands[k] if k >= 0 else op.results[-k - 1] for k in nest.saved)


def _structure(graph: Graph, live: frozenset[str]) -> tuple[dict[str, int], str]:
    """Names as numbers in the order they occur, and a text that is the same for graphs that differ in names alone."""
    number: dict[str, int] = {}

    def of(name: str) -> int:
        return number.setdefault(name, len(number))

    def leaf(value: Any) -> Any:
        return f"${of(value.name)}" if isinstance(value, Ref) else value

    ops = [
        (op.target, map_leaves(op.args, leaf), map_leaves(dict(op.kwargs), leaf), [of(name) for name in op.results])
        for op in graph.ops
    ]
    values = [(graph.values[name], name in live) for name in number]
    stored = [(of(p.name), p.trainable, p.buffer) for p in graph.parameters]
    ends = [[of(name) for name in names] for names in (graph.inputs, graph.targets)]
    loss = number.get(graph.loss, -1)
    return number, repr((ops, values, stored, ends, loss, graph.batch))
