"""Peak bytes of a training step on every rank of a lowered plan: its list of actions replayed with sizes alone.

What counts is what `runtime.memory` measures: memory of torch's allocator, and a rank's share of memory that ranks of a host
have in common. Ranks whose shards have the same sizes are replayed once.

Left out, because they are small or not the allocator's: single numbers, buffers of gloo, of the interpreter and of cuDNN, the
counting of samples that some losses divide by, and sums over tied parameters. High: without a common host, gradients and the
flat buffers they are sent from are taken to be there together until the last backward ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fourfold.graph.spec import ITEM_BYTES
from fourfold.oracle.heap import Block, Heap
from fourfold.oracle.results import Strided
from fourfold.oracle.tape import Env, Machine, Node, Tape, Tensor, Var, is_gather
from fourfold.plans.boundary import Side, incoming, outgoing
from fourfold.plans.exchange import Exchange, transfers
from fourfold.plans.layout import Layout, Own
from fourfold.plans.mesh import Coords
from fourfold.plans.pipeline import Part, Pipeline, Task
from fourfold.plans.program import Move, Program
from fourfold.plans.stages import Crossing

CPU = Machine()
CUDA = Machine(granularity=512, block=0, host=False)

STATE = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Tensors of a parameter's size that an optimizer keeps."""
SCRATCH = {"sgd": 0, "momentum": 0, "adamw": 2}
"""And those it makes while it updates one parameter."""
CHUNK_BYTES = 4 * 2**20
"""What a rank gives at a time when slices are gathered under ZeRO-1; two of them lie in common memory."""
RING_BYTES = 16 * 2**20
"""The least common memory through which gradients of gathered weights go, per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes alive at once on some ranks, when that is, and what they are."""

    ranks: tuple[int, ...]
    bytes: int
    action: str  # as in the rank's list, or "optimizer"
    op: str
    parts: Mapping[str, int]  # bytes by kind; they sum to `bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks of all ranks, those with equal shards together."""

    peaks: tuple[Peak, ...]

    @property
    def heaviest(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.bytes)

    def of(self, rank: int) -> Peak:
        return next(peak for peak in self.peaks if rank in peak.ranks)


def memory(pipeline: Pipeline, *, optimizer: str = "sgd", machine: Machine = CPU) -> Memory:
    """The predicted peak of each rank in one training step."""
    peaks = []
    for ranks in _alike(pipeline):
        peaks.append(_Rank(pipeline, ranks[0], optimizer, machine).peak(ranks))
    return Memory(peaks=tuple(peaks))


# --- ranks alike ---


def _alike(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The ranks of each place in sets whose shards have the same sizes."""
    out: list[tuple[int, ...]] = []
    for place in pipeline.places:
        parts = [part for part in pipeline.parts if part.stage.ranks == place]
        sizes = [_sizes(program) for part in parts for program in part.programs.values()]
        found: dict[tuple[object, ...], list[int]] = {}
        for index, rank in enumerate(place):
            coords = parts[0].stage.mesh.coords(index)
            found.setdefault(tuple(_at(coords, own) for known in sizes for own in known), []).append(rank)
        out += [tuple(ranks) for ranks in found.values()]
    return out


Division = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Axes and extents that divide some dim, and the sizes of the parts."""


def _sizes(program: Program) -> list[Division]:
    """The distinct divisions of dims in a program."""
    owns: dict[Own, None] = {}
    for layout in _layouts(program):
        owns.update(dict.fromkeys(own for own in layout.dims if own.axes))
    return list(dict.fromkeys((own.axes, own.extents, tuple(map(len, own.sets))) for own in owns))


def _layouts(program: Program) -> Iterator[Layout]:
    yield from (*program.stored.values(), *program.updates.values())
    for compute in program.computes():
        yield from (*compute.needs, *compute.gives)
    for move in program.moves():
        yield from (move.exchange.source, move.exchange.target)


def _at(coords: Coords, division: Division) -> int:
    axes, extents, sizes = division
    flat = 0
    for axis, extent in zip(axes, extents, strict=True):
        flat = flat * extent + coords[axis]
    return sizes[flat]


# --- one rank ---


@dataclass
class _Held:
    """A micro-batch between its forward and its backward on one stage."""

    nodes: list[Node]
    leaves: dict[str, Tensor]
    sent: dict[str, Var]
    loss: Var | None


@dataclass
class _Stage:
    """This rank's share of a stage."""

    part: Part
    coords: Coords
    tape: Tape
    state: Env = field(default_factory=dict)
    feeds: Env = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.part.program


class _Rank:
    """The replay of one rank."""

    def __init__(self, pipeline: Pipeline, rank: int, optimizer: str, machine: Machine) -> None:
        self.pipeline, self.rank, self.optimizer, self.machine = pipeline, rank, optimizer, machine
        self.heap = Heap(granularity=machine.granularity)
        self.action = ""
        self.stages = {part.index: self._stage(part) for part in pipeline.parts if rank in part.stage.ranks}
        self.held: dict[tuple[int, int], _Held] = {}
        self.came: dict[tuple[int, str, int], list[tuple[Crossing, list[Block]]]] = {}
        self.ready: dict[tuple[int, int], dict[str, Block]] = {}
        self._run: dict[str, Callable[[Task], None]] = {
            "F": self._forward, "B": self._backward, "receive": self._receive, "send": self._send, "reduce": self._reduce,
        }  # fmt: skip

    def peak(self, ranks: tuple[int, ...]) -> Peak:
        best, action = self.heap.peak, "start"
        for task in self.pipeline.tasks(self.rank):
            if task.kind in self._run:
                self._run[task.kind](task)
            if self.heap.peak > best:
                best, action = self.heap.peak, str(task)
        self._update()
        if self.heap.peak > best:
            best, action = self.heap.peak, "optimizer"
        parts = {kind: size for kind, size in self.heap.parts.items() if size}
        return Peak(ranks=ranks, bytes=best, action=action, op=self.heap.where, parts=parts)

    # --- what is there when a step begins ---

    def _stage(self, part: Part) -> _Stage:
        index = part.stage.ranks.index(self.rank)
        coords = part.stage.mesh.coords(index)
        stage = _Stage(part, coords, Tape(heap=self.heap, rank=index, coords=coords, machine=self.machine))
        program, graph = part.program, part.program.graph
        self.heap.now = "stored tensors"
        known = {p.name: p for p in graph.parameters}
        given = {*graph.inputs, *graph.targets}
        crossing = {c.value for c in self.pipeline.crossings if c.target == part.index}
        for name, layout in program.stored.items():
            if name in crossing:
                continue
            item = ITEM_BYTES[graph.values[name].dtype]
            tensor = self._stored(layout, item, coords, "inputs" if name in given else "weights", part, name)
            if name in known and known[name].trainable:
                tensor.var = Var(leaf=True, size=tensor.bytes)
            (stage.feeds if name in given else stage.state)[name] = tensor
        self._beside(stage)
        return stage

    def _stored(self, layout: Layout, item: int, coords: Coords, kind: str, part: Part, name: str) -> Tensor:
        shape = layout.local_shape(coords)
        size = math.prod(shape) * item
        if kind == "inputs" and self.pipeline.graph.values.get(name) is not None:  # all micro-batches of it
            whole = [part.programs[n].stored[name].local_shape(coords) for n in self.pipeline.plan.sizes]
            size = sum(map(math.prod, whole)) * item if self.pipeline.graph.batch_dim(name) is not None else size
        return Tensor(self.heap.take(size, kind), Strided.fresh(shape), item)

    def _beside(self, stage: _Stage) -> None:
        """Optimizer state, gradients' places in common or flat memory, slices on the shelf."""
        program, values = stage.program, stage.program.graph.values
        for name, layout in program.updates.items():
            size = math.prod(layout.local_shape(stage.coords)) * ITEM_BYTES[values[name].dtype]
            for _ in range(STATE[self.optimizer]):
                self.heap.take(size, "optimizer")
        for name in program.reductions:
            if name in stage.state and stage.state[name].var is not None:
                self.heap.take(stage.state[name].bytes, "summed gradients")
        if self.machine.host:
            for size, _ in self._rounds(stage):
                self.heap.take(2 * size, "slices")
        given = [self._given(stage, move) for move in program.moves() if self._gathers(stage, move)]
        if given and self.machine.host:
            self.heap.take(max(RING_BYTES, 2 * max(given)), "ring")

    def _rounds(self, stage: _Stage) -> list[tuple[int, int]]:
        """Of each group that gathers slices under ZeRO-1: bytes a rank gives at a time, and how many ranks there are."""
        program, values = stage.program, stage.program.graph.values
        rows: dict[tuple[tuple[str, ...], str], int] = {}
        for name, layout in program.updates.items():
            for step in Exchange(program.mesh, layout, program.stored[name]).steps:
                row = math.prod(layout.local_shape(stage.coords)[1:]) * ITEM_BYTES[values[name].dtype]
                key = (step.axes, values[name].dtype)
                rows[key] = max(rows.get(key, CHUNK_BYTES), row)
        return [(size, math.prod(program.mesh.extent(a) for a in axes)) for (axes, _), size in rows.items()]

    def _gathers(self, stage: _Stage, move: Move) -> bool:
        tensor = stage.state.get(move.source)
        return tensor is not None and tensor.var is not None and is_gather(move)

    def _given(self, stage: _Stage, move: Move) -> int:
        """Bytes of a gathered weight's gradient that this rank leaves for others."""
        (step,), index = move.exchange.adjoint.steps, stage.part.stage.ranks.index(self.rank)
        count = sum(t.numel for t in transfers(step, index, incoming=False) if t.peer != index)
        return -(-count * stage.state[move.source].item // 64) * 64

    # --- actions ---

    def _forward(self, task: Task) -> None:
        stage, m = self.stages[task.stage], task.microbatch
        size = self.pipeline.plan.sizes[m]
        program, tape = stage.part.programs[size], stage.tape
        leaves = self._arrived(task, program)
        env: Env = dict(stage.state)
        for name, tensor in stage.feeds.items():
            shape = program.stored[name].local_shape(stage.coords)
            env[name] = Tensor(tensor.block, Strided.fresh(shape), tensor.item)
        env.update(leaves)
        for tensor in env.values():
            self.heap.hold(tensor.block)
        tape.nodes = []
        tape.forward(program, env)
        sent = dict.fromkeys(c.value for c in self.pipeline.crossings if c.source == task.stage)
        live = self.pipeline.cut.live
        out = {name: env[program.slots.get(name, name)] for name in sent}
        self.ready[task.stage, m] = {name: self.heap.hold(tensor.block) for name, tensor in out.items()}
        loss = env[program.slots[program.graph.loss]].var if program.graph.loss else None
        edges = {name: tensor.var for name, tensor in out.items() if name in live and tensor.var is not None}
        self.held[task.stage, m] = _Held(tape.nodes, leaves, edges, loss)
        for tensor in env.values():
            self.heap.drop(tensor.block)

    def _arrived(self, task: Task, program: Program) -> Env:
        """What was received for a forward, as leaves of its gradients."""
        out: Env = {}
        for crossing, buffers in self.came.pop((task.stage, "F", task.microbatch), []):
            layout = self.pipeline.parts[task.stage].slot_layout(crossing.value, self.pipeline.plan.sizes[task.microbatch])
            shape = layout.local_shape(self.stages[task.stage].coords)
            item = ITEM_BYTES[program.graph.values[crossing.value].dtype]
            tensor = Tensor(self._assembled(buffers, math.prod(shape) * item), Strided.fresh(shape), item)
            if crossing.value in self.pipeline.cut.live:
                tensor.var = Var(size=tensor.bytes)
            out[crossing.value] = tensor
        return out

    def _assembled(self, buffers: list[Block], size: int) -> Block:
        if len(buffers) == 1 and buffers[0].size >= size:
            return buffers[0]
        block = self.heap.take(size, "received")
        for buffer in buffers:
            self.heap.drop(buffer)
        return block

    def _backward(self, task: Task) -> None:
        stage, m = self.stages[task.stage], task.microbatch
        held = self.held.pop((task.stage, m))
        came = []
        for crossing, buffers in self.came.pop((task.stage, "B", m), []):
            var = held.sent.get(crossing.value)
            block = self._assembled(buffers, var.size if var is not None else 0)
            came.append(block)
            if var is not None:
                stage.tape.accumulate(var, self.heap.hold(block))
        if held.loss is not None:
            held.loss.grad = self.heap.take(held.loss.size, "backward")
        stage.tape.backward(held.nodes)
        for block in came:
            self.heap.drop(block)
        grads = self.ready.setdefault((-1 - task.stage, m), {})
        for name, leaf in held.leaves.items():
            if leaf.var is not None:
                grads[name] = leaf.var.grad or self.heap.take(leaf.bytes, "backward")
            self.heap.drop(leaf.block)

    def _receive(self, task: Task) -> None:
        for crossing, taken in self._transfers(task, incoming_=True):
            buffers = [self.heap.take(size, "received") for size, _ in taken]
            self.came.setdefault((task.stage, task.way, task.microbatch), []).append((crossing, buffers))

    def _send(self, task: Task) -> None:
        """What is sent is held until the step ends; a part of a tensor is copied first."""
        held = self.ready[task.stage if task.way == "F" else -1 - task.stage, task.microbatch]
        for crossing, given in self._transfers(task, incoming_=False):
            for size, whole in given:
                if whole and crossing.value in held:
                    self.heap.hold(held[crossing.value])
                else:
                    self.heap.take(size, "sent")

    def _transfers(self, task: Task, *, incoming_: bool) -> Iterator[tuple[Crossing, list[tuple[int, bool]]]]:
        """Per crossing tensor, the messages with other ranks: bytes, and whether it is all this rank has."""
        size, values = self.pipeline.plan.sizes[task.microbatch], self.pipeline.loss.graph.at(1).values
        ends = (task.peer, task.stage) if incoming_ else (task.stage, task.peer)
        for crossing in self.pipeline.between(*ends, task.way):
            source, target = (self._side(end, crossing.value, size) for end in ends)
            items = incoming(source, target, self.rank) if incoming_ else outgoing(source, target, self.rank)
            mine = target if incoming_ else source
            whole = math.prod(mine.layout.local_shape(mine.mesh.coords(mine.ranks.index(self.rank))))
            item = ITEM_BYTES[values[crossing.value].dtype]
            yield crossing, [(t.numel * item, t.numel == whole) for t in items if not (incoming_ and t.peer == self.rank)]

    def _side(self, stage: int, value: str, size: int) -> Side:
        part = self.pipeline.parts[stage]
        return Side(part.slot_layout(value, size), part.stage.mesh, part.stage.ranks)

    def _reduce(self, task: Task) -> None:
        """Gradients move to where they are summed."""
        stage = self.stages[task.stage]
        for name in stage.program.reductions:
            var = stage.state[name].var if name in stage.state else None
            if var is not None and var.grad is not None:
                self.heap.drop(var.grad)
                var.grad = None

    def _update(self) -> None:
        self.heap.now = "optimizer"
        sizes = [
            math.prod(layout.local_shape(stage.coords)) * ITEM_BYTES[stage.program.graph.values[name].dtype]
            for stage in self.stages.values()
            for name, layout in stage.program.updates.items()
        ]
        self.heap.pass_through(SCRATCH[self.optimizer] * max(sizes, default=0), "workspace")
        for stage in self.stages.values() if not self.machine.host else ():
            for size, count in self._rounds(stage):
                self.heap.pass_through((1 + count) * size, "slices")


__all__ = ["CPU", "CUDA", "Machine", "Memory", "Peak", "memory"]
