"""Meshes, layouts, exchanges, plans and their lowering to programs. No torch."""

from fourfold.plan.exchange import Exchange
from fourfold.plan.layout import Layout, Own
from fourfold.plan.lower import lower
from fourfold.plan.mesh import Mesh
from fourfold.plan.plan import Passes, Plan, load_plan, save_plan
from fourfold.plan.program import Compute, Move, Program, Repeat
from fourfold.plan.strategies import STRATEGIES, named

__all__ = [
    "STRATEGIES", "Compute", "Exchange", "Layout", "Mesh", "Move", "Own", "Passes", "Plan", "Program", "Repeat",
    "load_plan", "lower", "named", "save_plan",
]  # fmt: skip
