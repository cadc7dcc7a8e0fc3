"""What captured dtypes become in a run, by precision."""

from __future__ import annotations

import torch

from fourfold.graph.spec import computed_as

PRECISIONS: dict[str, dict[str, torch.dtype]] = {
    precision: {name: getattr(torch, wide) for name, wide in computed_as(precision).items()} for precision in ("fp32", "fp64")
}
"""In fp32 they stay as the module has them."""
