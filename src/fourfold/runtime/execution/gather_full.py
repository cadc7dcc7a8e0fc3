"""Tensors of a running plan as one device would hold them, on every rank: outputs, gradients, state. All ranks must call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.plans.layout.layout import Layout
from fourfold.runtime.execution.stage_transport import gradient_of

if TYPE_CHECKING:
    from fourfold.runtime.execution.runner import Outcome, Runner


def whole_outputs(runner: Runner, outcome: Outcome) -> dict[str, Tensor]:
    """The outputs of a step, its micro-batches put together."""
    out: dict[str, Tensor] = {}
    graph, plan = runner.lowered.loss.graph, runner.plan
    for part in runner.lowered.parts:
        for name in (n for n in part.graph.outputs if n in graph.outputs and n not in out):
            held: list[Any] = outcome.outputs.get(name) or [None] * plan.microbatches
            sizes = zip(held, plan.sizes, strict=True)
            pieces = [_on_all_ranks(runner, part.index, part.output_layout(name, size), piece) for piece, size in sizes]
            dim = graph.batch_dim(name)
            out[name] = pieces[0] if len(pieces) == 1 or dim is None else torch.cat(pieces, dim)
    return {name: out[name] for name in graph.outputs if name in out}


def whole_gradients(runner: Runner) -> dict[str, Tensor]:
    """The gradients of everything that is trained, by state_dict key."""
    trained = {p.name for p in runner.lowered.graph.parameters if p.trainable}
    return {key: _whole_tensor(runner, index, name, gradient=True) for index, name, key in _homes(runner) if name in trained}


def whole_state(runner: Runner) -> dict[str, Tensor]:
    """Parameters and buffers, by state_dict key."""
    return {key: _whole_tensor(runner, index, name, gradient=False) for index, name, key in _homes(runner)}


def _homes(runner: Runner) -> Iterable[tuple[int, str, str]]:
    """Stage, name and key of every stored tensor, tied ones once, in one order on all ranks."""
    seen: set[str] = set()
    for part in runner.lowered.parts:
        for parameter in part.graph.parameters:
            if parameter.name not in seen and parameter.name in part.program.stored:
                seen.add(parameter.name)
                yield part.index, parameter.name, parameter.key


def _whole_tensor(runner: Runner, index: int, name: str, *, gradient: bool) -> Tensor:
    layout, executor = runner.lowered.parts[index].program.stored[name], runner.executors.get(index)
    tensor = executor.state[name] if executor is not None else None
    if tensor is not None and gradient:
        tensor = gradient_of(tensor)
    return _on_all_ranks(runner, index, layout, tensor).clone()


def _on_all_ranks(runner: Runner, index: int, layout: Layout, tensor: Tensor | None) -> Tensor:
    """A stage's tensor gathered and broadcast to all ranks."""
    executor, part = runner.executors.get(index), runner.lowered.parts[index]
    whole = executor.gather_full(layout, tensor).contiguous() if executor is not None and tensor is not None else None
    if len(runner.lowered.places) == 1:
        assert whole is not None
        return whole
    box: list[Any] = [(whole.dtype if whole is not None else None)]
    dist.broadcast_object_list(box, src=part.stage.ranks[0])
    if whole is None:
        whole = torch.empty(layout.shape, dtype=box[0], device=runner.device)
    plain = whole.to(torch.uint8) if whole.dtype == torch.bool else whole  # gloo carries no booleans
    dist.broadcast(plain, src=part.stage.ranks[0])
    return plain.to(whole.dtype)
