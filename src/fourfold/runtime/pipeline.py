"""A lowered plan on this rank: its stages' executors, run through the list of actions.

The result equals one process that works through the same micro-batches. Backward of a micro-batch starts from the gradients
its readers in other stages send; a stage's gradients are summed over its ranks once, after its last backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fourfold.errors import Infeasible
from fourfold.plans import Mesh
from fourfold.plans.layout import Layout
from fourfold.plans.pipeline import Part, Pipeline, Task, check_runnable
from fourfold.runtime.courier import Courier, gradient_of
from fourfold.runtime.execute import Executor, FullTensor
from fourfold.runtime.feeds import Feeder, Feeds
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.slices import Slices
from fourfold.runtime.world import World
from fourfold.timeline import Event


@dataclass
class Held:
    """A micro-batch between its forward and its backward on one stage."""

    leaves: dict[str, Tensor]
    edges: dict[str, GradientEdge]
    loss: Tensor | None


@dataclass
class Outcome:
    """What one step gave on this rank: the global loss, and its own shares of the micro-batches' losses and outputs."""

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Runner:
    """This rank's share of a pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        load: Callable[[World], FullTensor],
        *,
        device: torch.device | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        randomness: Randomness | None = None,
        trains: bool = True,
    ) -> None:
        """`trains`: False where the tensors are another runner's, which this one only reads."""
        check_runnable(pipeline.plan)
        if len(pipeline.places) > 1 and device is not None and device.type != "cpu":
            raise Infeasible(f"stages tell their messages apart by tags, which NCCL ({device.type}) does not have; run them on "
                             "processors (gloo), or use a plan of one stage")  # fmt: skip
        self.pipeline, self.plan, self.trains = pipeline, pipeline.plan, trains
        self.device = device or torch.device("cpu")
        self.everyone = World.shared(Mesh.of(all=self.plan.size), self.device)
        self.rank, self.randomness = self.everyone.rank, randomness or Randomness()
        self.executors: dict[int, Executor] = {}
        self.slices: dict[int, Slices] = {}
        self.counters: dict[int, Executor] = {}
        for part in pipeline.parts:
            self._join(part, load, dtypes)
        self.tasks = pipeline.tasks(self.rank)
        self.feeder = Feeder(pipeline, self.executors, self.counters)
        self.courier = Courier(pipeline, self.executors, rank=self.rank, device=self.device)
        self._last = {t.stage: i for i, t in enumerate(self.tasks) if t.kind == "B"}
        self._run: dict[str, Callable[[Task], None]] = {
            "F": self._forward,
            "B": self._backward,
            "receive": self.courier.receive,
            "send": lambda task: self.courier.send(task, self.made),
            "reduce": lambda task: self.executors[task.stage].finish(),
            "tie": lambda task: self.courier.add_ties(),
        }
        self._reset()

    def _join(self, part: Part, load: Callable[[World], FullTensor], dtypes: Mapping[str, torch.dtype] | None) -> None:
        alone = len(self.pipeline.parts) == 1
        mesh, ranks = part.stage.mesh, part.stage.ranks
        world = World.shared(mesh, self.device) if alone else World.of_stage(mesh, ranks, self.device)
        if world is None:
            return
        whole = self._apart(load(world))
        executor = Executor(part.programs, world, whole, dtypes=dtypes, randomness=self.randomness, trains=self.trains)
        self.executors[part.index] = executor
        if self.trains:
            self.slices[part.index] = Slices(executor.program, executor.state, world)
        if part.index in self.pipeline.counts:
            counts, theirs = self.pipeline.counts[part.index], _shared(executor, load(world))
            self.counters[part.index] = Executor(counts, world, theirs, dtypes=dtypes, trains=False)

    def _apart(self, load: FullTensor) -> FullTensor:
        """Of a tied parameter, a further copy on this rank has memory of its own, since each is updated."""
        held = {executor.keys[name] for executor in self.executors.values() for name in executor.state}
        if not self.trains or not held:
            return load
        return lambda key, layout: load(key, layout).clone() if key in held else load(key, layout)

    def _reset(self) -> None:
        self.held: dict[tuple[int, int], Held] = {}
        self.came: dict[str, Tensor] | None = None  # for the next compute action, if it was waited for already
        self.made: dict[str, Tensor] = {}  # by the last one, for the sends that follow it
        self.feeds: Feeds = {}
        self.outcome = Outcome()

    def forward_backward(self, tensors: Mapping[str, Tensor], *, outputs: bool = False, record: bool = False) -> Outcome:
        """One step's forwards and backwards; gradients are complete when it returns."""
        self._reset()
        self.courier.listen()
        self.collect, self.record, self.begun = outputs, record, time.perf_counter()
        for executor in self.executors.values():
            executor.begin()
        for slices in self.slices.values():
            slices.begin()
        self.feeds = self.feeder.fed(tensors)
        for number, task in enumerate(self.tasks):
            if task.kind == "B":
                self.executors[task.stage].gradients.last = number == self._last[task.stage]
            if not record:
                self._run[task.kind](task)
                continue
            self._await(task)
            start = time.perf_counter()
            self._run[task.kind](task)
            self._note(str(task), task.kind, start)
        self.courier.post.finish()
        for slices in self.slices.values():
            slices.take_gradients()
        self.outcome.loss = self._total()
        return self.outcome

    @torch.no_grad()
    def forward(self, tensors: Mapping[str, Tensor]) -> Outcome:
        """Forwards alone, of all micro-batches; this rank's outputs are kept."""
        self._reset()
        self.courier.listen()
        self.collect, self.feeds = True, self.feeder.fed(tensors)
        for task in self.tasks:
            if task.kind == "F" or (task.kind in ("receive", "send") and task.way == "F"):
                self._run[task.kind](task)
        self.held.clear()
        self.courier.post.finish()
        self.outcome.loss = self._total()
        return self.outcome

    def _note(self, action: str, kind: str, start: float) -> None:
        end = time.perf_counter()
        self.outcome.events.append(
            Event(rank=self.rank, action=action, kind=kind, start=start - self.begun, end=end - self.begun)
        )

    def _await(self, task: Task) -> None:
        """Wait for what a compute action needs, as an event of its own."""
        if task.kind in ("F", "B") and self.courier.expects(task):
            start = time.perf_counter()
            self.came = self.courier.arrived(task)
            self._note(str(task), "wait", start)

    def _arrived(self, task: Task) -> dict[str, Tensor]:
        came, self.came = self.came, None
        return self.courier.arrived(task) if came is None else came

    def _forward(self, task: Task) -> None:
        came, (stage, m) = self._arrived(task), (task.stage, task.microbatch)
        part, executor, live = self.pipeline.parts[stage], self.executors[stage], self.pipeline.cut.live
        self.randomness.microbatch = m
        leaves = {n: t.detach().requires_grad_() for n, t in came.items() if n in live and torch.is_grad_enabled()}
        out = executor.forward({**self.feeds[stage][m], **came, **leaves}, self.plan.sizes[m])  # of a rank's own: a leaf each
        loss = out[part.graph.loss] if part.graph.loss else None
        sent = dict.fromkeys(c.value for c in self.pipeline.crossings if c.source == stage)
        edges = {n: get_gradient_edge(out[n]) for n in sent if n in live and out[n].requires_grad}
        self.held[stage, m] = Held(leaves, edges, loss if loss is not None and loss.requires_grad else None)
        self.made = {n: out[n].detach() for n in sent}
        if loss is not None:
            self.outcome.losses.append(loss.detach())
        for name in part.graph.outputs if self.collect else ():
            if name in self.pipeline.loss.graph.outputs:
                self.outcome.outputs.setdefault(name, []).append(out[name].detach())

    def _backward(self, task: Task) -> None:
        came, held = self._arrived(task), self.held.pop((task.stage, task.microbatch))
        self.randomness.microbatch = task.microbatch
        starts: list[Any] = [held.edges[name] for name in came if name in held.edges]
        grads: list[Tensor | None] = [came[name] for name in came if name in held.edges]
        if held.loss is not None:
            starts.append(held.loss)
            grads.append(None)
        if starts:
            torch.autograd.backward(starts, grads)
        self.made = {name: gradient_of(leaf) for name, leaf in held.leaves.items()}

    def _total(self) -> Tensor:
        """The global loss, on every rank."""
        last = self.pipeline.last.index
        if last not in self.executors:
            return self.courier.hear()
        loss = self.executors[last].total(torch.stack(self.outcome.losses).sum())
        self.courier.tell(loss)
        return loss

    def trained(self) -> Iterable[tuple[int, str, Tensor, Layout]]:
        """Stage, name, tensor and layout of everything on this rank that an optimizer updates."""
        for index, executor in self.executors.items():
            for name, tensor in executor.state.items():
                if tensor.requires_grad:
                    yield index, name, tensor, executor.program.stored[name]

    def named(self) -> list[tuple[str, Tensor]]:
        """What an optimizer is given, by state_dict key; a further copy on this rank has its stage in the name.

        Under ZeRO-1 they are slices, and the optimizer must be `follow`ed.
        """
        out: dict[str, Tensor] = {}
        for index, name, tensor, _ in self.trained():
            key, part = self.executors[index].keys[name], self.slices[index].parts.get(name, tensor)
            out[key if key not in out else f"{key}@stage{index}"] = part
        return list(out.items())

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of the optimizer, bring what other ranks have updated into this rank's copies."""
        if any(slices.parts for slices in self.slices.values()):
            optimizer.register_step_post_hook(lambda *_: self._share())

    def _share(self) -> None:
        for slices in self.slices.values():
            slices.share()

    def kept(self) -> list[Tensor]:
        """The tensors that stay on this rank between steps, its share of memory that ranks have in common included."""
        executors = [*self.executors.values(), *self.counters.values()]
        shelves = [slices.own for slices in self.slices.values()]
        return [tensor for kept in (*(e.kept() for e in executors), *shelves) for tensor in kept]


def _shared(executor: Executor, load: FullTensor) -> FullTensor:
    """The tensors an executor has already, where they lie alike; the others are loaded."""

    def part(key: str, layout: Layout) -> Tensor:
        names = {executor.keys[name]: name for name in executor.state}
        found = names.get(key)
        if found is not None and executor.program.stored[found] == layout:
            return executor.state[found].detach()
        return load(key, layout)

    return part
