"""Inputs and targets of a step, whole or as a rank's parts, cut for its stages and micro-batches.

The loss's denominators are counted here too, before the first forward, because they are of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fourfold.errors import InvalidInput
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.runtime.execution.executor import Executor

Feeds = dict[int, list[dict[str, Tensor]]]
"""By stage and micro-batch: the inputs and targets a stage reads."""


class Feeder:
    """Cuts inputs for the stages of this rank. `counters`: per stage the programs that count what the loss divides by."""

    def __init__(self, lowered: LoweredPlan, executors: Mapping[int, Executor], counters: Mapping[int, Executor]) -> None:
        self.lowered, self.plan, self.executors, self.counters = lowered, lowered.plan, executors, counters
        self.fixed: dict[tuple[int, str], Tensor] = {}  # known factors of the loss's terms, by stage and name

    def local_parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole inputs and targets, of all micro-batches; of what its stages do not read, no rows."""
        feeds, out = {index: self.feeds_of(index, tensors) for index in self.executors}, {}
        for name, tensor in tensors.items():
            dim = self.lowered.graph.batch_dim(name)
            rows = next(([feed[name] for feed in feeds[i]] for i in feeds if name in feeds[i][0]), None)
            rows = rows or [tensor[:0] if tensor.dim() else tensor]
            out[name] = rows[0] if len(rows) == 1 or dim is None else torch.cat(rows, dim)
        return out

    def feeds_of(self, index: int, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The inputs, targets and loss scales that each micro-batch of a stage reads."""
        executor = self.executors[index]
        readers = [r for r in (executor, self.counters.get(index)) if r is not None]
        first = {n: next((r for r in readers if n in r.program.stored), None) for n in tensors}
        rows = {name: self._by_microbatch(one, name, tensors[name]) for name, one in first.items() if one is not None}
        feeds = [{name: pieces[m] for name, pieces in rows.items()} for m in range(self.plan.microbatches)]
        scales = [n for n in self.lowered.loss.scales if n in executor.program.stored]
        values = self._scales(index, feeds) if scales else {}
        for feed in feeds:
            feed.update({name: values[name] for name in scales})
        return feeds

    def _by_microbatch(self, executor: Executor, name: str, tensor: Tensor) -> list[Tensor]:
        """A tensor's part for each micro-batch."""
        sizes, dim = self.plan.sizes, self.lowered.graph.batch_dim(name)
        if len(sizes) == 1:
            return [executor.cut(name, tensor, sizes[0])]
        if dim is None:
            return [executor.cut(name, tensor, size) for size in sizes]
        if tensor.shape[dim] == self.plan.batch:
            return [executor.cut(name, piece, size) for piece, size in zip(tensor.split(sizes, dim), sizes, strict=True)]
        own = [executor.local.shape(executor.programs[size].stored[name])[dim] for size in sizes]
        if tensor.shape[dim] != sum(own):
            raise InvalidInput(
                f"input '{name}' has {tensor.shape[dim]} rows; the plan wants all {self.plan.batch} or this "
                f"rank's {sum(own)}; plan again for another batch"
            )
        return [executor.cut(name, piece, size) for piece, size in zip(tensor.split(own, dim), sizes, strict=True)]

    @torch.no_grad()
    def _scales(self, index: int, feeds: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """What the terms of the loss are multiplied by: known numbers, and one over what the loss divides by."""
        loss, executor = self.lowered.loss, self.executors[index]
        specs = {n: executor.program.graph.values[n] for n in loss.scales if n in executor.program.stored}
        kinds = {n: executor.local.dtype(spec.dtype) for n, spec in specs.items()}
        device = executor.world.device
        for name, value in loss.fixed.items():
            if name in kinds and (index, name) not in self.fixed:  # once: a copy to a GPU makes the host wait
                self.fixed[index, name] = torch.tensor(value, dtype=kinds[name], device=device)
        out = {name: self.fixed[index, name] for name in loss.fixed if name in kinds}
        if index not in self.counters:
            return out
        totals = self._count_totals(self.counters[index], feeds)
        return {**out, **{n: (1.0 / totals[c].double()).to(kinds[n]) for n, c in loss.counted.items() if n in kinds}}

    def _count_totals(self, counter: Executor, feeds: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The sums over all micro-batches, and over the ranks of the stage."""
        totals: dict[str, Tensor] = {}
        for feed, size in zip(feeds, self.plan.sizes, strict=True):
            program = counter.programs[size]
            out = counter.forward({n: feed[n] for n in (*program.graph.inputs, *program.graph.targets)}, size)
            for name in program.outputs:
                axes = counter.world.mesh.ordered(program.layouts[name].partial)
                value = counter.world.all_reduce(out[name], axes)
                totals[name] = totals[name] + value if name in totals else value
        return totals
