"""Meshes, layouts, exchanges, plans and their lowering to programs. No torch."""

from fourfold.plans.compose import Options
from fourfold.plans.exchange import Exchange
from fourfold.plans.files import load_plan, save_plan
from fourfold.plans.layout import Layout
from fourfold.plans.lower import lower
from fourfold.plans.mesh import Mesh
from fourfold.plans.own import Own
from fourfold.plans.pipeline import Pipeline, pipeline
from fourfold.plans.plan import Passes, Plan
from fourfold.plans.program import Compute, Move, Program, Repeat
from fourfold.plans.strategies import STRATEGIES, named

__all__ = [
    "STRATEGIES", "Compute", "Exchange", "Layout", "Mesh", "Move", "Options", "Own", "Passes", "Pipeline", "Plan", "Program",
    "Repeat", "load_plan", "lower", "named", "pipeline", "save_plan",
]  # fmt: skip
