"""The public functions and values: what the command line calls, and what `fourfold` exports.

    plan, explain, report, simulate      predict: from a model and a cluster to plans, costs and pages
    parallelize, verify, train           run a plan on ranks
    calibrate                            measure this machine for the predictions
    models, clusters, inspect            what is built in, and what a model consists of
    load_plan, save_plan                 plan files

Enters: MODEL texts or modules, names of clusters, plans and their files. Leaves: values. Prints nothing. Names are loaded on
first use: planning a cached built-in model loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.api.calibration import calibrate
    from fourfold.api.catalog import clusters, inspect, models
    from fourfold.api.explanation import explain
    from fourfold.api.page import report
    from fourfold.api.planning import plan
    from fourfold.api.running import train, verify
    from fourfold.api.scaling import simulate
    from fourfold.cluster import Cluster
    from fourfold.errors import CaptureFailed, Damaged, Error, Infeasible, InvalidInput, Notice, StalePlan, WorkerFailed
    from fourfold.plans import Mesh, Options, Plan, load_plan, save_plan
    from fourfold.runs.parallel import Parallel, parallelize
    from fourfold.workload.workload import Workload

__all__ = [
    "CaptureFailed",
    "Cluster",
    "Damaged",
    "Error",
    "Infeasible",
    "InvalidInput",
    "Mesh",
    "Notice",
    "Options",
    "Parallel",
    "Plan",
    "StalePlan",
    "WorkerFailed",
    "Workload",
    "calibrate",
    "clusters",
    "explain",
    "inspect",
    "load_plan",
    "models",
    "parallelize",
    "plan",
    "report",
    "save_plan",
    "simulate",
    "train",
    "verify",
]

_MODULES = {
    "api.calibration": ("calibrate",),
    "api.catalog": ("clusters", "inspect", "models"),
    "api.explanation": ("explain",),
    "api.page": ("report",),
    "api.planning": ("plan",),
    "api.running": ("train", "verify"),
    "api.scaling": ("simulate",),
    "cluster": ("Cluster",),
    "errors": ("CaptureFailed", "Damaged", "Error", "Infeasible", "InvalidInput", "Notice", "StalePlan", "WorkerFailed"),
    "plans": ("Mesh", "Options", "Plan", "load_plan", "save_plan"),
    "runs.parallel": ("Parallel", "parallelize"),
    "workload.workload": ("Workload",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fourfold.api' has no attribute '{name}'")
    return getattr(import_module(f"fourfold.{_MODULE_OF[name]}"), name)
