"""Where to cut a network into stages: BaPipe's balanced partition, by the oracle's seconds and bytes instead of FLOPs.

Stages are runs of ops. Of all cuts at small tensors (`plans.strategies.balance`) the one is sought whose slowest stage is
fastest: a stage's load is its ops' seconds for a micro-batch on its device, and the transfers over both its boundaries, there
and back. A stage whose weights, gradients, state and activations in flight under the schedule exceed its device's memory is not
allowed: that shifts layers off overfull stages. If tensors are large everywhere, cuts at them cost more than they gain, and
data parallelism, which is always among the candidates, wins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.graph import Graph
from fourfold.planner.splits.surrogate import Surrogate
from fourfold.plans.spec.plan import Plan
from fourfold.plans.strategies.balance import alive_bytes, balanced_cuts, boundary_candidates, may_begin_stage

SYNCHRONOUS = ("1f1b-so", "1f1b-sno")
"""Schedules to choose from: the faster one first, which holds more."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Per op, in order, on one rank: seconds of a micro-batch, with its share of what comes once a step; bytes stored; bytes
    saved for backward; `alive`: bytes that cross the boundary before it."""

    paths: tuple[str, ...]
    seconds: np.ndarray
    stored: np.ndarray
    kept: np.ndarray
    alive: np.ndarray
    heads: tuple[bool, ...]
    may_begin: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """First ops of the stages, and seconds of the slowest for one micro-batch."""

    firsts: tuple[str, ...]
    slowest: float


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """A plan of stages and its step by the formula ``(M + N - 1) x slowest + sums and updates``."""

    plan: Plan
    cost: float


def layers(graph: Graph, surrogate: Surrogate, chosen: Sequence[int], starts: Collection[str]) -> Layers:
    """The ops of a graph with the splits chosen; a stage may begin at the ops `starts`."""
    size = surrogate.place.size
    concrete = graph.at(size)
    ops = [op for op in concrete.ops if op.name in graph.dependent]
    at = {op.path: k for k, op in enumerate(ops)}
    seconds, stored, kept = (np.zeros(len(ops)) for _ in range(3))
    problem = surrogate.problem(0.0)
    for group, c in zip(surrogate.groups, chosen, strict=True):
        priced, anchor = surrogate.options[group.index][c][1], at[group.anchor.path]
        for op, spent in zip(group.graph.ops, priced.ops, strict=True):
            seconds[at.get(op.path, anchor)] += spent
        seconds[anchor] += (priced.sums + priced.sent + priced.update) / surrogate.place.microbatches
        stored[anchor] += priced.stored
        kept[anchor] += priced.kept
    for (j, k), table in problem.pairs.items():
        seconds[at[surrogate.groups[k].anchor.path]] += table[chosen[j], chosen[k]]
    names = [op.name for op in ops]
    return Layers(
        paths=tuple(at),
        seconds=seconds,
        stored=stored,
        kept=kept,
        alive=alive_bytes(concrete, names),
        heads=tuple(may_begin_stage(concrete, ops)),
        may_begin=tuple(op.path in starts for op in ops),
    )


def partition(
    some: Layers, *, speeds: Sequence[float], flights: Sequence[int], rooms: Sequence[float], transfer: Callable[[float], float]
) -> Partition | None:
    """The best cut into as many stages as there are speeds, or None if none fits. `speeds`: of the stages' devices, relative;
    `flights`: micro-batches in flight; `rooms`: bytes; `transfer`: seconds of so many bytes from stage to stage."""
    inner = boundaries(some, len(speeds))
    kinds = zip(speeds, flights, rooms, strict=True)
    loads = [load(some, inner, speed=v, flight=flight, room=room, transfer=transfer) for v, flight, room in kinds]
    cuts, slowest = balanced_cuts(loads)
    if not np.isfinite(slowest):
        return None
    ends = np.array([0, *inner])
    return Partition(firsts=tuple(some.paths[int(k)] for k in (0, *ends[cuts])), slowest=slowest)


def boundaries(some: Layers, count: int) -> list[int]:
    """Where so many stages may begin, the first left out."""
    return [k for k in boundary_candidates(some.seconds, some.alive, list(some.heads), count, "stages") if some.may_begin[k]]


def load(
    some: Layers, inner: Sequence[int], *, speed: float, flight: int, room: float, transfer: Callable[[float], float]
) -> np.ndarray:
    """Seconds of a stage for a micro-batch from every boundary, the beginning first, to every other, the end last; infinite
    where it does not fit."""
    ends = np.array([0, *inner, len(some.paths)])
    sent = np.array([0.0, *(2 * transfer(float(some.alive[k])) for k in inner), 0.0])
    total, stored, kept = (np.concatenate([[0.0], np.cumsum(x)])[ends] for x in (some.seconds, some.stored, some.kept))
    spent = (total[None, :] - total[:, None]) / speed + sent[None, :] + sent[:, None]
    held = stored[None, :] - stored[:, None] + flight * (kept[None, :] - kept[:, None])
    return np.where(held <= room, spent, np.inf)
