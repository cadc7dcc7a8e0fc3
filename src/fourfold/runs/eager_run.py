"""Training steps of the eager module itself in this process, as the user would write them.

Micro-batches change nothing but batch norm's statistics, buffers that forward updates and the masks drawn. A model with such
is run on one micro-batch after the other, and its loss taken of all their outputs together; any other on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fourfold.errors import Infeasible
from fourfold.graph import Graph
from fourfold.graph.capture import WithLoss, mean_square
from fourfold.graph.module_attributes import preserve_attributes
from fourfold.plans import Mesh, Plan
from fourfold.runs.comparison_run import RunResult
from fourfold.runs.plan_random_numbers import PlanRandomNumbers, RandomOpsDiffer, casts, draws
from fourfold.runtime.comm.exchange import is_inexact
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import PRECISIONS, matrix_mode
from fourfold.workload.workload import Workload, stored_tensors

CPU = torch.device("cpu")


def eager_trial(
    workload: Workload,
    state: Mapping[str, Tensor],
    tensors: list[Tensor],
    *,
    precision: str,
    optimizer: str,
    steps: int,
    device: torch.device = CPU,
    microbatches: int = 1,
    later: Sequence[list[Tensor]] = (),
) -> RunResult:
    """The steps of `run_steps`, by the module itself in this process."""
    example, dtypes = workload.example, PRECISIONS[precision]
    whole = WithLoss(example.module, example.loss)
    random_numbers = random_numbers_for(workload, precision, microbatches, device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtypes.get(str(tensor.dtype).removeprefix("torch."), tensor.dtype))

    before = {key: (t, t.data, t.grad) for key, t in stored_tensors(example).items()}
    try:
        for key, (tensor, _, _) in before.items():
            tensor.data = cast(state[key]).clone()
            tensor.grad = None
        batches = [[cast(t) for t in (later[step - 1] if step and later else tensors)] for step in range(steps)]
        forward = partial(_forward, whole, workload, microbatches, random_numbers, precision)
        with preserve_attributes(whole), matrix_mode(precision):
            return _steps(whole, forward, batches, workload.graph, optimizer, random_numbers)
    finally:
        for tensor, data, grad in before.values():
            tensor.data, tensor.grad = data, grad


def random_numbers_for(
    workload: Workload, precision: str, microbatches: int = 1, device: torch.device = CPU
) -> PlanRandomNumbers | None:
    """What eager runs under, where it would otherwise draw or round otherwise than the program."""
    graph, dtypes = workload.graph, PRECISIONS[precision]
    if any(map(draws, graph.ops)) or (dtypes and (graph.constants or any(map(casts, graph.ops)))):
        return PlanRandomNumbers(graph, workload.batch, microbatches, dtypes, device)
    return None


def _forward(
    whole: WithLoss,
    workload: Workload,
    microbatches: int,
    random_numbers: PlanRandomNumbers | None,
    precision: str,
    tensors: list[Tensor],
) -> tuple[Tensor, Any]:
    """Loss and outputs, the model run on one micro-batch after the other and the loss taken once."""
    device = tensors[0].device.type
    with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
        return _called(whole, workload, microbatches, random_numbers, tensors)


def _called(
    whole: WithLoss, workload: Workload, microbatches: int, random_numbers: PlanRandomNumbers | None, tensors: list[Tensor]
) -> tuple[Tensor, Any]:
    fresh, names = [t.clone() for t in tensors], workload.example.inputs  # forward may write into its inputs
    given, targets = fresh[: len(names)], tuple(fresh[len(names) :])
    inputs: Any = dict(zip(names, given, strict=True)) if isinstance(names, Mapping) else tuple(given)
    if microbatches == 1:
        result: tuple[Tensor, Any] = whole(inputs, targets)
        return result
    sizes = Plan(graph="", batch=workload.batch, mesh=Mesh.of(data=1), microbatches=microbatches).sizes
    flat, spec = pytree.tree_flatten(inputs)
    dims = [workload.graph.batch_dim(name) for name in workload.graph.inputs]
    rows = [t.split(sizes, d) if d is not None else [t] * microbatches for t, d in zip(flat, dims, strict=True)]
    parts = []
    for m in range(microbatches):
        if random_numbers is not None and m:
            random_numbers.forward_done()
            random_numbers.microbatch(m)
        given = pytree.tree_unflatten([row[m] for row in rows], spec)
        parts.append(whole.model(**given) if isinstance(given, Mapping) else whole.model(*given))
    along = {key: workload.graph.batch_dim(name) for key, name in _output_names(workload.graph, parts[0]).items()}
    outputs = pytree.tree_map(lambda *leaves: _joined(leaves, along.get(id(leaves[0])), random_numbers), *parts)
    return (whole.loss(outputs, *targets) if whole.loss else mean_square(outputs)), outputs


def _joined(leaves: tuple[Any, ...], dim: int | None, random_numbers: PlanRandomNumbers | None) -> Any:
    """An output put together from micro-batches along its dim of samples."""
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first
    if dim is not None:
        return torch.cat(leaves, dim)
    what = f"an output of shape {tuple(first.shape)} has no dim of samples along which to put micro-batches together"
    raise Infeasible(f"{what}; verify with 1 micro-batch") if random_numbers is None else RandomOpsDiffer(what)


def _steps(
    whole: WithLoss,
    forward: Callable[[list[Tensor]], tuple[Tensor, Any]],
    data: list[list[Tensor]],
    graph: Graph,
    optimizer: str,
    random_numbers: PlanRandomNumbers | None,
) -> RunResult:
    parameters = [p for p in whole.parameters() if p.requires_grad]
    update = optimizer_named(optimizer)(list(parameters)) if parameters else None
    trial = RunResult()
    for step, tensors in enumerate(data):
        for parameter in parameters:
            parameter.grad = None
        with random_numbers.step(step) if random_numbers is not None else nullcontext():
            loss, outputs = forward(tensors)
            if random_numbers is not None:
                random_numbers.forward_done()
            if loss.requires_grad:
                loss.backward()
        trial.losses.append(float(loss.detach()))
        if step == 0:
            trial.outputs = _outputs(graph, outputs)
            trial.gradients = {k: p.grad.clone() for k, p in _named(whole, buffers=False).items() if p.grad is not None}
        if update is not None:
            update.step()
        if step == 0:
            trial.first_state = {k: t.detach().clone() for k, t in _named(whole).items()}
    trial.state = {k: t.detach().clone() for k, t in _named(whole).items()}
    return trial


def _named(whole: WithLoss, *, buffers: bool = True) -> dict[str, Tensor]:
    tensors = [*whole.named_parameters(), *(whole.named_buffers() if buffers else ())]
    return {key.removeprefix("model."): tensor for key, tensor in tensors}


def _outputs(graph: Graph, outputs: Any) -> dict[str, Tensor]:
    """The module's outputs by the names the graph gives them; one returned twice is one value there."""
    tensors = {id(t): t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)}
    named = {name: tensors[key] for key, name in _output_names(graph, outputs).items()}
    return {name: t.detach().clone() for name, t in named.items() if is_inexact(t)}


def _output_names(graph: Graph, outputs: Any) -> dict[int, str]:
    """The graph's name of each output tensor, by its id."""
    ids = list(dict.fromkeys(id(t) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)))
    assert len(ids) == len(graph.outputs), f"{len(ids)} outputs, {len(graph.outputs)} captured"
    return dict(zip(ids, graph.outputs, strict=True))
