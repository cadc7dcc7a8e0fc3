"""Where a rank's stored tensors come from: a module's tensors, fresh values for a module built on meta, or a file.

A meta-built model is never whole anywhere: one submodule at a time is given memory, initialised by its own
`reset_parameters` under a seed of its own, cut to this rank's shards and let go. Every rank draws the same values, so
shards fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.graph.capture import Loss, WithLoss, capture
from fourfold.models import Example
from fourfold.plans import Plan
from fourfold.plans.layout.layout import Layout
from fourfold.runtime.comm.exchange import take
from fourfold.runtime.comm.world import World
from fourfold.workload.materialise import initial_values
from fourfold.workload.plan_inputs import examples
from fourfold.workload.workload import stored_tensors

Loader = Callable[[str, Layout], Tensor]


def cut(tensor: Tensor, layout: Layout, world: World) -> Tensor:
    """This rank's part of a whole tensor: the tensor itself where it is whole, else a copy of the part."""
    part = take(tensor, tuple(s.spans for s in layout.box(world.coords)))
    return part if part is tensor else part.clone(memory_format=torch.contiguous_format)


class Source(Protocol):
    """The stored tensors of a model and its loss, by the keys a graph knows them by: those of the loss begin with ``loss.``."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, whole; some may be on meta."""

    @property
    def model_keys(self) -> tuple[str, ...]:
        """The keys of the model's state_dict."""

    @property
    def loss_keys(self) -> tuple[str, ...]:
        """The keys of the loss's state_dict, with ``loss.`` before them."""

    def loader(self, world: World) -> Loader:
        """Gives a rank its part of each."""

    def evaluation_graph(self, plan: Plan) -> Graph:
        """The graph of the model in eval mode."""


class ModuleSource:
    """The tensors of a module, in place where a rank holds them whole."""

    def __init__(self, model: nn.Module, loss: Loss | None, *, seed: int = 0) -> None:
        self.model, self.loss, self.seed = model, loss, seed
        self.whole = WithLoss(model, loss)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        every = {**stored_tensors(Example(self.model, (), (), self.loss))}
        every.update({key.removeprefix("model."): tensor for key, tensor in self.whole.state_dict(keep_vars=True).items()})
        return every

    @property
    def model_keys(self) -> tuple[str, ...]:
        return tuple(self.model.state_dict())

    @property
    def loss_keys(self) -> tuple[str, ...]:
        return tuple(f"loss.{key}" for key in self.loss.state_dict()) if isinstance(self.loss, nn.Module) else ()

    def loader(self, world: World) -> Loader:
        fresh: dict[str, Tensor] = {}
        of_loss = {k for k, _ in (*self.whole.named_parameters(), *self.whole.named_buffers()) if k.startswith("loss.")}

        def load(key: str, layout: Layout) -> Tensor:
            owner_name, _, name = key.rpartition(".")
            owner = (self.whole if key in of_loss else self.whole.model).get_submodule(owner_name)
            tensor = getattr(owner, name).detach()
            if tensor.is_meta:
                if key not in fresh:
                    fresh.clear()
                    prefix = f"{owner_name}." if owner_name else ""
                    fresh.update({prefix + n: t for n, t in initial_values(owner, owner_name, self.seed).items()})
                tensor = fresh[key]
            return cut(tensor.to(world.device), layout, world)

        return load

    def evaluation_graph(self, plan: Plan) -> Graph:
        return capture(self.model, *examples(plan, self.model), self.loss, train=False)


class StateSource:
    """Whole tensors read from a file, of which each rank copies its part. `evaluation`: the graph in eval mode, if there is."""

    def __init__(self, state: Mapping[str, Tensor], *, evaluation: Graph | None = None) -> None:
        self.tensors, self.evaluation = state, evaluation

    @property
    def model_keys(self) -> tuple[str, ...]:
        return tuple(key for key in self.tensors if not key.startswith("loss."))

    @property
    def loss_keys(self) -> tuple[str, ...]:
        return tuple(key for key in self.tensors if key.startswith("loss."))

    def loader(self, world: World) -> Loader:
        return lambda key, layout: cut(self.tensors[key], layout, world).to(world.device, copy=True)

    def evaluation_graph(self, plan: Plan) -> Graph:
        if self.evaluation is None:
            raise InvalidInput("this run has no graph for evaluation; give it one when it begins")
        return self.evaluation
