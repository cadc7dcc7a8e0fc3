"""One rank's training step with blocks of memory instead of numbers: what is stored, then its list of actions in order.

Stages' tensors and messages live as long as in `runtime.execution.runner`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fourfold.graph.spec import item_bytes
from fourfold.optimizers import OPTIMIZERS
from fourfold.oracle.memory.allocator import Allocator, Block
from fourfold.oracle.memory.backward import Env, Node, Tensor, Var
from fourfold.oracle.memory.device_rules import DeviceRules
from fourfold.oracle.memory.forward import ForwardMemory, OpMemoryCache
from fourfold.oracle.memory.steady_state import SteadyState, steady_state
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists.actions import GatherSlices, Sum
from fourfold.plans.lists.lowered_plan import LoweredPlan, LoweredStage
from fourfold.plans.lists.rank_schedule import StageAction
from fourfold.plans.lists.result_layout import Strided
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lists.stage_transfer import incoming, outgoing
from fourfold.plans.lowering.program import Program
from fourfold.plans.lowering.stages import Crossing
from fourfold.plans.spec.placement import Placement

LIBRARY = "library"
_NO_PRODUCTS = ("conv", "conv_transpose", "attention", "embedding", "lstm")
"""Kernels with much work that cuBLAS has no part in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes alive at once on some ranks, when that is, and what they are."""

    ranks: tuple[int, ...]
    bytes: int
    action: str  # as in the rank's list, or "optimizer"
    op: str
    parts: Mapping[str, int]  # bytes by kind; they sum to `bytes`

    @property
    def tensors(self) -> int:
        """Bytes without what a library takes for good, however small the model is."""
        return self.bytes - self.parts.get(LIBRARY, 0)


@dataclass
class _Microbatch:
    """A micro-batch between its forward and its backward on one stage."""

    nodes: list[Node]
    leaves: dict[str, Tensor]
    sent: dict[str, Var]
    loss: Var | None


@dataclass
class _Stage:
    """This rank's share of a stage."""

    part: LoweredStage
    coords: Coords
    lists: dict[int, StageList]  # by size of micro-batch
    memory: ForwardMemory
    state: Env = field(default_factory=dict)
    feeds: Env = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.part.program

    @property
    def list(self) -> StageList:
        """That of the first, largest micro-batch."""
        return next(iter(self.lists.values()))


class RankReplay:
    """The replay of one rank."""

    def __init__(
        self,
        lowered: LoweredPlan,
        rank: int,
        *,
        placement: Placement,
        machine: DeviceRules,
        optimizer: str = "sgd",
        precision: str = "fp32",
        cache: OpMemoryCache | None = None,
    ) -> None:
        self.lowered, self.rank, self.optimizer, self.machine = lowered, rank, OPTIMIZERS[optimizer], machine
        self.lists, self.precision = lowered.lists(placement, precision), precision
        self.cache = cache or OpMemoryCache()
        self.heap = Allocator(machine)
        self.action = ""
        self.stages = {part.index: self._stage(part) for part in lowered.parts if rank in part.stage.ranks}
        if machine.library and any(map(_has_matrix_products, self.stages.values())):
            for _ in range(2):  # threads that multiply: forward's and backward's
                self.heap.take(machine.library, LIBRARY)
        self.messages: dict[tuple[int, int, str, bool, int], list[tuple[Crossing, list[tuple[int, bool]]]]] = {}
        self.last_state: object = None  # how things were when the last period began
        self.held: dict[tuple[int, int], _Microbatch] = {}
        self.received: dict[tuple[int, str, int], list[tuple[Crossing, list[Block]]]] = {}
        self.outputs: dict[str, Block] = {}  # by the last compute action, for other stages
        self.unconfirmed: dict[tuple[int, str], deque[tuple[int, Block]]] = {}  # sent and not known to be taken in, by taker
        self.turns = lowered.turns
        self._run: dict[str, Callable[[StageAction], None]] = {
            "F": self._forward,
            "B": self._backward,
            "receive": self._receive,
            "send": self._send,
            "reduce": self._reduce,
            "update": self._update,
        }

    def peak(self, ranks: tuple[int, ...]) -> Peak:
        best, action = self.heap.peak, "start"
        tasks, at = self.lowered.rank_schedule(self.rank), 0
        steady = steady_state(tasks, self.turns, self.lowered.plan.sizes, (1, len(self.lowered.places)))
        while at < len(tasks):
            at = self._skip_periods(steady, at)
            task = tasks[at]
            if task.kind in self._run:
                self._run[task.kind](task)
            if self.heap.peak > best:
                best, action = self.heap.peak, "optimizer" if task.kind == "update" else str(task)
            at += 1
        parts = {kind: size for kind, size in self.heap.parts.items() if size}
        return Peak(ranks=ranks, bytes=best, action=action, op=self.heap.where, parts=parts)

    # --- micro-batches that change nothing ---

    def _skip_periods(self, steady: SteadyState | None, at: int) -> int:
        """The task to go on with: where all is as it was a period ago, the last period but the first in the list."""
        number = steady.number(at) if steady is not None else None
        if steady is None or number is None:
            return at
        now = self._state(number * steady.shift)
        firsts = {key: queue[0][0] for key, queue in self.unconfirmed.items() if queue}
        same = now == self.last_state and all(m >= steady.since.get(key, m) for key, m in firsts.items())
        self.last_state = now
        left = steady.times - 1 - number
        if not same or left < 1:
            return at
        self._advance_microbatches(left * steady.shift)
        return at + left * steady.period

    def _state(self, origin: int) -> object:
        """Everything that decides what the next period does, micro-batches counted from `origin`."""
        held = sorted((stage, m - origin) for stage, m in self.held)
        came = sorted((stage, way, m - origin, len(taken)) for (stage, way, m), taken in self.received.items())
        sent = {key: [(m - origin, b.size, b.kind, b.holders) for m, b in q] for key, q in self.unconfirmed.items()}
        made = [(name, block.size, block.holders) for name, block in self.outputs.items()]
        return dict(self.heap.alive), held, came, sent, made

    def _advance_microbatches(self, shift: int) -> None:
        """Let what is under way be that of later micro-batches."""
        self.held = {(stage, m + shift): held for (stage, m), held in self.held.items()}
        self.received = {(stage, way, m + shift): taken for (stage, way, m), taken in self.received.items()}
        self.unconfirmed = {key: deque((m + shift, block) for m, block in queue) for key, queue in self.unconfirmed.items()}

    # --- what is there when a step begins ---

    def _stage(self, part: LoweredStage) -> _Stage:
        index = part.stage.ranks.index(self.rank)
        coords = part.stage.mesh.coords(index)
        lists = {size: self.lists[part.index, size] for size in part.programs}
        first = next(iter(lists.values()))
        replay = ForwardMemory(heap=self.heap, rank=index, coords=coords, machine=self.machine, cache=self.cache, lists=first)
        stage = _Stage(part, coords, lists, replay)
        program, graph = part.program, part.program.graph
        self.heap.now = "stored tensors"
        known = {p.name: p for p in graph.parameters}
        given = {*graph.inputs, *graph.targets}
        crossing = {c.value for c in self.lowered.crossings if c.target == part.index}
        for name, layout in program.stored.items():
            if name in crossing:
                continue
            item = self._item(graph.values[name].dtype)
            tensor = self._stored_tensor(layout, item, coords, "inputs" if name in given else "weights", part, name)
            if name in known and known[name].trainable:
                tensor.var = replay.leaves[name] = Var(leaf=True, size=tensor.bytes)
            (stage.feeds if name in given else stage.state)[name] = tensor
        self._take_buffers(stage)
        return stage

    def _stored_tensor(self, layout: Layout, item: int, coords: Coords, kind: str, part: LoweredStage, name: str) -> Tensor:
        shape = layout.local_shape(coords)
        size = math.prod(shape) * item
        if kind == "inputs" and self.lowered.graph.values.get(name) is not None:  # all micro-batches of it
            whole = [part.programs[n].stored[name].local_shape(coords) for n in self.lowered.plan.sizes]
            size = sum(map(math.prod, whole)) * item if self.lowered.graph.batch_dim(name) is not None else size
        return Tensor(self.heap.take(size, kind), Strided.fresh(shape), item)

    def _take_buffers(self, stage: _Stage) -> None:
        """Optimizer state, gradients' places in common or flat memory, slices on the shelf."""
        program, values = stage.program, stage.program.graph.values
        for name, layout in program.updates.items():
            size = math.prod(layout.local_shape(stage.coords)) * self._item(values[name].dtype)
            for _ in range(self.optimizer.state):
                self.heap.take(size, "optimizer")
        messages = stage.list.messages
        copied = [b.names for b in messages.buckets(stage.coords) if len(b.names) > 1]  # one alone is summed where it lies
        for name in (name for names in (*copied, *(found.names for found in messages.sums)) for name in names):
            self.heap.take(stage.state[name].bytes, "summed gradients")
        for slices in messages.slices:
            if slices.path == "shared":
                self.heap.take(2 * self._chunk(stage, slices), "slices")
        if messages.weights_shared:
            self.heap.take(messages.ring_bytes, "ring")

    def _item(self, dtype: str) -> int:
        return item_bytes(dtype, self.precision)

    def _chunk(self, stage: _Stage, slices: GatherSlices) -> int:
        """Bytes that a rank gives at a time when slices are gathered."""
        return slices.elements * stage.list.messages.item(slices.names[0])

    # --- actions ---

    def _forward(self, task: StageAction) -> None:
        stage, m = self.stages[task.stage], task.microbatch
        size = self.lowered.plan.sizes[m]
        program, replay = stage.part.programs[size], stage.memory
        leaves = self._received_leaves(task, program)
        env: Env = dict(stage.state)
        for name, tensor in stage.feeds.items():
            shape = program.stored[name].local_shape(stage.coords)
            env[name] = Tensor(tensor.block, Strided.fresh(shape), tensor.item)
        env.update(leaves)
        for tensor in env.values():
            self.heap.hold(tensor.block)
        replay.nodes = []
        replay.forward(stage.lists[size], env)
        sent = dict.fromkeys(c.value for c in self.lowered.crossings if c.source == task.stage)
        live = self.lowered.cut.live
        out = {name: env[program.slots.get(name, name)] for name in sent}
        self._set_outputs({name: self.heap.hold(tensor.block) for name, tensor in out.items()})
        loss = env[program.slots[program.graph.loss]].var if program.graph.loss else None
        edges = {name: tensor.var for name, tensor in out.items() if name in live and tensor.var is not None}
        self.held[task.stage, m] = _Microbatch(replay.nodes, leaves, edges, loss)
        for tensor in env.values():
            self.heap.drop(tensor.block)

    def _set_outputs(self, blocks: dict[str, Block]) -> None:
        for block in self.outputs.values():
            self.heap.drop(block)
        self.outputs = blocks

    def _take_received(self, task: StageAction) -> Iterator[tuple[Crossing, list[Block]]]:
        """What was received for an action. Its sender has by then taken in what its earlier actions needed: that is let go."""
        for crossing, buffers in self.received.pop((task.stage, task.kind, task.microbatch), []):
            peer = crossing.source if task.kind == "F" else crossing.target
            place, turn = self.turns[peer, task.kind, task.microbatch]
            for (stage, way), queue in self.unconfirmed.items():
                while queue and _is_done_by(self.turns[stage, way, queue[0][0]], place, turn):
                    self.heap.drop(queue.popleft()[1])
            yield crossing, buffers

    def _received_leaves(self, task: StageAction, program: Program) -> Env:
        """What was received for a forward, as leaves of its gradients."""
        out: Env = {}
        for crossing, buffers in self._take_received(task):
            layout = self.lowered.parts[task.stage].slot_layout(crossing.value, self.lowered.plan.sizes[task.microbatch])
            shape = layout.local_shape(self.stages[task.stage].coords)
            item = self._item(program.graph.values[crossing.value].dtype)
            tensor = Tensor(self._assemble(buffers, math.prod(shape) * item), Strided.fresh(shape), item)
            if crossing.value in self.lowered.cut.live:
                tensor.var = Var(ends=True, size=tensor.bytes)
            out[crossing.value] = tensor
        return out

    def _assemble(self, buffers: list[Block], size: int) -> Block:
        if len(buffers) == 1 and buffers[0].size >= size:
            return buffers[0]
        block = self.heap.take(size, "received")
        for buffer in buffers:
            self.heap.drop(buffer)
        return block

    def _backward(self, task: StageAction) -> None:
        stage, m = self.stages[task.stage], task.microbatch
        held = self.held.pop((task.stage, m))
        came = []
        for crossing, buffers in self._take_received(task):
            var = held.sent.get(crossing.value)
            block = self._assemble(buffers, var.size if var is not None else 0)
            came.append(block)
            if var is not None:
                stage.memory.accumulate(var, self.heap.hold(block))
        if held.loss is not None:
            held.loss.grad = self.heap.take(held.loss.size, "backward")
        stage.memory.backward_of(stage.lists[self.lowered.plan.sizes[m]], held.nodes, last=task.last)
        for block in came:
            self.heap.drop(block)
        made = {n: t.var.grad or self.heap.take(t.bytes, "backward") for n, t in held.leaves.items() if t.var is not None}
        self._set_outputs(made)
        for leaf in held.leaves.values():
            self.heap.drop(leaf.block)

    def _receive(self, task: StageAction) -> None:
        for crossing, taken in self._transfers(task, receiving=True):
            buffers = [self.heap.take(size, "received") for size, _ in taken]
            self.received.setdefault((task.stage, task.way, task.microbatch), []).append((crossing, buffers))

    def _send(self, task: StageAction) -> None:
        """What is sent is held until it is known to have been taken in; a part of a tensor is copied first."""
        for crossing, given in self._transfers(task, receiving=False):
            for size, whole in given:
                own = self.outputs.get(crossing.value) if whole else None
                block = self.heap.hold(own) if own is not None else self.heap.take(size, "sent")
                self.unconfirmed.setdefault((task.peer, task.way), deque()).append((task.microbatch, block))

    def _transfers(self, task: StageAction, *, receiving: bool) -> list[tuple[Crossing, list[tuple[int, bool]]]]:
        """Per crossing tensor, the messages with other ranks: bytes, and whether it is all this rank has."""
        key = (task.stage, task.peer, task.way, receiving, self.lowered.plan.sizes[task.microbatch])
        if key not in self.messages:
            self.messages[key] = list(self._list_transfers(task, receiving))
        return self.messages[key]

    def _list_transfers(self, task: StageAction, receiving: bool) -> Iterator[tuple[Crossing, list[tuple[int, bool]]]]:
        size, values = self.lowered.plan.sizes[task.microbatch], self.lowered.loss.graph.at(1).values
        ends = (task.peer, task.stage) if receiving else (task.stage, task.peer)
        for crossing in self.lowered.tensors_between(*ends, task.way):
            source, target = (self.lowered.stage_tensor(end, crossing.value, size) for end in ends)
            items = incoming(source, target, self.rank) if receiving else outgoing(source, target, self.rank)
            mine = target if receiving else source
            whole = math.prod(mine.layout.local_shape(mine.mesh.coords(mine.ranks.index(self.rank))))
            item = self._item(values[crossing.value].dtype)
            yield crossing, [(t.numel * item, t.numel == whole) for t in items if not (receiving and t.peer == self.rank)]

    def _reduce(self, task: StageAction) -> None:
        """What is left of the sums of gradients; through shared memory, they move to where they are summed."""
        stage = self.stages[task.stage]
        for action in stage.list.finish(stage.coords):
            if isinstance(action, Sum):
                for name in action.names:
                    var = stage.memory.leaves[name]
                    if var.grad is not None:
                        self.heap.drop(var.grad)
                        var.grad = None
            else:
                stage.memory.act((action,))

    def _update(self, task: StageAction) -> None:
        self.heap.now = "optimizer"
        sizes = [
            math.prod(layout.local_shape(stage.coords)) * stage.list.messages.item(name)
            for stage in self.stages.values()
            for name, layout in stage.program.updates.items()
        ]
        self.heap.pass_through(self.optimizer.scratch * max(sizes, default=0), "workspace")
        for stage in self.stages.values():
            for slices in stage.list.messages.slices:
                if slices.path != "shared":
                    count = stage.list.paths.extent(slices.axes)
                    flat = 0 if slices.path == "direct" else count  # the library's, which is copied out
                    self.heap.pass_through((1 + count + flat) * self._chunk(stage, slices), "slices")


def _is_done_by(action: tuple[int, int], place: int, turn: int) -> bool:
    """Whether an action is done at a place, at a turn or before."""
    return action[0] == place and action[1] <= turn


def _has_matrix_products(stage: _Stage) -> bool:
    """Whether a stage has matrix products of its own."""
    return any(c.nest.anchor and c.nest.kernel not in _NO_PRODUCTS for c in stage.program.computes())
