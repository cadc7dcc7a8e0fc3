"""Fourfold predicts, plans and runs hybrid-parallel training of any PyTorch model.

The public names are those of `__all__`; `fourfold.api` says what each does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fourfold import api

if TYPE_CHECKING:
    from fourfold.api import *  # noqa: F403

__version__ = "0.1.0"
__all__ = list(api.__all__)


def __getattr__(name: str) -> Any:
    """Public names are loaded on first use, so that `import fourfold` leaves torch alone."""
    if name in __all__:
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
