"""Why a plan: how other plans compare, what limits it, and what would change it. Each what-if is a search of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fourfold.cluster import NON_WAITING, Cluster
from fourfold.errors import Error
from fourfold.oracle.findings.finding import Finding
from fourfold.oracle.predict import Prediction
from fourfold.oracle.time.items import CATEGORIES, Category
from fourfold.planner.search import same_plan, search
from fourfold.planner.search_task import Ranking, SearchTask

LINK_FACTOR = 10  # of the what-ifs; powers that change a plan, chosen
MEMORY_FACTOR = BATCH_FACTOR = 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Another plan beside the explained one. Seconds are the other's less this one's."""

    other: Prediction
    extra_seconds: float
    extra_by_category: tuple[tuple[Category, float], ...]  # the largest difference first


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change of the task and the best plan after it; None where nothing fits."""

    change: str
    best: Prediction | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan beside others, its limits and bottlenecks, and what would change it."""

    task: SearchTask
    plan: Prediction
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    changes: tuple[WhatIf, ...]


def explained(ranking: Ranking, plan: Prediction, say: Callable[[str], None] = lambda text: None) -> Explanation:
    """A plan of a ranking: beside data parallelism and the two fastest others, with its findings and what-ifs."""
    others = [c for c in ranking.candidates if not same_plan(c.plan, plan.plan)]
    data = [c for c in others if c.plan.strategy == "data"]
    closest = sorted((c for c in others if c not in data), key=lambda c: c.step_seconds)[:2]
    return Explanation(
        task=ranking.task,
        plan=plan,
        comparisons=tuple(compare(plan, other) for other in (*data[:1], *closest)),
        findings=plan.findings,
        changes=tuple(_changes(ranking.task, say)),
    )


def compare(plan: Prediction, other: Prediction) -> Comparison:
    mine, theirs = plan.breakdown, other.breakdown
    terms = sorted(((term, theirs[term] - mine[term]) for term in CATEGORIES), key=lambda pair: -abs(pair[1]))
    return Comparison(other=other, extra_seconds=other.step_seconds - plan.step_seconds, extra_by_category=tuple(terms))


def _changes(task: SearchTask, say: Callable[[str], None]) -> Iterator[WhatIf]:
    """The same search with one thing changed."""
    cluster = task.cluster
    if cluster.links and task.devices > 1:
        yield _what_if(task, f"links {LINK_FACTOR} times as fast", say, cluster=with_scaled_links(cluster, LINK_FACTOR))
        yield _what_if(task, f"links {LINK_FACTOR} times as slow", say, cluster=with_scaled_links(cluster, 1 / LINK_FACTOR))
    yield _what_if(task, f"{MEMORY_FACTOR} times the memory", say, cluster=with_scaled_memory(cluster, MEMORY_FACTOR))
    yield _what_if(task, f"1/{MEMORY_FACTOR} of the memory", say, cluster=with_scaled_memory(cluster, 1 / MEMORY_FACTOR))
    if task.graph.batch is None:
        yield _what_if(task, f"a batch of {task.batch * BATCH_FACTOR}", say, batch=task.batch * BATCH_FACTOR)
        if task.batch > 1:
            yield _what_if(task, f"a batch of {task.batch // BATCH_FACTOR}", say, batch=task.batch // BATCH_FACTOR)


def _what_if(
    task: SearchTask, change: str, say: Callable[[str], None], *, cluster: Cluster | None = None, batch: int | None = None
) -> WhatIf:
    say(f"with {change}")
    try:
        found = repeat_search(task, cluster=cluster or task.cluster, batch=batch or task.batch)
    except Error as reason:
        return WhatIf(change=change, best=None, reason=str(reason))
    if found.best is not None:
        return WhatIf(change=change, best=found.best)
    nearest = found.candidates[0] if found.candidates else None
    over = f"{nearest.excess_bytes / 2**30:.1f} GiB over at best" if nearest is not None else "nothing can be split so"
    return WhatIf(change=change, best=None, reason=over)


def repeat_search(task: SearchTask, *, cluster: Cluster, batch: int, limit: float | None = None) -> Ranking:
    """The same search on another cluster, for another batch, optionally with another time limit."""
    return search(replace(task, setting=task.setting.on(cluster), batch=batch, limit=limit or task.limit))


def with_scaled_links(cluster: Cluster, factor: float) -> Cluster:
    """A cluster with the bandwidth of its links multiplied and their latency divided by a factor, measured curves included.
    Collectives that are a rank's own copies stay."""
    links = tuple(replace(link, latency=link.latency / factor, bandwidth=link.bandwidth * factor) for link in cluster.links)
    curves = tuple(
        c if c.collective in NON_WAITING else replace(c, seconds=tuple(s / factor for s in c.seconds))
        for c in cluster.measured.curves
    )
    return replace(cluster, links=links, measured=replace(cluster.measured, curves=curves))


def with_scaled_memory(cluster: Cluster, factor: float) -> Cluster:
    """A cluster with the memory of its devices multiplied by a factor."""
    return replace(cluster, kinds=tuple(replace(kind, memory=kind.memory * factor) for kind in cluster.kinds))
