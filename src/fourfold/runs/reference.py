"""What one device computes: the runs that `verify` compares with.

The reference is the eager module itself, in the modes the user left it in. Where the graph draws random numbers or casts to
float32 by name, the eager module runs under `PlanRandomNumbers`, which draws the plan's masks and replaces float32 by float64.
Where that cannot be done, the reference is the program on one rank, and the verdict says so.

`eager_run` says which models are run in micro-batches. Where the reference is the program, its micro-batches are weighed as the
plan's are, so that dropout is compared but not the weighing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fourfold.plans import Mesh, Plan
from fourfold.runs.comparison_run import ComparisonRun, RunResult, run_steps
from fourfold.runs.eager_run import CPU, eager_trial
from fourfold.runs.plan_random_numbers import RandomOpsDiffer, draws
from fourfold.runs.rounding import OtherRounding, nudged
from fourfold.runtime.comm.exchange import is_inexact
from fourfold.workload.workload import Workload, stored_tensors

EAGER, PROGRAM = "eager", "one rank of Fourfold"


@dataclass(kw_only=True)
class Reference:
    """The one-process runs of one workload, each run on first use. The module's own state is restored after each."""

    workload: Workload
    optimizer: str = "sgd"
    steps: int = 3
    device: torch.device = CPU
    microbatches: int = 1
    later: tuple[list[Tensor], ...] = ()  # data of the steps after the first, where it is not the same
    start: dict[str, Tensor] = field(init=False)
    _singles: dict[tuple[str, int], RunResult] = field(init=False, default_factory=dict)
    _rounded: dict[int, RunResult] = field(init=False, default_factory=dict)
    _others: dict[int, Reference] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.start = {key: t.detach().to("cpu", copy=True) for key, t in stored_tensors(self.workload.example).items()}

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

    def single(self, precision: str, draw: int) -> RunResult:
        """In a precision other than float64. Draw 0 is the plain run; in the others what comes in is moved by one unit in
        float32's last place or, in bf16, rounded to bf16 either way."""
        key = precision, draw
        if key not in self._singles:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            given = (self.start, self.workload.example.tensors) if draw == 0 else self._nudged(dtype, seed=draw)
            self._singles[key] = self._run(precision, *given)
        return self._singles[key]

    def _nudged(self, dtype: torch.dtype, *, seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """State and data with the float inputs moved, or the parameters if all inputs are integers."""
        tensors, state = [t.cpu() for t in self.workload.example.tensors], dict(self.start)
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
        task = ComparisonRun(
            graph=graph,
            plan=plan,
            data="",
            precision=precision,
            optimizer=self.optimizer,
            device=self.device.type,
            steps=self.steps,
        )
        return run_steps(task, state, tensors, later=self.later)

    def _eager(self, precision: str, state: Mapping[str, Tensor], tensors: list[Tensor], *, steps: int) -> RunResult:
        return eager_trial(
            self.workload,
            state,
            tensors,
            precision=precision,
            optimizer=self.optimizer,
            steps=steps,
            device=self.device,
            microbatches=self.microbatches,
            later=self.later,
        )
