"""What planning needs to know of a model: its graph, its batch and the shapes of its inputs. A value without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.plans.spec.other_graph import transferred
from fourfold.plans.spec.plan import Plan
from fourfold.plans.strategies.composition import Options
from fourfold.plans.strategies.named import named


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A MODEL text, its batch, its graph, and shapes and dtypes of its inputs and targets."""

    text: str
    batch: int
    graph: Graph
    signature: Mapping[str, Any]

    def with_batch(self, batch: int | None) -> ModelGraph:
        """The same model at another batch; None: its own."""
        if batch is not None and batch < 1:
            raise InvalidInput(f"the batch is {batch}; it must be at least 1")
        return self if batch is None else replace(self, batch=batch)

    def plan(self, strategy: str, *, ranks: int, options: Options | None = None) -> Plan:
        return self.adopted(named(strategy, self.graph, ranks=ranks, batch=self.batch, options=options), self.graph)

    def adopted(self, plan: Plan, made_for: Graph) -> Plan:
        """A plan as one of this graph. `made_for`: the graph it was made for, which in bf16 has autocast's casts too."""
        mine = replace(transferred(plan, made_for, self.graph), model=self.text, signature=self.signature)
        mine.check(self.graph)
        return mine
