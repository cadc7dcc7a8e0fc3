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
from fourfold.graph.autocast import as_computed
from fourfold.graph.capture import Loss, capture
from fourfold.graph.spec import check_precision
from fourfold.models import Example
from fourfold.optimizers import ELEMENTWISE
from fourfold.plans import Mesh, Plan
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.plan_lowering import lower_stages
from fourfold.runs.capture_check import SAMPLES, refuse_together
from fourfold.runs.claims import claim
from fourfold.runs.initial_tensors import ModuleSource, Source, cut
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution.executor import LoadPart
from fourfold.runtime.execution.gather_full import whole_outputs, whole_state
from fourfold.runtime.execution.precision import PRECISIONS, check_precision_name, lower_for_precision
from fourfold.runtime.execution.runner import Runner
from fourfold.runtime.host.devices import own_device
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.rank_pool import from_first_rank
from fourfold.timeline import Timeline
from fourfold.workload.materialise import synthetic_tensor
from fourfold.workload.plan_inputs import examples
from fourfold.workload.workload import Workload

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
    device: torch.device | str | None = None,
    precision: str = "fp32",
    graph: Graph | None = None,
    seed: int = 0,
    check: bool = True,
) -> Parallel:
    """Bind a module to a plan on the ranks of the running process group (or on one rank without one).

    The module is captured again, every submodule in the mode it is in, and must be the one the plan was made for. Its
    tensors are used in place where a rank holds them whole; a module on meta is initialised shard by shard. `check`:
    whether the first rank compares two steps of the captured graph with eager PyTorch, where the model is small enough for
    that; a `graph` that is given is not compared. `device`: by default where the model is. `precision`: fp32 keeps the
    module's dtypes, bf16 runs as under autocast, fp64 widens; whether GPUs use tf32 says ``torch.backends``.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise InvalidInput(
            f"optimizer= is a {name}, but each rank builds one for its own shards; pass a factory, as "
            f"optimizer=lambda named: torch.optim.{name}([p for _, p in named], lr=...)"
        )
    where = torch.device(device) if device is not None else _device_of(model)
    if where.type == "cuda" and where.index is None:
        where = own_device("cuda")  # NCCL wants to know which one
    check_precision_name(precision)
    check_precision(precision, where.type)
    World.init_torchrun(Mesh.of(all=plan.size), where)
    notes = [] if model.training else [IN_EVAL_MODE.format(type(model).__name__)]
    if graph is None:
        found = graph = capture(model, *examples(plan, model), loss)
        plan.check(graph)
        reason = refuse_together(lambda: _example_workload(model, plan, found, loss), from_first_rank) if check else None
        notes += [reason] if reason is not None else []
    if not dist.is_initialized() or dist.get_rank() == 0:
        for note in notes:
            warnings.warn(note, Notice, stacklevel=2)
    source = ModuleSource(model, loss, seed=seed)
    return Parallel(source, plan, graph, optimizer=optimizer, device=where, precision=precision, seed=seed)


def _device_of(model: nn.Module) -> torch.device:
    """Where a module is; one on meta is trained on processors."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(found) > 1:
        raise InvalidInput(f"the model is on {', '.join(sorted(map(str, found)))}; move it to one device, or give device=")
    return found.pop() if found else torch.device("cpu")


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
    """A module split over ranks. `optimizer` holds this rank's shards; `module` shows them under the original names; `runner`
    runs the lists."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        graph: Graph,
        *,
        optimizer: OptimizerFactory | None,
        device: torch.device,
        precision: str = "fp32",
        seed: int = 0,
    ) -> None:
        """`source`: where the stored tensors come from. All ranks must call."""
        self.plan, self.graph, self.precision = plan, graph, precision
        self._source, self._seed = source, seed
        self._loaded: dict[str, Tensor] = {}
        self.lowered = lower_for_precision(graph, plan, precision=precision, device=device.type)
        self._claim(device)
        self.runner = Runner(self.lowered, self._loader, device=device, precision=precision, randomness=Randomness(seed=seed))
        self._evaluator: Runner | None = None
        self.module = _tree(self._held())
        nothing = torch.zeros(0, device=self.runner.device, requires_grad=True)  # torch's optimizers refuse an empty list
        trained = self.runner.named_parameters() or [("nothing", nothing)]
        self.optimizer = self._checked(optimizer(trained)) if optimizer is not None else None

    def _claim(self, device: torch.device) -> None:
        """Say which of the source's tensors this is to train, and which of them every rank uses in place."""
        held = self._source.tensors
        stored = self.lowered.parts[0].program.stored if len(self.lowered.parts) == 1 and self.plan.zero != 3 else None
        used = {p.name: p.key for p in self.graph.parameters}
        in_place = {} if stored is None else {n: k for n, k in used.items() if n not in stored or not stored[n].sharded}
        weights = {key: held[key] for key in used.values()}
        changing = {p.key for p in self.graph.parameters if p.trainable or p.buffer}
        alike = {key for key, weight in weights.items() if weight.device == device and self._dtype(weight) == weight.dtype}
        claim(self, weights, alike & set(in_place.values()), changing)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        """What a stored tensor's dtype is in this run."""
        return PRECISIONS[self.precision].get(str(tensor.dtype).removeprefix("torch."), tensor.dtype)

    def _loader(self, world: World) -> LoadPart:
        """The source's tensors, or those loaded since that no rank trains."""
        load = self._source.loader(world)

        def part(key: str, layout: Layout) -> Tensor:
            tensor = cut(self._loaded[key], layout, world) if key in self._loaded else load(key, layout)
            return tensor.to(self._dtype(tensor))

        return part

    def _kept_keys(self) -> set[str]:
        """Keys of what some rank keeps for training."""
        parts = self.lowered.parts
        return {p.key for part in parts for p in part.graph.parameters if p.name in part.program.stored}

    def _held(self) -> dict[str, Tensor]:
        """This rank's stored tensors by state_dict key."""
        executors = self.runner.executors.values()
        return {executor.keys[name]: tensor for executor in executors for name, tensor in executor.state.items()}

    def _checked(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        programs = {index: executor.program for index, executor in self.runner.executors.items()}
        sharded = [name for index, name, _, _ in self.runner.trained_parameters() if programs[index].updates[name].sharded]
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
        self.runner.gather_after_step(optimizer)
        return optimizer

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.runner.device

    def local(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's parts of a global batch (inputs, then targets); of what its stages do not read, no rows."""
        return tuple(self.runner.feeder.local_parts(self._named(tensors)).values())

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
        outcome = self.runner.forward_backward(self._named(tensors))
        self.runner.randomness.step += 1
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
        events = self.runner.forward_backward(self._named(tensors), record=True).events
        parts: list[Any] = [events]
        if self.plan.size > 1:
            parts = [None] * self.plan.size
            dist.all_gather_object(parts, events)
        return Timeline.of(parts)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`; returns the norm before."""
        return self.runner.clip_grad_norm(max_norm)

    @torch.no_grad()
    def evaluate(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and whole outputs in eval mode, on the same ranks with the same shards."""
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        outcome = self._evaluator.forward(self._named(tensors))
        return outcome.loss, tuple(whole_outputs(self._evaluator, outcome).values())

    def _make_evaluator(self) -> Runner:
        graph = as_computed(self._source.evaluation_graph(self.plan), self.precision, self.runner.device.type)
        made = lower_stages(graph, replace(self.lowered.plan, graph=graph.hash, recompute=()), like=self.lowered)
        trained = self._kept_keys()

        def load(world: World) -> LoadPart:
            whole = self._loader(world)

            def part(key: str, layout: Layout) -> Tensor:
                """What training holds, or what only evaluation reads."""
                for executor in self.runner.executors.values():
                    name = next((n for n, k in executor.keys.items() if k == key), "")
                    if executor.program.stored.get(name) == layout:
                        return executor.state[name].detach()
                if key in trained:
                    raise Infeasible(f"evaluation reads {key} where training does not keep it; cut the model elsewhere")
                return whole(key, layout)

            return part

        return Runner(made, load, device=self.runner.device, precision=self.precision, trains=False)

    def state_dict(self) -> dict[str, Tensor]:
        """The original module's state_dict, whole, on every rank."""
        return self._whole_state({key: key for key in self._source.model_keys})

    def loss_state_dict(self) -> dict[str, Tensor]:
        """That of the loss, where it is a module."""
        return self._whole_state({key.removeprefix("loss."): key for key in self._source.loss_keys})

    def _whole_state(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Whole tensors by the name of each and the graph's key for it."""
        aliases, held = dict(self.graph.aliases), whole_state(self.runner)
        load, known = self._loader(self.runner.world), self._source.tensors
        return {
            name: held[kept].clone() if (kept := aliases.get(key, key)) in held else load(key, Layout.same(known[key].shape))
            for name, key in names.items()  # what is not part of the graph nothing trains
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a whole state_dict with the original module's keys."""
        self._load(state, self._source.model_keys)

    def load_loss_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a `loss_state_dict`."""
        self._load({f"loss.{k}": t for k, t in state.items()}, self._source.loss_keys)

    def _load(self, state: Mapping[str, Tensor], keys: Iterable[str]) -> None:
        aliases = dict(self.graph.aliases)
        stored = {key: self._source.tensors[key] for key in keys}
        missing = [key for key in stored if aliases.get(key, key) not in state and key not in state]
        if missing:
            raise InvalidInput(f"the state_dict lacks {len(missing)} keys, the first is '{missing[0]}'")
        for key, value in stored.items():
            if key in state and state[key].shape != value.shape:
                raise InvalidInput(f"'{key}' has shape {tuple(state[key].shape)}, the model's is {tuple(value.shape)}")
        trained = self._kept_keys()
        device = self.runner.device
        self._loaded |= {k: t.detach().to(device).clone() for k, t in state.items() if aliases.get(k, k) not in trained}
        self._evaluator = None
        with torch.no_grad():
            for executor in (*self.runner.executors.values(), *self.runner.counters.values()):
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
