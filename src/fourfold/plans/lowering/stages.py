"""A graph cut into stages: each a graph of its own, and the tensors that cross from one to another.

Ops go to the stage their place in the graph says. What depends on no input (transposed weights, tables of positions) is
computed in every stage that reads it, so that only activations cross. Inputs and targets are read by the stages that use
them. A parameter that several stages use is *tied*: each keeps a copy, and their gradients are added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fourfold.errors import Infeasible
from fourfold.graph import Graph, Op, Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor made in one stage and read in another."""

    value: str
    source: int
    target: int
    gradient: bool


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The graphs of the stages, in order, and what ties them together."""

    graphs: tuple[Graph, ...]
    crossings: tuple[Crossing, ...]
    tied: dict[str, tuple[int, ...]]  # parameter -> the stages that keep a copy, the first of them its owner
    live: frozenset[str]  # the values that have a gradient


def cut(graph: Graph, firsts: Sequence[str]) -> Cut:
    """The graph cut before each of the ops named, the first of which opens stage 0; the same value each time, with what was
    derived from its graphs."""
    known: dict[tuple[str, ...], Cut] = graph.memo.setdefault("cuts", {})
    key = ("", *firsts[1:])
    if key not in known:
        known[key] = _cut(graph, key)
    return known[key]


def _cut(graph: Graph, firsts: Sequence[str]) -> Cut:
    home = _homes(graph, firsts)
    live = graph.live
    makers = {name: min(home[op.name]) for op in graph.ops if op.name in home for name in op.results}
    inside = [{op.name for op in graph.ops if s in home[op.name]} for s in range(len(firsts))]
    wanted = [_wanted(graph, names) for names in inside]
    crossings = tuple(
        Crossing(value=name, source=makers[name], target=s, gradient=name in live)
        for s in range(len(firsts))
        for name in wanted[s]
        if name in makers
    )
    sent = [[c.value for c in crossings if c.source == s] for s in range(len(firsts))]
    graphs = tuple(_part(graph, inside[s], wanted[s], sent[s], makers, s) for s in range(len(firsts)))
    return Cut(graphs=graphs, crossings=crossings, tied=_tied(graphs), live=live)


def _homes(graph: Graph, firsts: Sequence[str]) -> dict[str, set[int]]:
    """The stages of every op. An op that depends on no input follows its readers, of which there may be several."""
    at = {op.path: k for k, op in enumerate(graph.ops)}
    begins = [0, *(at[first] for first in firsts[1:])]
    place = {op.name: max(s for s, begin in enumerate(begins) if begin <= k) for k, op in enumerate(graph.ops)}
    fixed = graph.dependent
    kept = {graph.loss, *graph.outputs, *(value for _, value in graph.writes)}
    home: dict[str, set[int]] = {}
    for op in reversed(graph.ops):
        if op.name in fixed or kept & set(op.results):
            home[op.name] = {place[op.name]}
        else:
            home[op.name] = {s for name in op.results for reader in graph.consumers[name] for s in home[reader.name]}
    return home


def _wanted(graph: Graph, inside: set[str]) -> list[str]:
    """What the ops of a stage read and do not make."""
    ops = [op for op in graph.ops if op.name in inside]
    made = {name for op in ops for name in op.results}
    return list(dict.fromkeys(name for op in ops for name in op.operands if name not in made))


def _part(
    graph: Graph, inside: set[str], wanted: Iterable[str], sent: Iterable[str], makers: dict[str, int], stage: int
) -> Graph:
    ops = tuple(op for op in graph.ops if op.name in inside)
    made = {name for op in ops for name in op.results}
    writes = tuple((buffer, value) for buffer, value in graph.writes if value in made and makers[value] == stage)
    outputs = tuple(n for n in graph.outputs if makers.get(n, 0) == stage)
    read = {*wanted, *(buffer for buffer, _ in writes), *(n for n in outputs if n not in made)}
    inputs = (*(n for n in graph.inputs if n in read), *(n for n in wanted if n in makers))
    part = part_of(graph, ops, read, inputs)
    return replace(
        part,
        loss=graph.loss if makers.get(graph.loss) == stage else "",
        outputs=tuple(dict.fromkeys((*outputs, *sent))),
        writes=writes,
    )


def part_of(graph: Graph, ops: tuple[Op, ...], read: Collection[str], inputs: tuple[str, ...]) -> Graph:
    """Some ops as a graph of their own that reads these values besides what it makes; its results go nowhere."""
    made = {name for op in ops for name in op.results}
    return replace(
        graph,
        values={n: spec for n, spec in graph.values.items() if n in made or n in read},
        inputs=inputs,
        targets=tuple(n for n in graph.targets if n in read),
        parameters=tuple(p for p in graph.parameters if p.name in read),
        constants=tuple(c for c in graph.constants if c.name in read),
        ops=ops,
        loss=graph.loss if graph.loss in made else "",
        outputs=(),
        writes=(),
    )


def _tied(graphs: Sequence[Graph]) -> dict[str, tuple[int, ...]]:
    users: dict[str, list[int]] = {}
    written: dict[str, int] = {}
    keys: dict[str, str] = {}
    for s, graph in enumerate(graphs):
        written.update({buffer: s for buffer in _written(graph)})
        for parameter in graph.parameters:
            users.setdefault(parameter.name, []).append(s)
            keys[parameter.name] = parameter.key
    for name, stage in written.items():
        other = next((s for s in users[name] if s != stage), None)
        if other is not None:
            raise Infeasible(
                f"buffer {keys[name]} is updated in stage {stage} and read in stage {other}; "
                "cut the model so that one stage has all its uses"
            )
    return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}


def _written(graph: Graph) -> set[str]:
    """Buffers that a step changes: those assigned to, and the running statistics that norms in training update themselves."""
    norms = [op for op in graph.ops if op.target.split(".")[1] in ("batch_norm", "instance_norm") and op.args[5]]
    tracked = {ref.name for op in norms for ref in op.args[3:5] if isinstance(ref, Ref)}
    return {*(buffer for buffer, _ in graph.writes), *tracked}
