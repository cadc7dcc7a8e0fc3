"""Shapes and dtypes of the tensors a plan was made with: written into it as plain data, and made into tensors again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import InvalidInput
from fourfold.graph.capture import Inputs
from fourfold.plans import Plan


def signature_of(inputs: Inputs, targets: tuple[Tensor, ...]) -> dict[str, Any]:
    """Shapes and dtypes of tensors as plain data."""
    given = inputs.items() if isinstance(inputs, Mapping) else [("", t) for t in inputs]
    return {"inputs": [_row(name, t) for name, t in given], "targets": [_row("", t) for t in targets]}


def _row(name: str, tensor: Tensor) -> list[Any]:
    return [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def with_signature(plan: Plan, inputs: Inputs, targets: tuple[Tensor, ...]) -> Plan:
    """The plan with the shapes of its inputs written down."""
    return replace(plan, signature=signature_of(inputs, targets))


def examples(plan: Plan, model: nn.Module) -> tuple[Inputs, tuple[Tensor, ...]]:
    """Tensors of the shapes in a plan's signature, for capturing."""
    if not plan.signature:
        raise InvalidInput("the plan does not say what inputs it was made with; pass graph= or plan again")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def tensor(row: Any) -> Tensor:
        return torch.zeros(row[1], dtype=getattr(torch, row[2]), device=device)

    rows = plan.signature["inputs"]
    inputs: Any = {r[0]: tensor(r) for r in rows} if rows and rows[0][0] else tuple(tensor(r) for r in rows)
    return inputs, tuple(tensor(r) for r in plan.signature["targets"])
