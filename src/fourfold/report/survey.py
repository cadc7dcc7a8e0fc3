"""A model before any plan: its work by layer group, and how far each split can go.

Figures are of one forward pass at the given batch. A limit is the smallest loop that a split has to divide: past it some
rank gets nothing. Layers with little of the work may run on all ranks instead, so the limit among the heavy ones counts
too. Left out: time and memory on a device, which are the oracle's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fourfold.graph import Graph
from fourfold.plans import Compute, Mesh, Plan, lower
from fourfold.plans.strategies.named import LIGHT

MOST_GROUPS = 32
TOP = "(model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ops under one module path."""

    path: str
    ops: int
    parameters: int
    flops: int
    output_bytes: int  # of tensors read outside the group
    saved_bytes: int  # kept for backward, parameters not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How far one split goes over all layers, and over those with much of the work; with the layers that stop it."""

    split: str
    size: int
    op: str
    heavy_size: int
    heavy_op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What `fourfold inspect` shows."""

    graph: str
    batch: int
    batch_fixed: bool
    groups: tuple[Group, ...]
    limits: tuple[Limit, ...]
    without_rule: tuple[tuple[str, str], ...]  # op path, ATen target

    def total(self, figure: str) -> int:
        return sum(getattr(group, figure) for group in self.groups)


def survey(graph: Graph, batch: int, *, depth: int | None = None) -> Survey:
    """Survey a graph; `depth` is how many parts of a module path make a group, by default as many as fit a screen."""
    program = lower(graph, Plan(graph=graph.hash, batch=batch, mesh=Mesh.of(data=1)))
    computes = program.computes()
    depth = depth or _fitting_depth(computes)
    return Survey(
        graph=graph.hash,
        batch=batch,
        batch_fixed=graph.batch is not None,
        groups=_groups(program.graph, computes, depth),
        limits=tuple(_limits(computes)),
        without_rule=tuple((c.op.path, c.op.target) for c in program.replicated),
    )


def _prefix(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth]) or TOP


def _fitting_depth(computes: list[Compute]) -> int:
    for depth in range(8, 1, -1):
        if len({_prefix(c.op.module, depth) for c in computes}) <= MOST_GROUPS:
            return depth
    return 1


def _groups(graph: Graph, computes: list[Compute], depth: int) -> tuple[Group, ...]:
    stored = {p.name for p in graph.parameters} | {c.name for c in graph.constants}
    home = {name: _prefix(c.op.module, depth) for c in computes for name in c.op.results}
    weights: dict[str, int] = {}
    for parameter in graph.parameters:
        if not parameter.buffer:
            path = _prefix(parameter.key.rpartition(".")[0], depth)
            weights[path] = weights.get(path, 0) + graph.values[parameter.name].numel
    members: dict[str, list[Compute]] = {}
    for compute in computes:
        members.setdefault(_prefix(compute.op.module, depth), []).append(compute)
    kept: set[str] = set(stored)
    out = []
    for path, own in members.items():
        leaving = [n for c in own for n in c.op.results if _leaves(graph, n, path, home)]
        saved = [n for c in own for n in _saved(c)]
        saved = [n for n in dict.fromkeys(saved) if n not in kept]
        kept.update(saved)
        out.append(
            Group(
                path=path,
                ops=len(own),
                parameters=weights.pop(path, 0),
                flops=sum(c.nest.flops for c in own),
                output_bytes=_bytes(graph, leaving),
                saved_bytes=_bytes(graph, saved),
            )
        )
    rest = [Group(path=p, ops=0, parameters=n, flops=0, output_bytes=0, saved_bytes=0) for p, n in weights.items()]
    return (*out, *rest)


def _leaves(graph: Graph, name: str, path: str, home: dict[str, str]) -> bool:
    readers = {home.get(op.results[0], path) for op in graph.consumers[name] if op.results}
    return name in graph.outputs or name == graph.loss or bool(readers - {path})


def _saved(compute: Compute) -> list[str]:
    op = compute.op
    return [op.operands[i] if i >= 0 else op.results[-i - 1] for i in compute.nest.saved]


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    return sum(graph.values[name].bytes for name in names)


def _limits(computes: list[Compute]) -> Iterable[Limit]:
    total = sum(c.nest.flops for c in computes)
    found: dict[str, list[tuple[int, str, bool]]] = {}
    for compute in computes:
        nest = compute.nest
        if not nest.anchor:
            continue
        for label in {label for loop in nest.loops for label in loop.labels}:
            sizes = [loop.size // loop.unit // loop.outer for loop in nest.loops_with_label(label)]
            if sizes:
                found.setdefault(label, []).append((max(sizes), compute.op.path, nest.flops > LIGHT * total))
    for label in sorted(found, key=lambda text: (text != "batch", text != "filter", text)):
        size, op, _ = min(found[label], key=lambda item: item[0])
        heavy = [item for item in found[label] if item[2]] or found[label]
        heavy_size, heavy_op, _ = min(heavy, key=lambda item: item[0])
        yield Limit(split=label, size=size, op=op, heavy_size=heavy_size, heavy_op=heavy_op)
