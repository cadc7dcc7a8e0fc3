"""Fourfold predicts, plans and runs hybrid-parallel training of any PyTorch model.

The public names are those of `__all__`; `fourfold.api` says what each does.
"""

from __future__ import annotations

import sys
from types import ModuleType
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

__version__ = "0.1.0"
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


def __getattr__(name: str) -> Any:
    """Public names are loaded on first use, so that `import fourfold` leaves torch alone."""
    if name in __all__:
        from fourfold import api

        return getattr(api, name)
    raise AttributeError(f"module 'fourfold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Three public functions share their names with packages (`models`, `calibrate`, `report`): importing such a package must
    not replace the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
