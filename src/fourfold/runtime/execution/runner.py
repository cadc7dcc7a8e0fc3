"""A lowered plan on this rank: runs its stages' executors in the order of the list of actions.

The result equals one process that runs the same micro-batches. Backward of a micro-batch starts from the gradients
its readers in other stages send; a stage's gradients are summed over its ranks once, after its last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fourfold.plans import Mesh
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.lowered_plan import Lists, LoweredPlan, LoweredStage
from fourfold.plans.lists.rank_schedule import UNTIMED, StageAction
from fourfold.plans.spec.plan import check_runnable
from fourfold.runtime.comm.journal import Journal
from fourfold.runtime.comm.world import World, running_placement
from fourfold.runtime.execution.clock import Clock, Mark
from fourfold.runtime.execution.executor import Executor, LoadPart
from fourfold.runtime.execution.feeds import Feeder, Feeds
from fourfold.runtime.execution.precision import PRECISIONS
from fourfold.runtime.execution.stage_transport import StageTransport, TransportName, gradient_of
from fourfold.runtime.execution.warm_up import warm_up
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.zero.zero1 import Zero1Slices
from fourfold.timeline import Event


@dataclass
class MicrobatchInFlight:
    """A micro-batch between its forward and its backward on one stage."""

    leaves: dict[str, Tensor]
    edges: dict[str, GradientEdge]
    loss: Tensor | None


@dataclass
class Outcome:
    """The results of a step on this rank: the global loss, and its own shares of the micro-batches' losses and outputs."""

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Runner:
    """The stages of a plan that this rank takes part in, and the schedule by which it runs them."""

    def __init__(
        self,
        lowered: LoweredPlan,
        load: Callable[[World], LoadPart],
        *,
        device: torch.device | None = None,
        precision: str = "fp32",
        randomness: Randomness | None = None,
        trains: bool = True,
        transport: TransportName | None = None,
    ) -> None:
        """`trains`: False where another runner owns the tensors and this one only reads them. `transport`: how messages between
        stages travel, by default as the device allows. All ranks must call."""
        check_runnable(lowered.plan)
        self.lowered, self.plan, self.trains = lowered, lowered.plan, trains
        self.device = device or torch.device("cpu")
        self.world = World.of_all_ranks(Mesh.of(all=self.plan.size), self.device)
        self.rank, self.randomness = self.world.rank, randomness or Randomness()
        self.journal, self.placement = Journal(), running_placement(self.device, self.plan.size)
        self.world = self.world.for_run(self.placement, self.plan.policy, self.journal)
        self.lists = lowered.lists(self.placement, precision, trains=trains)
        counts = lowered.counters(self.placement, precision)
        self.executors: dict[int, Executor] = {}
        self.slices: dict[int, Zero1Slices] = {}
        self.counters: dict[int, Executor] = {}
        for part in lowered.parts:
            self._add_stage(part, load, counts, PRECISIONS[precision])
        self.actions = lowered.rank_schedule(self.rank)
        self.feeder = Feeder(lowered, self.executors, self.counters)
        self.transport = StageTransport(
            lowered, self.executors, rank=self.rank, device=self.device, journal=self.journal, transport=transport
        )
        self._run = self._functions()
        self.needs_warm_up = self.device.type == "cuda" and len(lowered.places) > 1
        self._reset({})

    def _functions(self) -> dict[str, Callable[[StageAction], None]]:
        """By kind of action, the function that runs it."""
        return {
            "listen": lambda action: self.transport.listen(),
            "begin": self._begin,
            "F": self._forward,
            "B": self._backward,
            "receive": self.transport.receive,
            "send": lambda action: self.transport.send(action, self.outgoing),
            "reduce": lambda action: self.executors[action.stage].finish(),
            "tie": lambda action: self.transport.add_ties(),
            "loss": self._loss,
        }

    def _add_stage(
        self, part: LoweredStage, load: Callable[[World], LoadPart], counts: Lists, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        alone = len(self.lowered.parts) == 1
        mesh, ranks = part.stage.mesh, part.stage.ranks
        world = World.of_all_ranks(mesh, self.device) if alone else World.of_stage(mesh, ranks, self.device)
        if world is None:
            return
        if self.device.type == "cuda" and not alone:
            world.connect()
        world = world.for_run(self.placement, self.plan.policy, self.journal)
        lists = {size: self.lists[part.index, size] for size in part.programs}
        executor = Executor(lists, world, self._clone_tied(load(world)), dtypes=dtypes, randomness=self.randomness)
        self.executors[part.index] = executor
        if self.trains:
            self.slices[part.index] = Zero1Slices(lists[self.plan.sizes[0]], executor.state, world)
        if part.index in self.lowered.counts:
            counting = {size: counts[part.index, size] for size in part.programs}
            self.counters[part.index] = Executor(counting, world, _load_from(executor, load(world)), dtypes=dtypes)

    def _clone_tied(self, load: LoadPart) -> LoadPart:
        """Give a further copy of a tied parameter on this rank memory of its own, since each copy is updated."""
        held = {executor.keys[name] for executor in self.executors.values() for name in executor.state}
        if not self.trains or not held:
            return load
        return lambda key, layout: load(key, layout).clone() if key in held else load(key, layout)

    def _reset(self, tensors: Mapping[str, Tensor]) -> None:
        self.batch = tensors
        self.in_flight: dict[tuple[int, int], MicrobatchInFlight] = {}
        self.received_early: dict[str, Tensor] | None = None  # the next compute action's, if it was timed while waiting
        self.outgoing: dict[str, Tensor] = {}  # results of the last compute action, for the sends after it
        self.feeds: Feeds = {}
        self.marks: list[tuple[str, str, Mark, Mark]] = []
        self.outcome = Outcome()

    def forward_backward(self, tensors: Mapping[str, Tensor], *, outputs: bool = False, record: bool = False) -> Outcome:
        """One step's forwards and backwards; gradients are complete when it returns."""
        self._warm_up(tensors, backward=True)
        self._reset(tensors)
        self.collect_outputs, self.record, self.clock = outputs, record, Clock(self.device)
        for action in self.actions:
            if action.kind == "update":  # the optimizer's part, which the caller calls
                break
            if not record or action.kind in UNTIMED:
                self._run[action.kind](action)
                continue
            self._await(action)
            start = self.clock.mark()
            self._run[action.kind](action)
            self._note(str(action), action.kind, start)
        for slices in self.slices.values():
            slices.take_gradients()
        self.outcome.events = [self._event(*mark) for mark in self.marks]
        return self.outcome

    @torch.no_grad()
    def forward(self, tensors: Mapping[str, Tensor]) -> Outcome:
        """Forwards alone, of all micro-batches; the result holds this rank's outputs."""
        self._warm_up(tensors, backward=False)
        self._reset(tensors)
        self.collect_outputs = True
        for action in self.actions:
            if action.kind in ("listen", "begin", "F", "loss") or (action.kind in ("receive", "send") and action.way == "F"):
                self._run[action.kind](action)
        self.in_flight.clear()
        return self.outcome

    def _warm_up(self, tensors: Mapping[str, Tensor], *, backward: bool) -> None:
        if self.needs_warm_up:
            self.needs_warm_up = False
            warm_up(self, tensors, backward=backward)

    def _begin(self, action: StageAction) -> None:
        """A stage's step begins."""
        self.executors[action.stage].begin()
        if action.stage in self.slices:
            self.slices[action.stage].clear_gradients()
        self.feeds[action.stage] = self.feeder.feeds_of(action.stage, self.batch)

    def _note(self, action: str, kind: str, start: Mark) -> None:
        self.marks.append((action, kind, start, self.clock.mark()))

    def _event(self, action: str, kind: str, start: Mark, end: Mark) -> Event:
        seconds = self.clock.seconds
        return Event(rank=self.rank, action=action, kind=kind, start=seconds(start), end=seconds(end))

    def _await(self, action: StageAction) -> None:
        """Wait for the tensors a compute action reads, as an event of its own."""
        if action.kind in ("F", "B") and self.transport.has_receives(action):
            start = self.clock.mark()
            self.received_early = self.transport.take_received(action)
            self._note(str(action), "wait", start)

    def _take_received(self, action: StageAction) -> dict[str, Tensor]:
        received, self.received_early = self.received_early, None
        return self.transport.take_received(action) if received is None else received

    def _forward(self, action: StageAction) -> None:
        received, (stage, m) = self._take_received(action), (action.stage, action.microbatch)
        part, executor, live = self.lowered.parts[stage], self.executors[stage], self.lowered.cut.live
        self.randomness.microbatch = m
        leaves = {n: t.detach().requires_grad_() for n, t in received.items() if n in live and torch.is_grad_enabled()}
        env = {**self.feeds[stage][m], **received, **leaves}  # a tensor that this rank sends to itself is a leaf here, too
        out = executor.forward(env, self.plan.sizes[m])
        loss = out[part.graph.loss] if part.graph.loss else None
        sent = dict.fromkeys(c.value for c in self.lowered.crossings if c.source == stage)
        edges = {n: get_gradient_edge(out[n]) for n in sent if n in live and out[n].requires_grad}
        self.in_flight[stage, m] = MicrobatchInFlight(leaves, edges, loss if loss is not None and loss.requires_grad else None)
        self.outgoing = {n: out[n].detach() for n in sent}
        if loss is not None:
            self.outcome.losses.append(loss.detach())
        for name in part.graph.outputs if self.collect_outputs else ():
            if name in self.lowered.loss.graph.outputs:
                self.outcome.outputs.setdefault(name, []).append(out[name].detach())

    def _backward(self, action: StageAction) -> None:
        received, held = self._take_received(action), self.in_flight.pop((action.stage, action.microbatch))
        self.randomness.microbatch = action.microbatch
        starts: list[Any] = [held.edges[name] for name in received if name in held.edges]
        grads: list[Tensor | None] = [received[name] for name in received if name in held.edges]
        if held.loss is not None:
            starts.append(held.loss)
            grads.append(None)
        self.executors[action.stage].backward(starts, grads, self.plan.sizes[action.microbatch], last=action.last)
        self.outgoing = {name: gradient_of(leaf) for name, leaf in held.leaves.items()}

    def _loss(self, action: StageAction) -> None:
        """The global loss, on every rank, after all earlier sends."""
        self.transport.pending_sends.finish()
        last = self.lowered.last.index
        if last not in self.executors:
            self.outcome.loss = self.transport.receive_loss()
            return
        self.outcome.loss = self.executors[last].global_loss(torch.stack(self.outcome.losses).sum())
        self.transport.send_loss(self.outcome.loss)

    def trained_parameters(self) -> Iterable[tuple[int, str, Tensor, Layout]]:
        """Stage, name, tensor and layout of everything on this rank that an optimizer updates."""
        for index, executor in self.executors.items():
            for name, tensor in executor.state.items():
                if tensor.requires_grad:
                    yield index, name, tensor, executor.program.stored[name]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The tensors for an optimizer, by state_dict key; a further copy on this rank has its stage in the name.

        Under ZeRO-1 they are slices; `gather_after_step` must be called with the optimizer.
        """
        out: dict[str, Tensor] = {}
        for index, name, tensor, _ in self.trained_parameters():
            key, part = self.executors[index].keys[name], self.slices[index].slices.get(name, tensor)
            out[key if key not in out else f"{key}@stage{index}"] = part
        return list(out.items())

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm over the whole model is at most `max_norm`; returns the norm before."""
        total, grads = torch.zeros((), dtype=torch.float64, device=self.device), []
        for index, name, tensor, layout in self.trained_parameters():
            if tensor.grad is None:
                continue
            grads.append(tensor.grad)
            world = self.executors[index].world
            first = all(world.coords[a] == 0 for a in world.mesh.names if a not in layout.sharded)  # count replicas once
            if first and self.lowered.cut.tied.get(name, (index,))[0] == index:
                parts = torch.view_as_real(tensor.grad.resolve_conj()) if tensor.grad.is_complex() else tensor.grad
                total += parts.double().square().sum()
        if self.plan.size > 1:
            self.world.note("all_reduce", "collective", self.world.mesh.names, total.nbytes, "clip")
            dist.all_reduce(total)
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # read by the device: the host does not wait for it
        for dtype in {grad.dtype for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], scale.to(dtype.to_real()))
        return norm

    def gather_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of the optimizer, gather the slices that other ranks have updated into this rank's copies."""
        optimizer.register_step_post_hook(lambda *_: self._gather_updates())

    def _gather_updates(self) -> None:
        for index, executor in self.executors.items():
            self.journal.note("update", size=executor.updated_bytes)
            self.slices[index].gather()

    def persistent_tensors(self) -> list[Tensor]:
        """The tensors that stay on this rank between steps, its part of shared memory included."""
        executors = [*self.executors.values(), *self.counters.values()]
        areas = [slices.shared_areas for slices in self.slices.values()]
        return [tensor for kept in (*(e.persistent_tensors() for e in executors), *areas) for tensor in kept]


def _load_from(executor: Executor, load: LoadPart) -> LoadPart:
    """An executor's tensors where they have the same layout; the others are loaded."""

    def part(key: str, layout: Layout) -> Tensor:
        names = {executor.keys[name]: name for name in executor.state}
        found = names.get(key)
        if found is not None and executor.program.stored[found] == layout:
            return executor.state[found].detach()
        return load(key, layout)

    return part
