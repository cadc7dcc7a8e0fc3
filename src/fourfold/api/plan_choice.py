"""Which plan a run follows: a plan, its file, or the name of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import InvalidInput
from fourfold.plans import Options, Plan, load_plan
from fourfold.plans.strategies.named import parse
from fourfold.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A model, and either a plan for it or a strategy with its options, ranks and batch. `seed`: of the model's weights and
    made-up data."""

    model: str | Workload
    plan: Plan | Path | str | None
    strategy: str | None
    options: Options | None
    ranks: int | None
    batch: int | None
    seed: int

    def __post_init__(self) -> None:
        if (self.plan is None) == (self.strategy is None):
            raise InvalidInput("give either --plan FILE or --strategy NAME" + (", not both" if self.plan else ""))
        if self.strategy is not None:
            parse(self.strategy)

    def load_plan(self) -> Plan | None:
        """The plan, read if it is a file, or None where a strategy is named."""
        if self.plan is None:
            return None
        what = "the plan" if isinstance(self.plan, Plan) else f"plan {self.plan}"
        loaded = self.plan if isinstance(self.plan, Plan) else load_plan(Path(self.plan))
        if self.batch is not None and self.batch != loaded.batch:
            raise InvalidInput(f"{what} is for a batch of {loaded.batch}, --batch is {self.batch}; leave it out or plan again")
        if self.options is not None:
            _refuse_options(what, loaded, self.options)
        return loaded


def _refuse_options(what: str, plan: Plan, options: Options) -> None:
    """A plan says everything: refuse an option beside it, even one that agrees."""
    says = {
        "stages": f"{len(plan.parts)} stages" if plan.stages else "no stages",
        "microbatches": f"{plan.microbatches} micro-batches",
        "schedule": f"schedule {plan.schedule}",
        "recompute": f"{len(plan.recompute)} segments to recompute",
        "zero": f"zero {plan.zero}",
    }
    for name, words in says.items():
        value = getattr(options, name)
        if value is not None:
            raise InvalidInput(f"{what} says {words}, --{name} is {value}; leave --{name} out or plan again")
    if options.policy is not None:
        raise InvalidInput(f"{what} has a policy of its own; leave options.policy out or plan again")
