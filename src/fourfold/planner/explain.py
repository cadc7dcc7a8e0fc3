"""Why a plan: against what it was chosen, where its step goes, and what would change it, each recomputed by the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fourfold.cluster import OWN, Cluster
from fourfold.errors import Error
from fourfold.oracle.findings.finding import Finding
from fourfold.oracle.time.items import CATEGORIES, Category
from fourfold.planner.search import alike, search
from fourfold.planner.search_task import Candidate, Ranking, SearchTask

FASTER = 10  # times, of links
MORE = 2  # times, of memory and of the batch


@dataclass(frozen=True, kw_only=True)
class Against:
    """Another plan: how much longer its step is, and by which terms."""

    other: Candidate
    longer: float  # seconds
    terms: tuple[tuple[Category, float], ...]  # seconds longer, the largest first


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change, and the best plan then; None where nothing fits."""

    change: str
    best: Candidate | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What can be said of a plan."""

    task: SearchTask
    plan: Candidate
    against: tuple[Against, ...]
    findings: tuple[Finding, ...]
    changes: tuple[WhatIf, ...]


def explained(ranking: Ranking, plan: Candidate, say: Callable[[str], None] = lambda text: None) -> Explanation:
    """A plan of a ranking, explained."""
    others = [c for c in ranking.candidates if not alike(c.plan, plan.plan)]
    data = [c for c in others if c.plan.strategy == "data"]
    near = sorted((c for c in others if c not in data), key=lambda c: c.seconds)[:2]
    return Explanation(
        task=ranking.task,
        plan=plan,
        against=tuple(_against(plan, other) for other in (*data[:1], *near)),
        findings=plan.prediction.findings,
        changes=tuple(_changes(ranking.task, say)),
    )


def _against(plan: Candidate, other: Candidate) -> Against:
    mine, theirs = plan.estimate.breakdown, other.estimate.breakdown
    terms = sorted(((term, theirs[term] - mine[term]) for term in CATEGORIES), key=lambda pair: -abs(pair[1]))
    return Against(other=other, longer=other.seconds - plan.seconds, terms=tuple(terms))


def _changes(task: SearchTask, say: Callable[[str], None]) -> Iterator[WhatIf]:
    """The same search with one thing changed."""
    cluster = task.cluster
    if cluster.links and task.devices > 1:
        yield _what_if(task, f"links {FASTER} times as fast", say, cluster=faster(cluster, FASTER))
        yield _what_if(task, f"links {FASTER} times as slow", say, cluster=faster(cluster, 1 / FASTER))
    yield _what_if(task, f"{MORE} times the memory", say, cluster=roomier(cluster, MORE))
    yield _what_if(task, f"1/{MORE} of the memory", say, cluster=roomier(cluster, 1 / MORE))
    if task.graph.batch is None:
        yield _what_if(task, f"a batch of {task.batch * MORE}", say, batch=task.batch * MORE)
        if task.batch > 1:
            yield _what_if(task, f"a batch of {task.batch // MORE}", say, batch=task.batch // MORE)


def _what_if(
    task: SearchTask, change: str, say: Callable[[str], None], *, cluster: Cluster | None = None, batch: int | None = None
) -> WhatIf:
    say(f"with {change}")
    try:
        found = again(task, cluster=cluster or task.cluster, batch=batch or task.batch)
    except Error as reason:
        return WhatIf(change=change, best=None, reason=str(reason))
    if found.best is not None:
        return WhatIf(change=change, best=found.best)
    nearest = found.candidates[0] if found.candidates else None
    over = f"{nearest.over / 2**30:.1f} GiB over at best" if nearest is not None else "nothing can be split so"
    return WhatIf(change=change, best=None, reason=over)


def again(task: SearchTask, *, cluster: Cluster, batch: int, limit: float | None = None) -> Ranking:
    """The same search on another cluster, for another batch, perhaps with less time."""
    return search(replace(task, setting=task.setting.on(cluster), batch=batch, limit=limit or task.limit))


def faster(cluster: Cluster, factor: float) -> Cluster:
    """A cluster whose links are faster by a factor, in bandwidth and in latency, measured ones too; what cores do stays."""
    links = tuple(replace(link, latency=link.latency / factor, bandwidth=link.bandwidth * factor) for link in cluster.links)
    curves = tuple(
        c if c.collective in OWN else replace(c, seconds=tuple(s / factor for s in c.seconds)) for c in cluster.measured.curves
    )
    return replace(cluster, links=links, measured=replace(cluster.measured, curves=curves))


def roomier(cluster: Cluster, factor: float) -> Cluster:
    """A cluster whose devices have more memory by a factor."""
    return replace(cluster, kinds=tuple(replace(kind, memory=kind.memory * factor) for kind in cluster.kinds))
