"""What one device computes: the runs that `verify` compares with.

The reference is the eager module itself wherever it can be. It cannot where the graph draws random numbers (a split run
must draw the same masks, so they follow from seed, op and index, not from torch's generator) or casts to float32 by name
(in float64 the eager module would round there, the program does not): then it is the program on one rank.

Micro-batches change nothing but batch norm's statistics, buffers that forward updates and the masks drawn. A model with such
is run eagerly on one micro-batch after the other, and its loss taken of all their outputs together; any other on the
whole batch. Where the reference is the program, its micro-batches are weighed as the plan's are, so that dropout is compared
but not the weighing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fourfold.errors import Infeasible
from fourfold.graph import Dtype, Graph, Op
from fourfold.graph.capture import WithLoss, mean_square
from fourfold.graph.spec import mapped
from fourfold.plans import Mesh, Plan
from fourfold.runtime.subject import Subject, stored_tensors
from fourfold.runtime.trial import PRECISIONS, Task, Trial, optimizer_named, run_trial

EAGER, PROGRAM = "eager", "one-rank program"


@dataclass(kw_only=True)
class Reference:
    """The one-process runs of one subject, each made when first asked for. The module's own state is put back after each."""

    subject: Subject
    optimizer: str = "sgd"
    steps: int = 3
    microbatches: int = 1
    start: dict[str, Tensor] = field(init=False)
    _singles: dict[int, Trial] = field(init=False, default_factory=dict)
    _others: dict[int, Reference] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.start = {key: t.detach().clone() for key, t in stored_tensors(self.subject.case).items()}

    @property
    def kind(self) -> str:
        return PROGRAM if any(_draws(op) or _casts(op) for op in self.subject.graph.ops) else EAGER

    def matching(self, plan: Plan) -> Reference:
        """The reference for a plan: this one, or one in the plan's micro-batches where they make a difference."""
        graph = self.subject.graph
        tracks = bool(graph.writes) or any(op.target.startswith(("aten.batch_norm", "aten.instance_norm")) for op in graph.ops)
        wanted = plan.microbatches if tracks or self.kind == PROGRAM else 1
        if wanted == self.microbatches:
            return self
        if wanted not in self._others:
            self._others[wanted] = replace(self, microbatches=wanted)
        return self._others[wanted]

    @cached_property
    def exact(self) -> Trial:
        """In float64."""
        return self._run("fp64", self.start, self.subject.case.tensors)

    @cached_property
    def perturbed(self) -> Trial:
        """In float64, everything that comes in moved by one unit in the last place."""
        return self._run("fp64", *self._nudged(torch.float64, seed=0))

    def single(self, draw: int) -> Trial:
        """In float32. Draw 0 is the plain run; in the others what comes in is moved by one unit in the last place."""
        if draw not in self._singles:
            given = (self.start, self.subject.case.tensors) if draw == 0 else self._nudged(torch.float32, seed=draw)
            self._singles[draw] = self._run("fp32", *given)
        return self._singles[draw]

    def _nudged(self, dtype: torch.dtype, *, seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """State and data with the float inputs moved, or the parameters if all inputs are integers."""
        tensors, state = list(self.subject.case.tensors), dict(self.start)
        inputs = [i for i, t in enumerate(tensors[: len(self.subject.graph.inputs)]) if t.is_floating_point()]
        generator = torch.Generator().manual_seed(seed)
        for i in inputs:
            tensors[i] = nudged(tensors[i], dtype, generator)
        if not inputs:
            trainable = {p.key for p in self.subject.graph.parameters if p.trainable}
            state = {k: nudged(t, dtype, generator) if k in trainable else t for k, t in state.items()}
        return state, tensors

    def _run(self, precision: str, state: Mapping[str, Tensor], tensors: list[Tensor]) -> Trial:
        if self.kind == EAGER:
            return eager_trial(
                self.subject, state, tensors, precision=precision, optimizer=self.optimizer, steps=self.steps,
                microbatches=self.microbatches,
            )  # fmt: skip
        graph = self.subject.graph
        plan = Plan(graph=graph.hash, batch=self.subject.batch, mesh=Mesh.of(data=1), microbatches=self.microbatches)
        task = Task(graph=graph, plan=plan, data="", precision=precision, optimizer=self.optimizer, steps=self.steps)
        return run_trial(task, state, tensors)


def eager_trial(
    subject: Subject, state: Mapping[str, Tensor], tensors: list[Tensor], *, precision: str, optimizer: str, steps: int,
    microbatches: int = 1,
) -> Trial:  # fmt: skip
    """The steps of `run_trial`, by the module itself in this process."""
    case, dtypes = subject.case, PRECISIONS[precision]
    whole = WithLoss(case.module, case.loss).train()

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtypes.get(str(tensor.dtype).removeprefix("torch."), tensor.dtype))

    before = {key: (t, t.data) for key, t in stored_tensors(case).items()}
    try:
        for key, (tensor, _) in before.items():
            tensor.data = cast(state[key]).clone()
            tensor.grad = None
        given = iter([cast(t) for t in tensors])
        values = [next(given) for _ in case.inputs]
        inputs = dict(zip(case.inputs, values, strict=True)) if isinstance(case.inputs, Mapping) else tuple(values)
        forward = partial(_forward, whole, inputs, tuple(given), subject, microbatches)
        return _steps(whole, forward, subject.graph, optimizer, steps)
    finally:
        for tensor, data in before.values():
            tensor.data, tensor.grad = data, None


def _forward(
    whole: WithLoss, inputs: Any, targets: tuple[Tensor, ...], subject: Subject, microbatches: int
) -> tuple[Tensor, Any]:
    """Loss and outputs, the model run on one micro-batch after the other and the loss taken once."""
    if microbatches == 1:
        result: tuple[Tensor, Any] = whole(inputs, targets)
        return result
    sizes = Plan(graph="", batch=subject.batch, mesh=Mesh.of(data=1), microbatches=microbatches).sizes
    flat, spec = pytree.tree_flatten(inputs)
    dims = [subject.graph.batch_dim(name) for name in subject.graph.inputs]
    rows = [t.split(sizes, d) if d is not None else [t] * microbatches for t, d in zip(flat, dims, strict=True)]
    parts = []
    for m in range(microbatches):
        given = pytree.tree_unflatten([row[m] for row in rows], spec)
        parts.append(whole.model(**given) if isinstance(given, Mapping) else whole.model(*given))
    outputs = pytree.tree_map(lambda *leaves: _joined(leaves, subject.batch), *parts)
    return (whole.loss(outputs, *targets) if whole.loss else mean_square(outputs)), outputs


def _joined(leaves: tuple[Any, ...], batch: int) -> Any:
    """An output put together from micro-batches along the dim in which their sizes add up to the batch."""
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first
    dims = [d for d in range(first.dim()) if sum(leaf.shape[d] for leaf in leaves) == batch]
    if not dims:
        raise Infeasible(f"an output of shape {tuple(first.shape)} has no dim of samples along which to put micro-batches "
                         "together; verify with 1 micro-batch")  # fmt: skip
    return torch.cat(leaves, dims[0])


def _steps(
    whole: WithLoss, forward: Callable[[], tuple[Tensor, Any]], graph: Graph, optimizer: str, steps: int
) -> Trial:
    parameters = [p for p in whole.parameters() if p.requires_grad]
    update = optimizer_named(optimizer)(list(parameters)) if parameters else None
    trial = Trial()
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = None
        loss, outputs = forward()
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
    leaves = {id(t): t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)}
    assert len(leaves) == len(graph.outputs), f"{len(leaves)} outputs, {len(graph.outputs)} captured"
    pairs = zip(graph.outputs, leaves.values(), strict=True)
    return {name: t.detach().clone() for name, t in pairs if t.is_floating_point()}


def nudged(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each element up or down by one unit in the last place of a dtype."""
    exact = tensor.detach().to(dtype)
    up = torch.rand(exact.shape, generator=generator) < 0.5
    return torch.nextafter(exact, torch.where(up, torch.inf, -torch.inf).to(dtype))


def _draws(op: Op) -> bool:
    """Whether an op draws random numbers as called, dropout off or at zero being none."""
    name = op.target.split(".")[1]
    if name.endswith("dropout"):
        return bool(op.args[2]) and op.args[1] != 0
    if name == "scaled_dot_product_attention":
        return bool(op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(op.args[5]) and bool(op.args[6])
    return op.random


def _casts(op: Op) -> bool:
    found: list[str] = []
    mapped((op.args, op.kwargs), lambda leaf: found.append(leaf.name) if isinstance(leaf, Dtype) else None)
    return any(name.startswith(("float", "bfloat")) and name != "float64" for name in found)
