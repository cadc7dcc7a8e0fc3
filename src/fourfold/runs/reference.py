"""What one device computes: the runs that `verify` compares with.

The reference is the eager module itself, in the modes the user left it in. Where the graph draws random numbers or casts to
float32 by name, the eager module runs under `PlanRandomNumbers`, which draws the plan's masks and replaces float32 by float64.
Where that cannot be done, the reference is the program on one rank, and the verdict says so.

Micro-batches change nothing but batch norm's statistics, buffers that forward updates and the masks drawn. A model with such
is run eagerly on one micro-batch after the other, and its loss taken of all their outputs together; any other on the
whole batch. Where the reference is the program, its micro-batches are weighed as the plan's are, so that dropout is compared
but not the weighing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fourfold.errors import Infeasible
from fourfold.graph import Graph
from fourfold.graph.capture import WithLoss, mean_square
from fourfold.graph.module_attributes import preserve_attributes
from fourfold.plans import Mesh, Plan
from fourfold.runs.comparison_run import ComparisonRun, RunResult, run_steps
from fourfold.runs.plan_random_numbers import PlanRandomNumbers, RandomOpsDiffer, casts, draws
from fourfold.runs.rounding import OtherRounding
from fourfold.runtime.comm.exchange import is_inexact
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import PRECISIONS
from fourfold.workload.workload import Workload, stored_tensors

EAGER, PROGRAM = "eager", "one rank of Fourfold"


@dataclass(kw_only=True)
class Reference:
    """The one-process runs of one workload, each run on first use. The module's own state is restored after each."""

    workload: Workload
    optimizer: str = "sgd"
    steps: int = 3
    microbatches: int = 1
    later: tuple[list[Tensor], ...] = ()  # data of the steps after the first, where it is not the same
    start: dict[str, Tensor] = field(init=False)
    _singles: dict[int, RunResult] = field(init=False, default_factory=dict)
    _rounded: dict[int, RunResult] = field(init=False, default_factory=dict)
    _others: dict[int, Reference] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.start = {key: t.detach().clone() for key, t in stored_tensors(self.workload.example).items()}

    @cached_property
    def kind(self) -> str:
        """Eager, unless its random numbers could not be replayed: one step tells."""
        if not self._draws:
            return EAGER
        try:
            self._eager("fp64", self.start, self.workload.example.tensors, steps=1)
        except RandomOpsDiffer:
            return PROGRAM
        return EAGER

    @property
    def _draws(self) -> bool:
        return any(map(draws, self.workload.graph.ops))

    def matching(self, plan: Plan) -> Reference:
        """The reference for a plan: this one, or one in the plan's micro-batches where they make a difference."""
        graph = self.workload.graph
        tracks = bool(graph.writes) or any(op.target.startswith(("aten.batch_norm", "aten.instance_norm")) for op in graph.ops)
        wanted = plan.microbatches if tracks or self._draws else 1
        if wanted == self.microbatches:
            return self
        if wanted not in self._others:
            self._others[wanted] = replace(self, microbatches=wanted)
        return self._others[wanted]

    @cached_property
    def exact(self) -> RunResult:
        """In float64."""
        return self._run("fp64", self.start, self.workload.example.tensors)

    @cached_property
    def perturbed(self) -> RunResult:
        """In float64, everything that comes in moved by one unit in the last place."""
        return self._run("fp64", *self._nudged(torch.float64, seed=0))

    def rounded(self, draw: int) -> RunResult:
        """In float64, by a process that rounds otherwise."""
        if draw not in self._rounded:
            with OtherRounding(seed=draw):
                self._rounded[draw] = self._run("fp64", self.start, self.workload.example.tensors)
        return self._rounded[draw]

    def single(self, draw: int) -> RunResult:
        """In float32. Draw 0 is the plain run; in the others what comes in is moved by one unit in the last place."""
        if draw not in self._singles:
            given = (self.start, self.workload.example.tensors) if draw == 0 else self._nudged(torch.float32, seed=draw)
            self._singles[draw] = self._run("fp32", *given)
        return self._singles[draw]

    def _nudged(self, dtype: torch.dtype, *, seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """State and data with the float inputs moved, or the parameters if all inputs are integers."""
        tensors, state = list(self.workload.example.tensors), dict(self.start)
        inputs = [i for i, t in enumerate(tensors[: len(self.workload.graph.inputs)]) if is_inexact(t)]
        generator = torch.Generator().manual_seed(seed)
        for i in inputs:
            tensors[i] = nudged(tensors[i], dtype, generator)
        if not inputs:
            trainable = {p.key for p in self.workload.graph.parameters if p.trainable}
            state = {k: nudged(t, dtype, generator) if k in trainable else t for k, t in state.items()}
        return state, tensors

    def _run(self, precision: str, state: Mapping[str, Tensor], tensors: list[Tensor]) -> RunResult:
        if self.kind == EAGER:
            return self._eager(precision, state, tensors, steps=self.steps)
        graph = self.workload.graph
        plan = Plan(graph=graph.hash, batch=self.workload.batch, mesh=Mesh.of(data=1), microbatches=self.microbatches)
        task = ComparisonRun(graph=graph, plan=plan, data="", precision=precision, optimizer=self.optimizer, steps=self.steps)
        return run_steps(task, state, tensors, later=self.later)

    def _eager(self, precision: str, state: Mapping[str, Tensor], tensors: list[Tensor], *, steps: int) -> RunResult:
        return eager_trial(
            self.workload,
            state,
            tensors,
            precision=precision,
            optimizer=self.optimizer,
            steps=steps,
            microbatches=self.microbatches,
            later=self.later,
        )


def eager_trial(
    workload: Workload,
    state: Mapping[str, Tensor],
    tensors: list[Tensor],
    *,
    precision: str,
    optimizer: str,
    steps: int,
    microbatches: int = 1,
    later: Sequence[list[Tensor]] = (),
) -> RunResult:
    """The steps of `run_steps`, by the module itself in this process."""
    example, dtypes = workload.example, PRECISIONS[precision]
    whole, random_numbers = WithLoss(example.module, example.loss), random_numbers_for(workload, precision, microbatches)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtypes.get(str(tensor.dtype).removeprefix("torch."), tensor.dtype))

    before = {key: (t, t.data, t.grad) for key, t in stored_tensors(example).items()}
    try:
        for key, (tensor, _, _) in before.items():
            tensor.data = cast(state[key]).clone()
            tensor.grad = None
        batches = [[cast(t) for t in (later[step - 1] if step and later else tensors)] for step in range(steps)]
        forward = partial(_forward, whole, workload, microbatches, random_numbers)
        with preserve_attributes(whole):
            return _steps(whole, forward, batches, workload.graph, optimizer, random_numbers)
    finally:
        for tensor, data, grad in before.values():
            tensor.data, tensor.grad = data, grad


def random_numbers_for(workload: Workload, precision: str, microbatches: int = 1) -> PlanRandomNumbers | None:
    """What eager runs under, where it would otherwise draw or round otherwise than the program."""
    graph, dtypes = workload.graph, PRECISIONS[precision]
    if any(map(draws, graph.ops)) or (dtypes and (graph.constants or any(map(casts, graph.ops)))):
        return PlanRandomNumbers(graph, workload.batch, microbatches, dtypes)
    return None


def _forward(
    whole: WithLoss, workload: Workload, microbatches: int, random_numbers: PlanRandomNumbers | None, tensors: list[Tensor]
) -> tuple[Tensor, Any]:
    """Loss and outputs, the model run on one micro-batch after the other and the loss taken once."""
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


def nudged(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each element up or down by one unit in the last place of a dtype."""
    if tensor.is_complex():
        return torch.view_as_complex(nudged(torch.view_as_real(tensor.detach().resolve_conj()), dtype, generator))
    exact = tensor.detach().to(dtype)
    up = torch.rand(exact.shape, generator=generator) < 0.5
    return torch.nextafter(exact, torch.where(up, torch.inf, -torch.inf).to(dtype))
