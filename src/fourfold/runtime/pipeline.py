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
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fourfold.errors import InvalidInput
from fourfold.plans import Mesh
from fourfold.plans.boundary import Side
from fourfold.plans.layout import Layout
from fourfold.plans.pipeline import Part, Pipeline, Task, check_runnable
from fourfold.plans.stages import Crossing
from fourfold.runtime.boundary import Channel, Post, Wait
from fourfold.runtime.execute import Executor, FullTensor
from fourfold.runtime.kernels import Randomness
from fourfold.runtime.slices import Slices
from fourfold.runtime.world import World
from fourfold.timeline import Event

Feeds = dict[int, list[dict[str, Tensor]]]
"""By stage and micro-batch: what a stage reads of inputs and targets."""


@dataclass
class Held:
    """A micro-batch between its forward and its backward on one stage."""

    leaves: dict[str, Tensor]
    edges: dict[str, GradientEdge]
    loss: Tensor | None


@dataclass
class Outcome:
    """What one step gave on this rank."""

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
        self.post = Post()
        self._tie_tag = 2 * len(pipeline.crossings) * self.plan.microbatches  # smaller numbers are the crossings'
        self._loss_tag = self._tie_tag + 2 * len(pipeline.cut.tied) * len(pipeline.parts)
        self.told: list[tuple[Any, Tensor]] = []  # losses on their way to other stages
        self.channels: dict[tuple[int, str, int], Channel] = {}
        self.ties = {name: self._tie(name) for name in pipeline.cut.tied}
        self._last = {t.stage: i for i, t in enumerate(self.tasks) if t.kind == "B"}
        self._run = {"F": self._forward, "B": self._backward, "receive": self._receive, "send": self._send,
                     "reduce": self._reduce, "tie": self._add_ties}  # fmt: skip
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
            counts = self.pipeline.counts[part.index]
            self.counters[part.index] = Executor(counts, world, load(world), dtypes=dtypes, trains=False)

    def _apart(self, load: FullTensor) -> FullTensor:
        """Of a tied parameter, a further copy on this rank has memory of its own, since each is updated."""
        held = {executor.keys[name] for executor in self.executors.values() for name in executor.state}
        if not self.trains or not held:
            return load
        return lambda key, layout: load(key, layout).clone() if key in held else load(key, layout)

    def _reset(self) -> None:
        self.held: dict[tuple[int, int], Held] = {}
        self.waits: dict[tuple[int, str, int], list[tuple[Crossing, Wait]]] = {}
        self.ready: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.grads: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.feeds: Feeds = {}
        self.outcome = Outcome()

    # --- what a step is given ---

    def fed(self, tensors: Mapping[str, Tensor]) -> Feeds:
        """Whole inputs and targets, or this rank's parts of them, cut up for its stages and their micro-batches."""
        return {index: self._fed(index, tensors) for index in self.executors}

    def _fed(self, index: int, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        executor = self.executors[index]
        readers = [r for r in (executor, self.counters.get(index)) if r is not None]
        homes = {n: next((r for r in readers if n in r.program.stored), None) for n in tensors}
        rows = {name: self._micro(home, name, tensors[name]) for name, home in homes.items() if home is not None}
        feeds = [{name: pieces[m] for name, pieces in rows.items()} for m in range(self.plan.microbatches)]
        scales = [n for n in self.pipeline.loss.scales if n in executor.program.stored]
        values = self._scales(index, feeds) if scales else {}
        for feed in feeds:
            feed.update({name: values[name] for name in scales})
        return feeds

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole inputs and targets, of all micro-batches; of what its stages do not read, no rows."""
        feeds, out = self.fed(tensors), {}
        for name, tensor in tensors.items():
            dim = self.pipeline.graph.batch_dim(name)
            rows = next(([feed[name] for feed in feeds[i]] for i in feeds if name in feeds[i][0]), None)
            rows = rows or [tensor[:0] if tensor.dim() else tensor]
            out[name] = rows[0] if len(rows) == 1 or dim is None else torch.cat(rows, dim)
        return out

    def _micro(self, executor: Executor, name: str, tensor: Tensor) -> list[Tensor]:
        """A tensor's part for each micro-batch."""
        sizes, dim = self.plan.sizes, self.pipeline.graph.batch_dim(name)
        if len(sizes) == 1:
            return [executor.cut(name, tensor, sizes[0])]
        if dim is None:
            return [executor.cut(name, tensor, size) for size in sizes]
        if tensor.shape[dim] == self.plan.batch:
            return [executor.cut(name, piece, size) for piece, size in zip(tensor.split(sizes, dim), sizes, strict=True)]
        own = [executor.local.shape(executor.programs[size].stored[name])[dim] for size in sizes]
        if tensor.shape[dim] != sum(own):
            raise InvalidInput(f"input '{name}' has {tensor.shape[dim]} rows; the plan wants all {self.plan.batch} or this "
                               f"rank's {sum(own)}; plan again for another batch")  # fmt: skip
        return [executor.cut(name, piece, size) for piece, size in zip(tensor.split(own, dim), sizes, strict=True)]

    @torch.no_grad()
    def _scales(self, index: int, feeds: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """What the terms of the loss are multiplied by: known numbers, and one over what the loss divides by."""
        loss, executor = self.pipeline.loss, self.executors[index]
        spec = {n: executor.program.graph.values[n] for n in loss.scales if n in executor.program.stored}
        kinds = {n: executor.local.dtype(s.dtype) for n, s in spec.items()}
        out = {n: torch.tensor(v, dtype=kinds[n], device=self.device) for n, v in loss.fixed.items() if n in kinds}
        counter = self.counters.get(index)
        if counter is None:
            return out
        totals: dict[str, Tensor] = {}
        for feed, size in zip(feeds, self.plan.sizes, strict=True):
            program = counter.programs[size]
            found = counter.forward({n: feed[n] for n in (*program.graph.inputs, *program.graph.targets)}, size)
            for name in program.outputs:
                axes = counter.world.mesh.ordered(program.layouts[name].partial)
                value = counter.world.summed(found[name], axes)
                totals[name] = totals[name] + value if name in totals else value
        return {**out, **{n: (1.0 / totals[c].double()).to(kinds[n]) for n, c in loss.counted.items() if n in kinds}}

    # --- a step ---

    def forward_backward(self, tensors: Mapping[str, Tensor], *, outputs: bool = False, record: bool = False) -> Outcome:
        """One step's forwards and backwards; gradients are complete when it returns."""
        self._reset()
        self.collect, self.record, self.begun = outputs, record, time.perf_counter()
        for executor in self.executors.values():
            executor.begin()
        for slices in self.slices.values():
            slices.begin()
        self.feeds = self.fed(tensors)
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
        self.post.finish()
        for slices in self.slices.values():
            slices.take_gradients()
        return self.outcome

    @torch.no_grad()
    def forward(self, tensors: Mapping[str, Tensor]) -> Outcome:
        """Forwards alone, of all micro-batches; this rank's outputs are kept."""
        self._reset()
        self.collect, self.feeds = True, self.fed(tensors)
        for task in self.tasks:
            if task.kind == "F" or (task.kind in ("receive", "send") and task.way == "F"):
                self._run[task.kind](task)
        self.held.clear()
        self.post.finish()
        return self.outcome

    def _note(self, action: str, kind: str, start: float) -> None:
        end = time.perf_counter()
        self.outcome.events.append(
            Event(rank=self.rank, action=action, kind=kind, start=start - self.begun, end=end - self.begun)
        )

    def _await(self, task: Task) -> None:
        """Wait for what a compute action needs, as an event of its own."""
        if task.kind in ("F", "B"):
            start = time.perf_counter()
            if self._arrived(task):
                self._note(str(task), "wait", start)

    def _arrived(self, task: Task) -> bool:
        """Take in what was received for an action; whether there was anything."""
        pending = self.waits.pop((task.stage, task.kind, task.microbatch), [])
        for crossing, wait in pending:
            if task.kind == "F":
                self.ready.setdefault((task.stage, task.microbatch), {})[crossing.value] = wait()
            else:
                sums, value = self.grads.setdefault((task.stage, task.microbatch), {}), wait()
                sums[crossing.value] = sums[crossing.value] + value if crossing.value in sums else value
        return bool(pending)

    def _forward(self, task: Task) -> None:
        self._arrived(task)
        stage, m = task.stage, task.microbatch
        part, executor = self.pipeline.parts[stage], self.executors[stage]
        self.randomness.microbatch = m
        came = self.ready.pop((stage, m), {})
        live = self.pipeline.cut.live
        leaves = {n: t.detach().requires_grad_() for n, t in came.items() if n in live and torch.is_grad_enabled()}
        out = executor.forward({**self.feeds[stage][m], **came, **leaves}, self.plan.sizes[m])  # of a rank's own: a leaf each
        loss = out[part.graph.loss] if part.graph.loss else None
        sent = dict.fromkeys(c.value for c in self.pipeline.crossings if c.source == stage)
        edges = {n: get_gradient_edge(out[n]) for n in sent if n in live and out[n].requires_grad}
        self.held[stage, m] = Held(leaves, edges, loss if loss is not None and loss.requires_grad else None)
        if loss is not None:
            self.outcome.losses.append(loss.detach())
        self.ready[stage, m] = {n: out[n].detach() for n in sent}
        for name in part.graph.outputs if self.collect else ():
            if name in self.pipeline.loss.graph.outputs:
                self.outcome.outputs.setdefault(name, []).append(out[name].detach())

    def _backward(self, task: Task) -> None:
        self._arrived(task)
        stage, m = task.stage, task.microbatch
        self.randomness.microbatch = m
        held, came = self.held.pop((stage, m)), self.grads.pop((stage, m), {})
        starts: list[Any] = [held.edges[name] for name in came if name in held.edges]
        grads: list[Tensor | None] = [came[name] for name in came if name in held.edges]
        if held.loss is not None:
            starts.append(held.loss)
            grads.append(None)
        if starts:
            torch.autograd.backward(starts, grads)
        self.grads[stage, m] = {
            n: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for n, leaf in held.leaves.items()
        }

    # --- between stages ---

    def _channel(self, crossing: Crossing, way: str, size: int) -> Channel:
        """The channel of a crossing tensor, or of its gradient on the way back."""
        key = (self.pipeline.crossings.index(crossing), way, size)
        if key not in self.channels:
            here, there = (self._side(stage, crossing.value, size) for stage in (crossing.source, crossing.target))
            source, target = (here, there) if way == "F" else (there, here)
            spec = self.pipeline.loss.graph.values[crossing.value]
            dtype = next(iter(self.executors.values())).local.dtype(spec.dtype)
            self.channels[key] = Channel(source, target, rank=self.rank, dtype=dtype, device=self.device, post=self.post)
        return self.channels[key]

    def _side(self, stage: int, value: str, size: int) -> Side:
        part = self.pipeline.parts[stage]
        return Side(part.slot_layout(value, size), part.stage.mesh, part.stage.ranks)

    def _tag(self, crossing: Crossing, way: str, microbatch: int) -> int:
        number = 2 * self.pipeline.crossings.index(crossing) + (way == "B")
        return number * self.plan.microbatches + microbatch

    def _receive(self, task: Task) -> None:
        size = self.plan.sizes[task.microbatch]
        for crossing in self.pipeline.between(task.peer, task.stage, task.way):
            wait = self._channel(crossing, task.way, size).receive(self._tag(crossing, task.way, task.microbatch))
            self.waits.setdefault((task.stage, task.way, task.microbatch), []).append((crossing, wait))

    def _send(self, task: Task) -> None:
        size = self.plan.sizes[task.microbatch]
        made = (self.ready if task.way == "F" else self.grads)[task.stage, task.microbatch]
        for crossing in self.pipeline.between(task.stage, task.peer, task.way):
            tag = self._tag(crossing, task.way, task.microbatch)
            self._channel(crossing, task.way, size).send(made[crossing.value], tag)

    def _reduce(self, task: Task) -> None:
        self.executors[task.stage].finish()

    def _tie(self, name: str) -> list[tuple[int, Channel, Channel]]:
        """For each stage but the owner, the ways of a tied parameter's gradient to the owner and back."""
        owner, *others = self.pipeline.cut.tied[name]
        dtype = next(iter(self.executors.values())).local.dtype(self.pipeline.loss.graph.values[name].dtype)
        made = {"rank": self.rank, "dtype": dtype, "device": self.device, "post": self.post}
        home, out = self._stored_side(owner, name), []
        for stage in others:
            away = self._stored_side(stage, name)
            out.append((stage, Channel(away, home, **made), Channel(home, away, **made)))  # type: ignore[arg-type]
        return out

    def _stored_side(self, stage: int, name: str) -> Side:
        part = self.pipeline.parts[stage]
        return Side(part.program.stored[name], part.stage.mesh, part.stage.ranks)

    @torch.no_grad()
    def _add_ties(self, task: Task) -> None:
        """Add up the gradients of the copies of a tied parameter, so that all are updated alike."""
        first = self._tie_tag
        trained = {p.name for p in self.pipeline.graph.parameters if p.trainable}
        for number, (name, ways) in enumerate(self.ties.items()):
            owner = self.pipeline.cut.tied[name][0]
            for k, (stage, there, back) in enumerate(ways if name in trained else []):
                tag = first + 2 * (number * len(self.pipeline.parts) + k)
                self._exchange(owner, stage, name, there, tag, add=True)
                del back
            for k, (stage, _, back) in enumerate(ways if name in trained else []):
                tag = first + 2 * (number * len(self.pipeline.parts) + k) + 1
                self._exchange(stage, owner, name, back, tag, add=False)

    def _exchange(self, taker: int, giver: int, name: str, channel: Channel, tag: int, *, add: bool) -> None:
        wait = channel.receive(tag) if taker in self.executors else None
        if giver in self.executors:
            channel.send(_gradient(self.executors[giver].state[name]), tag)
        if wait is not None:
            mine = self.executors[taker].state[name]
            total = _gradient(mine)
            mine.grad = total + wait() if add else wait()

    # --- after a step ---

    def total(self, outcome: Outcome) -> Tensor:
        """The global loss, on every rank; all must call. The stage that has it tells the others and goes on: it is done with
        its backwards before they are, and must not wait for them."""
        part = next(part for part in self.pipeline.parts if part.graph.loss)
        first, others = part.stage.ranks[0], [r for r in range(self.plan.size) if r not in part.stage.ranks]
        if part.index not in self.executors:
            spec = part.graph.values[part.graph.loss]
            loss = torch.empty((), dtype=next(iter(self.executors.values())).local.dtype(spec.dtype), device=self.device)
            dist.recv(loss, first, tag=self._loss_tag)
            return loss
        loss = self.executors[part.index].total(torch.stack(outcome.losses).sum())
        for work, _ in self.told:
            work.wait()
        self.told = [(dist.isend(loss, other, tag=self._loss_tag), loss) for other in others if self.rank == first]
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

    def whole(self, index: int, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor laid out as a stored one of a stage, whole on every rank; all must call. `tensors`: this stage's, if any."""
        part = self.pipeline.parts[index]
        return self.spread(index, part.program.stored[name], tensors.get(name))

    def spread(self, index: int, layout: Layout, tensor: Tensor | None) -> Tensor:
        """A stage's tensor gathered and given to all ranks; all must call."""
        executor, part = self.executors.get(index), self.pipeline.parts[index]
        whole = executor.whole(layout, tensor).contiguous() if executor is not None and tensor is not None else None
        if len(self.pipeline.places) == 1:
            assert whole is not None
            return whole
        box: list[Any] = [(whole.dtype if whole is not None else None)]
        dist.broadcast_object_list(box, src=part.stage.ranks[0])
        if whole is None:
            whole = torch.empty(layout.shape, dtype=box[0], device=self.device)
        plain = whole.to(torch.uint8) if whole.dtype == torch.bool else whole
        dist.broadcast(plain, src=part.stage.ranks[0])
        return plain.to(whole.dtype)

    def outputs(self, outcome: Outcome) -> dict[str, Tensor]:
        """The whole outputs of a step, micro-batches put together, on every rank; all must call."""
        out: dict[str, Tensor] = {}
        graph = self.pipeline.loss.graph
        for part in self.pipeline.parts:
            for name in (n for n in part.graph.outputs if n in graph.outputs and n not in out):
                held: list[Any] = outcome.outputs.get(name) or [None] * self.plan.microbatches
                sizes = zip(held, self.plan.sizes, strict=True)
                pieces = [self.spread(part.index, part.output_layout(name, size), piece) for piece, size in sizes]
                dim = graph.batch_dim(name)
                out[name] = pieces[0] if len(pieces) == 1 or dim is None else torch.cat(pieces, dim)
        return {name: out[name] for name in graph.outputs if name in out}

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient whole, on every rank; all must call."""
        trained = {p.name for p in self.pipeline.graph.parameters if p.trainable}
        homes = [(i, n, key) for i, n, key in self.homes() if n in trained]
        return {key: self.whole(i, n, {m: _gradient(t) for m, t in self._tensors(i).items() if m == n}).clone()
                for i, n, key in homes}  # fmt: skip

    def homes(self) -> Iterable[tuple[int, str, str]]:
        """Stage, name and key of every stored tensor, tied ones once, in one order on all ranks."""
        seen: set[str] = set()
        for part in self.pipeline.parts:
            for parameter in part.graph.parameters:
                if parameter.name not in seen and parameter.name in part.program.stored:
                    seen.add(parameter.name)
                    yield part.index, parameter.name, parameter.key

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers as one device would hold them, on every rank; all must call."""
        return {key: self.whole(i, n, self._tensors(i)).clone() for i, n, key in self.homes()}

    def _tensors(self, index: int) -> Mapping[str, Tensor]:
        return self.executors[index].state if index in self.executors else {}


def _gradient(tensor: Tensor) -> Tensor:
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
