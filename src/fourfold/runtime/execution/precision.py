"""What a precision means in a run: the dtypes that captured ones become, the graph that is run, and the mode of matrix units.

bf16 is autocast over float32 weights. Its casts are ops of the graph (`graph.autocast`), so that what is run is what was
predicted: messages, divided weights and saved tensors have the dtypes that the lists say. Sums of gradients, statistics and
the loss stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fourfold.errors import InvalidInput, nearest
from fourfold.graph import Graph
from fourfold.graph.autocast import as_computed
from fourfold.graph.spec import computed_as
from fourfold.plans import LoweredPlan, Plan, lower_plan
from fourfold.plans.spec.other_graph import transferred

PRECISIONS: dict[str, dict[str, torch.dtype]] = {
    precision: {name: getattr(torch, wide) for name, wide in computed_as(precision).items()}
    for precision in ("fp32", "tf32", "bf16", "fp64")
}
"""In all but fp64 they stay as the module (in bf16: autocast) has them."""


def check_precision_name(precision: str) -> None:
    """Refuse a precision that does not exist."""
    if precision not in PRECISIONS:
        raise InvalidInput(f"unknown precision '{precision}'{nearest(precision, PRECISIONS)}; known: {', '.join(PRECISIONS)}")


def lower_for_precision(graph: Graph, plan: Plan, *, precision: str, device: str) -> LoweredPlan:
    """Lower a plan as it runs in a precision on a kind of device."""
    computed = as_computed(graph, precision, device)
    plan.check(graph)
    return lower_plan(computed, transferred(plan, graph, computed))


def set_matrix_mode(precision: str) -> None:
    """Let GPUs use their tf32 units in tf32 alone. Of this process, from now on."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def matrix_mode(precision: str) -> Iterator[None]:
    """The same for a while."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    set_matrix_mode(precision)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
