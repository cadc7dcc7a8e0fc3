"""A plan made for one graph, as a plan of another that has the same ops and some between them: a captured graph, and the one
with autocast's casts written out.

What begins or ends at an op that the other graph lacks begins at the next op, or ends at the last one, that both have. Where
the other graph has further ops right before the first op of a stage, they belong to that stage: they cast what it reads.
Before the first op of passes they stay outside: what is cast there is cast once, not in every pass.
"""

from __future__ import annotations

from dataclasses import replace

from fourfold.graph import Graph
from fourfold.plans.spec.plan import Plan


def transferred(plan: Plan, source: Graph, target: Graph) -> Plan:
    """A plan for the graph `source`, for `target`."""
    if source.hash == target.hash:
        return plan
    places = _Places(source, target)
    return replace(
        plan,
        graph=target.hash,
        splits=tuple((pattern, by) for pattern, by in plan.splits if pattern not in places.lost),
        passes=tuple(replace(run, first=places.next_known(run.first), last=places.last(run.last)) for run in plan.passes),
        stages=tuple(replace(stage, first=places.first(stage.first)) for stage in plan.stages),
        recompute=tuple(replace(run, first=places.first(run.first), last=places.last(run.last)) for run in plan.recompute),
    )


class _Places:
    """Where the ops of one graph stand in another."""

    def __init__(self, source: Graph, target: Graph) -> None:
        self.source, self.target = [op.path for op in source.ops], [op.path for op in target.ops]
        self.known, self.lost = set(self.target), set(self.source) - set(self.target)
        self.added = self.known - set(self.source)

    def next_known(self, path: str) -> str:
        """The op itself, or the first one behind it that both graphs have."""
        return next(p for p in self.source[self.source.index(path) :] if p in self.known) if path in self.lost else path

    def first(self, path: str) -> str:
        path = self.next_known(path)
        if path not in self.known:  # nothing, or no op at all: the check of the plan says so
            return path
        at = self.target.index(path)
        while at and self.target[at - 1] in self.added:
            at -= 1
        return self.target[at]

    def last(self, path: str) -> str:
        if path in self.lost:
            return next(p for p in reversed(self.source[: self.source.index(path)]) if p in self.known)
        return path
