"""The Python interface: a module and a plan become a `Parallel` that trains with the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fourfold.errors import Infeasible, InvalidInput, Notice
from fourfold.graph import Graph
from fourfold.graph.capture import Loss, WithLoss, capture
from fourfold.models import Example
from fourfold.optimizers import ELEMENTWISE
from fourfold.plans import Mesh, Plan
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.plan_lowering import lower_plan, lower_stages
from fourfold.runs.capture_check import SAMPLES, refuse_together
from fourfold.runs.claims import claim
from fourfold.runs.initial_tensors import cut, loader
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution.executor import FullTensor
from fourfold.runtime.execution.gather_full import whole_outputs, whole_state
from fourfold.runtime.execution.runner import Runner
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.rank_pool import from_first_rank
from fourfold.timeline import Timeline
from fourfold.workload.materialise import synthetic_tensor
from fourfold.workload.plan_inputs import examples
from fourfold.workload.workload import Workload, stored_tensors

Named = list[tuple[str, Tensor]]
OptimizerFactory = Callable[[Named], torch.optim.Optimizer]

IN_EVAL_MODE = "{} is in eval mode and is trained so, without dropout; if that is not meant, call model.train() first"
"""What users are told who may have forgotten it: a Hugging Face model, for one, comes in eval mode."""


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    device: torch.device | None = None,
    graph: Graph | None = None,
    seed: int = 0,
    check: bool = True,
) -> Parallel:
    """Bind a module to a plan on the ranks of the running process group (or on one rank without one).

    The module is captured again, every submodule in the mode it is in, and must be the one the plan was made for. Its
    tensors are used in place where a rank holds them whole; a module on meta is initialised shard by shard. `check`:
    whether the first rank compares two steps of the captured graph with eager PyTorch, where the model is small enough for
    that; a `graph` that is given is not compared.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise InvalidInput(
            f"optimizer= is a {name}, but each rank builds one for its own shards; pass a factory, as "
            f"optimizer=lambda named: torch.optim.{name}([p for _, p in named], lr=...)"
        )
    World.started(Mesh.of(all=plan.size), device or torch.device("cpu"))
    notes = [] if model.training else [IN_EVAL_MODE.format(type(model).__name__)]
    if graph is None:
        found = graph = capture(model, *examples(plan, model), loss)
        plan.check(graph)
        reason = refuse_together(lambda: _example_workload(model, plan, found, loss), from_first_rank) if check else None
        notes += [reason] if reason is not None else []
    if not dist.is_initialized() or dist.get_rank() == 0:
        for note in notes:
            warnings.warn(note, Notice, stacklevel=2)
    return Parallel(model, plan, graph, loss=loss, optimizer=optimizer, device=device, seed=seed)


def _example_workload(model: nn.Module, plan: Plan, graph: Graph, loss: Loss | None) -> Workload:
    """The model with a few made-up samples; all of the batch where it cannot be another."""
    generator = torch.Generator().manual_seed(0)
    few = plan.batch if graph.batch is not None else min(plan.batch, 2 * SAMPLES)

    def made(tensor: Tensor) -> Tensor:
        batched = tensor.dim() > 0 and tensor.shape[0] == plan.batch
        return synthetic_tensor(tensor[:few] if batched else tensor, generator)

    inputs, targets = pytree.tree_map(made, examples(plan, model))
    return Workload(text="", example=Example(model, inputs, targets, loss), graph=graph)


class Parallel:
    """A module split over ranks. `optimizer` holds this rank's shards; `module` shows them under the original names."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        graph: Graph,
        *,
        loss: Loss | None,
        optimizer: OptimizerFactory | None,
        device: torch.device | None,
        seed: int,
    ) -> None:
        self.plan, self.graph = plan, graph
        self._model, self._loss, self._seed = model, loss, seed
        self._loaded: dict[str, Tensor] = {}
        self.lowered = lower_plan(graph, plan)
        self._claim(device or torch.device("cpu"))
        self._runner = Runner(self.lowered, self._loader, device=device, randomness=Randomness(seed=seed))
        self._evaluator: Runner | None = None
        self.module = _tree(self._held())
        nothing = torch.zeros(0, device=self._runner.device, requires_grad=True)  # torch's optimizers refuse an empty list
        trained = self._runner.named() or [("nothing", nothing)]
        self.optimizer = self._checked(optimizer(trained)) if optimizer is not None else None

    def _claim(self, device: torch.device) -> None:
        """Say which of the module's tensors this is to train, and which of them every rank uses in place."""
        held = stored_tensors(Example(self._model, (), (), self._loss))
        stored = self.lowered.parts[0].program.stored if len(self.lowered.parts) == 1 and self.plan.zero != 3 else None
        used = {p.name: p.key for p in self.graph.parameters}
        in_place = {} if stored is None else {n: k for n, k in used.items() if n not in stored or not stored[n].sharded}
        weights = {key: held[key] for key in used.values()}
        changing = {p.key for p in self.graph.parameters if p.trainable or p.buffer}
        claim(self, weights, {key for key in in_place.values() if weights[key].device == device}, changing)

    def _loader(self, world: World) -> FullTensor:
        """The module's own tensors, or those loaded since that no rank trains."""
        load = loader(WithLoss(self._model, self._loss), world, seed=self._seed)
        return lambda key, layout: cut(self._loaded[key], layout, world) if key in self._loaded else load(key, layout)

    def _kept_keys(self) -> set[str]:
        """Keys of what some rank keeps for training."""
        parts = self.lowered.parts
        return {p.key for part in parts for p in part.graph.parameters if p.name in part.program.stored}

    def _held(self) -> dict[str, Tensor]:
        """This rank's stored tensors by state_dict key."""
        executors = self._runner.executors.values()
        return {executor.keys[name]: tensor for executor in executors for name, tensor in executor.state.items()}

    def _checked(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        programs = {index: executor.program for index, executor in self._runner.executors.items()}
        sharded = [name for index, name, _, _ in self._runner.trained() if programs[index].updates[name].sharded]
        name = type(optimizer).__name__
        if len(self.lowered.places) > 1 and name not in ELEMENTWISE:
            raise InvalidInput(
                f"{name} is not known to update elements one by one, but ranks have the parameters of their own "
                f"stages alone; use one of {', '.join(ELEMENTWISE)}"
            )
        if sharded and name not in ELEMENTWISE:
            raise InvalidInput(
                f"{name} is not known to update elements one by one, but {len(sharded)} parameters are sharded "
                f"({sharded[0]}); use one of {', '.join(ELEMENTWISE)} or a plan that keeps them whole"
            )
        self._runner.follow(optimizer)
        return optimizer

    def local(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's parts of a global batch (inputs, then targets); of what its stages do not read, no rows."""
        return tuple(self._runner.feeder.local(self._named(tensors)).values())

    def _named(self, tensors: Iterable[Any]) -> dict[str, Tensor]:
        flat = [t for t in pytree.tree_leaves(tuple(tensors)) if isinstance(t, Tensor)]
        names = (*self.graph.inputs, *self.graph.targets)
        if len(flat) != len(names):
            raise InvalidInput(
                f"{len(flat)} tensors given, the model takes {len(self.graph.inputs)} inputs and "
                f"{len(self.graph.targets)} targets"
            )
        return dict(zip(names, flat, strict=True))

    def forward_backward(self, *tensors: Any) -> Tensor:
        """Forward, backward and gradient exchange, on whole tensors or this rank's parts; the result is the global loss.

        Gradients of the call before are replaced, not added to.
        """
        outcome = self._runner.forward_backward(self._named(tensors))
        self._runner.randomness.step += 1
        return outcome.loss

    def step(self, *tensors: Any) -> Tensor:
        """One training step."""
        if self.optimizer is None:
            raise InvalidInput("step() needs an optimizer; pass optimizer= to parallelize, or use forward_backward()")
        loss = self.forward_backward(*tensors)
        self.optimizer.step()
        return loss

    def timeline(self, *tensors: Any) -> Timeline:
        """When each rank did what in one forward and backward; all ranks must call, and all get the whole."""
        events = self._runner.forward_backward(self._named(tensors), record=True).events
        parts: list[Any] = [events]
        if self.plan.size > 1:
            parts = [None] * self.plan.size
            dist.all_gather_object(parts, events)
        return Timeline.of(parts)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`; returns the norm before."""
        return self._runner.clip(max_norm)

    @torch.no_grad()
    def evaluate(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and whole outputs in eval mode, on the same ranks with the same shards."""
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        outcome = self._evaluator.forward(self._named(tensors))
        return outcome.loss, tuple(whole_outputs(self._evaluator, outcome).values())

    def _make_evaluator(self) -> Runner:
        graph = capture(self._model, *examples(self.plan, self._model), self._loss, train=False)
        made = lower_stages(graph, replace(self.plan, graph=graph.hash, recompute=()), like=self.lowered)
        trained = self._kept_keys()

        def load(world: World) -> FullTensor:
            whole = self._loader(world)

            def part(key: str, layout: Layout) -> Tensor:
                """What training holds, or what only evaluation reads."""
                for executor in self._runner.executors.values():
                    name = next((n for n, k in executor.keys.items() if k == key), "")
                    if executor.program.stored.get(name) == layout:
                        return executor.state[name].detach()
                if key in trained:
                    raise Infeasible(f"evaluation reads {key} where training does not keep it; cut the model elsewhere")
                return whole(key, layout)

            return part

        return Runner(made, load, device=self._runner.device, trains=False)

    def state_dict(self) -> dict[str, Tensor]:
        """The original module's state_dict, whole, on every rank."""
        return self._whole_state({key: key for key in self._model.state_dict()})

    def loss_state_dict(self) -> dict[str, Tensor]:
        """That of the loss, where it is a module."""
        loss = self._loss if isinstance(self._loss, nn.Module) else nn.Module()
        return self._whole_state({key: f"loss.{key}" for key in loss.state_dict()})

    def _whole_state(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Whole tensors by the name of each and the graph's key for it."""
        aliases, held = dict(self.graph.aliases), whole_state(self._runner)
        load, whole = self._loader(self._runner.world), WithLoss(self._model, self._loss).state_dict()
        shapes = {key.removeprefix("model."): value.shape for key, value in whole.items()}
        return {
            name: held[kept].clone() if (kept := aliases.get(key, key)) in held else load(key, Layout.same(shapes[key]))
            for name, key in names.items()  # what is not part of the graph nothing trains
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a whole state_dict with the original module's keys."""
        self._load(state, self._model.state_dict())

    def load_loss_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a `loss_state_dict`."""
        stored = self._loss.state_dict() if isinstance(self._loss, nn.Module) else {}
        self._load({f"loss.{k}": t for k, t in state.items()}, {f"loss.{k}": t for k, t in stored.items()})

    def _load(self, state: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
        aliases = dict(self.graph.aliases)
        missing = [key for key in stored if aliases.get(key, key) not in state and key not in state]
        if missing:
            raise InvalidInput(f"the state_dict lacks {len(missing)} keys, the first is '{missing[0]}'")
        for key, value in stored.items():
            if key in state and state[key].shape != value.shape:
                raise InvalidInput(f"'{key}' has shape {tuple(state[key].shape)}, the model's is {tuple(value.shape)}")
        trained = self._kept_keys()
        device = self._runner.device
        self._loaded |= {k: t.detach().to(device).clone() for k, t in state.items() if aliases.get(k, k) not in trained}
        self._evaluator = None
        with torch.no_grad():
            for executor in (*self._runner.executors.values(), *self._runner.counters.values()):
                for name, tensor in executor.state.items():
                    key, layout = executor.keys[name], executor.program.stored[name]
                    if key in state:
                        tensor.copy_(cut(state[key].to(tensor.device), layout, executor.world))


def _tree(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Modules named as in the original, holding this rank's tensors."""
    root = nn.Module()
    for key, tensor in tensors.items():
        *path, leaf = key.split(".")
        module = root
        for name in path:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module._modules[name]  # type: ignore[assignment]
        if tensor.requires_grad:
            module._parameters[leaf] = tensor  # type: ignore[assignment]
        else:
            module.register_buffer(leaf, tensor)
    return root
