"""Fourfold predicts, plans and runs hybrid-parallel training of any PyTorch model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.planning import plan
    from fourfold.runs.parallel import Parallel, parallelize

__version__ = "0.1.0"
__all__ = ["Parallel", "parallelize", "plan"]


def __getattr__(name: str) -> Any:
    """Public names are loaded on first use, so that `import fourfold` leaves torch alone."""
    if name == "plan":
        from fourfold.planning import plan

        return plan
    if name in __all__:
        from fourfold.runs import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
