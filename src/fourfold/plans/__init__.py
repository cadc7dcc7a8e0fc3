"""Plans: layouts on meshes, what a plan says, the named strategies, and lowering to programs and lists of actions.

Enters: a `Graph`, a plan or a strategy's name. Leaves: a lowered plan. No torch; no costs. Inner rooms, each standing on those
before it: `layout`, `spec`, `lowering`, `strategies` and `lists`.
"""

from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.layout.ownership import Own
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.plan_lowering import lower_plan
from fourfold.plans.lowering.lower import lower
from fourfold.plans.lowering.program import Compute, Move, Program, Repeat
from fourfold.plans.spec.plan import Passes, Plan
from fourfold.plans.spec.plan_file import load_plan, save_plan
from fourfold.plans.strategies.composition import Options
from fourfold.plans.strategies.named import STRATEGIES, named

__all__ = [
    "STRATEGIES",
    "Compute",
    "Exchange",
    "Layout",
    "LoweredPlan",
    "Mesh",
    "Move",
    "Options",
    "Own",
    "Passes",
    "Plan",
    "Program",
    "Repeat",
    "load_plan",
    "lower",
    "lower_plan",
    "named",
    "save_plan",
]
