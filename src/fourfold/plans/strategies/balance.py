"""Where to cut a graph into stages of equal work, counted in FLOPs. The planner's own search replaces this where it runs.

A cut lies where few bytes cross: at a boundary over which no more bytes cross than over its neighbours, and not between a
product and the norm or activation that follows it. Among those boundaries, the cuts minimise the load of the slowest stage;
each byte that crosses counts as a number of FLOPs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from fourfold.errors import Infeasible
from fourfold.graph import Graph, Op
from fourfold.ops.nest import nest_of

FLOPS_PER_BYTE = 100.0
"""What a byte across a boundary counts for while no cluster is known. Assumed: between a CPU on loopback (some tens) and fast
GPUs on InfiniBand (some thousands), so that a small tensor is preferred to a large one but not to balance."""


def balanced_firsts(
    graph: Graph,
    batch: int,
    weights: Sequence[float],
    *,
    first: str = "",
    last: str = "",
    charge: float = FLOPS_PER_BYTE,
    pieces: str = "stages",
) -> list[str]:
    """The first ops of stages whose work is in proportion to `weights`; of all ops, or of those from `first` to `last`.

    `charge`: FLOPs that a crossing byte counts for; 0 where none crosses, as between recomputed segments. `pieces`: the word
    for stages in error messages.
    """
    concrete = graph.at(batch)
    fixed = graph.dependent
    ops = [op for op in concrete.ops if op.name in fixed]
    paths = [op.path for op in ops]
    low = paths.index(first) if first else 0
    high = paths.index(last) + 1 if last else len(ops)
    work = np.array([float(nest_of(op, concrete).flops) for op in ops[low:high]])
    alive = alive_bytes(concrete, [op.name for op in ops])[low:high]
    inner = boundary_candidates(work, alive, may_begin_stage(concrete, ops[low:high]), len(weights), pieces)
    ends = np.array([0, *inner, len(work)])
    done = np.concatenate([[0.0], np.cumsum(work)])[ends]
    cost = np.concatenate([[0.0], charge * alive[inner], [0.0]])
    load = done[None, :] - done[:, None] + cost[None, :] + cost[:, None]
    chosen, _ = balanced_cuts([load / weight for weight in weights])
    return [paths[low + int(k)] for k in (0, *ends[chosen])]


def stage_openings(graph: Graph, batch: int, stages: int) -> list[str]:
    """The ops at which `stages` stages may begin, without the first op."""
    concrete = graph.at(batch)
    ops = [op for op in concrete.ops if op.name in graph.dependent]
    work = np.array([float(nest_of(op, concrete).flops) for op in ops])
    alive = alive_bytes(concrete, [op.name for op in ops])
    return [ops[k].path for k in boundary_candidates(work, alive, may_begin_stage(concrete, ops), stages, "stages")]


def alive_bytes(graph: Graph, names: list[str]) -> np.ndarray:
    """Bytes that cross the boundary before each op."""
    at = {name: k for k, name in enumerate(names)}
    change = np.zeros(len(names) + 1)
    for op in (op for op in graph.ops if op.name in at):
        k = at[op.name]
        for result in op.results:
            reads = [at[reader.name] for reader in graph.consumers[result] if reader.name in at]
            if reads and max(reads) > k:
                change[k + 1] += graph.values[result].bytes
                change[max(reads) + 1] -= graph.values[result].bytes
    return np.cumsum(change)[:-1]


def may_begin_stage(graph: Graph, ops: Sequence[Op]) -> list[bool]:
    """For each op, whether a stage should begin with it."""
    return [not _belongs_to_previous(graph, op) for op in ops]


def _belongs_to_previous(graph: Graph, op: Op) -> bool:
    """Whether an op is an activation, or reads the result of a product and is none itself."""
    if op.pointwise and len(op.operands) == 1:
        return True
    maker = graph.producer.get(op.operands[0]) if op.operands else None
    return maker is not None and nest_of(maker, graph).anchor and not nest_of(op, graph).anchor


def boundary_candidates(work: np.ndarray, alive: np.ndarray, may_begin: list[bool], stages: int, pieces: str) -> list[int]:
    """Boundaries where cuts may lie: local minima of the bytes alive or, if those are too few, all with work on both sides."""
    inner = range(1, len(work))
    valleys = [k for k in inner if alive[k] <= alive[k - 1] and (k + 1 == len(work) or alive[k] <= alive[k + 1])]
    valleys = [k for k in valleys if may_begin[k]]
    if len(valleys) >= 2 * stages:
        return valleys
    busy = np.flatnonzero(work)
    every = [k for k in inner if len(busy) and busy[0] < k <= busy[-1]]
    if len(every) < stages - 1:
        what = "the model" if pieces == "stages" else "a stage"
        raise Infeasible(
            f"{what} can be cut in {len(every)} places, {stages} {pieces} need {stages - 1}; "
            f"use at most {len(every) + 1} {pieces}"
        )
    return every


def balanced_cuts(loads: Sequence[np.ndarray]) -> tuple[list[int], float]:
    """The cuts that make the most loaded piece least loaded, and its load: infinite if no cuts are allowed. Of each piece,
    `load[i, j]` from boundary i to j, the first and last of which are the ends; infinite where it may not be."""
    found = balanced_cuts_and_ranks([{1: load} for load in loads], len(loads))
    return (found[0], found[2]) if found is not None else ([], float("inf"))


def balanced_cuts_and_ranks(loads: Sequence[Mapping[int, np.ndarray]], ranks: int) -> tuple[list[int], list[int], float] | None:
    """As `balanced_cuts`, for pieces of different numbers of ranks, `ranks` together: `loads` by piece and by its ranks. The
    cuts, the ranks of each piece and the most loaded one's load; None if nothing is allowed.

    best[s][u][j] = min over i < j and r of max(best[s-1][u - r][i], load[s][r][i, j])
    """
    length = len(next(iter(loads[0].values())))
    start = np.full(length, np.inf)
    start[0] = 0.0
    best, back = {0: start}, list[dict[int, tuple[np.ndarray, np.ndarray]]]()
    later = np.tri(length, dtype=bool)
    for by_ranks in loads:
        now: dict[int, np.ndarray] = {}
        froms: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for (used, before), (more, load) in itertools.product(best.items(), by_ranks.items()):
            joined = np.maximum(before[:, None], np.where(later, np.inf, load))
            value, at, total = joined.min(0), joined.argmin(0), used + more
            if total not in now:
                now[total], froms[total] = np.full(length, np.inf), (np.zeros(length, int), np.zeros(length, int))
            better = value < now[total]
            now[total] = np.where(better, value, now[total])
            froms[total] = (np.where(better, at, froms[total][0]), np.where(better, more, froms[total][1]))
        best = {used: found for used, found in now.items() if used <= ranks}
        back.append(froms)
    if ranks not in best or not np.isfinite(best[ranks][-1]):
        return None
    cuts, sizes, at, used = list[int](), list[int](), length - 1, ranks
    for found in reversed(back):
        where, more = int(found[used][0][at]), int(found[used][1][at])
        sizes.append(more)
        cuts.append(where)
        at, used = where, used - more
    return cuts[-2::-1], sizes[::-1], float(best[ranks][-1])
