"""Two eager steps against the captured graph, so that what capture lost without a trace is found before a run begins.

`graph/export_watch.py` refuses what it detects. Hooks on `grad_fn` nodes and state outside of the module it cannot detect; they
show in the numbers, the state in the second step. The module and the program on one rank take two steps from the same weights
with the same two samples each, in float64, and must agree within 1e-6, or within ten times what rounding alone does to the
module. Larger models than `MOST_FLOPS` and `MOST_BYTES` are not checked, nor are those on meta, and the answer says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.errors import CaptureFailed, Error
from fourfold.graph.capture import WithLoss
from fourfold.graph.module_attributes import preserve_attributes
from fourfold.ops.nest import nest_of
from fourfold.plans import Mesh, Plan
from fourfold.runs.compare import Distances
from fourfold.runs.comparison_run import ComparisonRun, run_steps
from fourfold.runs.reference import PROGRAM, Reference
from fourfold.runs.verify import Check, checks64
from fourfold.units import bytes_text
from fourfold.workload.workload import Workload, stored_tensors

MOST_FLOPS = 2e9  # of one forward of two samples
MOST_BYTES = 2**30  # of weights and activations of two samples in float64
TOLERANCE = 1e-6
SAMPLES, _STEPS = 2, 2
Share = Callable[[Callable[[], Any]], Any]
"""Computes a value on one rank and gives it to all."""


def refuse_together(workload: Callable[[], Workload], share: Share) -> str | None:
    """`refuse_unfaithful` on one rank, for all of them."""

    def found() -> str | Error | None:
        try:
            return refuse_unfaithful(workload())
        except Error as error:
            return error

    answer: str | Error | None = share(found)
    if isinstance(answer, Error):
        raise answer
    return answer


def refuse_unfaithful(workload: Workload) -> str | None:
    """Raise if the captured graph trains with other numbers than the module; the result says why that was not checked."""
    reason = _why_not(workload)
    if reason is None:
        small, others = _few(workload)
        with restored(small):
            reason = _compare(small, others)
    return f"capture was not compared with eager PyTorch: {reason}" if reason is not None else None


def _why_not(workload: Workload) -> str | None:
    """Why a model is not compared, if so: where it lies, or its size."""
    graph = workload.graph
    where = _devices(workload)
    if len(where) > 1 or "meta" in (device.type for device in where):
        return f"module and data are on {', '.join(sorted(map(str, where)))}"
    concrete = graph.at(graph.batch or min(SAMPLES, workload.batch))
    flops = sum(nest_of(op, concrete).flops for op in concrete.ops)
    if flops > MOST_FLOPS:
        return f"forward takes {flops:.1e} FLOPs, at most {MOST_FLOPS:.0e} are spent on it"
    size = 8 * sum(spec.numel for spec in concrete.values.values())
    if size > MOST_BYTES:
        return f"its tensors take {bytes_text(size)}, at most {bytes_text(MOST_BYTES)} are spent on it"
    return None


def _devices(workload: Workload) -> set[torch.device]:
    return {tensor.device for tensor in (*stored_tensors(workload.example).values(), *workload.example.tensors)}


def _few(workload: Workload) -> tuple[Workload, list[Tensor]]:
    """The workload with its first samples only, where the graph leaves the batch open, and others for the second step."""
    graph, example = workload.graph, workload.example
    names = (*graph.inputs, *graph.targets)
    rows = [graph.batch_dim(name) if graph.batch is None else None for name in names]
    count = min(SAMPLES, workload.batch)
    tensors = [t if d is None else t.narrow(d, 0, count) for t, d in zip(example.tensors, rows, strict=True)]
    others = [t if d is None else t.narrow(d, t.shape[d] - count, count) for t, d in zip(example.tensors, rows, strict=True)]
    others = [1.5 * t if t.is_floating_point() else t for t in others]  # another batch, however few samples there are
    inputs, targets = tensors[: len(example.inputs)], tensors[len(example.inputs) :]
    given = dict(zip(example.inputs, inputs, strict=True)) if isinstance(example.inputs, Mapping) else tuple(inputs)
    return Workload(text=workload.text, example=example._replace(inputs=given, targets=tuple(targets)), graph=graph), others


def _compare(workload: Workload, others: list[Tensor]) -> str | None:
    (device,) = _devices(workload)
    reference = Reference(workload=workload, steps=_STEPS, device=device, later=(others,))
    try:
        expected = reference.exact
    except Exception as error:  # the user's code on data of ours
        return f"eager PyTorch raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reference.kind == PROGRAM:
        return "its random numbers cannot be replayed"
    if not all(map(np.isfinite, expected.losses)):
        return f"the loss is {expected.losses} on two samples"
    try:
        checks = _checks(workload, reference, others)
    except Error:
        raise
    except Exception as error:  # a kernel that does not exist in float64, say
        return f"in float64 it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for check in sorted(checks, key=lambda check: -check.error):
        if check.error > max(TOLERANCE, check.limit):
            raise CaptureFailed(
                f"{type(workload.example.module).__name__} as captured does not train as eager PyTorch does: in float64 "
                f"{check.what} {check.tensor} is off by {check.error:.1e} after step {check.step}, {TOLERANCE:.0e} allowed; "
                "look for hooks on grad_fn and for numbers that forward takes from outside of the module"
            )
    return None


def _checks(workload: Workload, reference: Reference, others: list[Tensor]) -> list[Check]:
    """The program on one rank against the module."""
    graph = workload.graph
    plan = Plan(graph=graph.hash, batch=workload.batch, mesh=Mesh.of(data=1))
    task = ComparisonRun(graph=graph, plan=plan, data="", device=reference.device.type, steps=_STEPS)
    got = run_steps(task, reference.start, workload.example.tensors, later=[others])
    distances = Distances(reference.exact, reference.start, {p.key for p in graph.parameters if p.trainable})
    checks, _, _ = checks64(distances.of(got), distances, reference)
    return checks


@contextmanager
def restored(workload: Workload) -> Iterator[None]:
    """The module's attributes, and the random states of torch, Python and NumPy, are afterwards what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    whole, gpus = WithLoss(workload.example.module, workload.example.loss), [d for d in _devices(workload) if d.type == "cuda"]
    with preserve_attributes(whole), torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
