"""The memory of a program's forward on one rank: its action list run on blocks instead of tensors, and recorded for backward.

`plans.lists.saved_tensors` says what an op saves; `plans.lists.result_layout` which results are views and which gradients pass
through unchanged. The memory of exchanges is that of `runtime.comm.exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fourfold.graph.spec import item_bytes
from fourfold.oracle.memory import gpu
from fourfold.oracle.memory.allocator import Block
from fourfold.oracle.memory.backward import BackwardMemory, Env, Node, Tensor, Var
from fourfold.oracle.memory.exchange_memory import ExchangeMemory, exchange_memory
from fourfold.oracle.memory.workspace import Workspace, workspace
from fourfold.oracle.memory.zero3_memory import DividedWeights
from fourfold.plans.lists.actions import (
    Action,
    Await,
    Bunch,
    Fetch,
    Free,
    Give,
    Launch,
    Limit,
    Opening,
    Release,
    RunPasses,
    RunSegment,
)
from fourfold.plans.lists.comm_batches import Bucket
from fourfold.plans.lists.rank_classes import share_of
from fourfold.plans.lists.result_layout import Strided, is_gradient_strided, passes_gradient, results
from fourfold.plans.lists.saved_tensors import Saving, Share, saving
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lowering.program import Compute, Move


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemory:
    """One op on one rank: how its results lie in memory, its workspace, what it saves for backward."""

    share: Share
    results: tuple[Strided, ...]
    workspace: Workspace
    saved: Saving
    passes_gradient: tuple[bool, ...]  # by operand: whether its gradient is that of the result, unchanged
    operand_bytes: tuple[int, ...]


@dataclass(eq=False)
class OpMemoryCache:
    """`OpMemory` by step, share and operands, common to all ranks that are replayed."""

    by_share: dict[tuple[object, ...], OpMemory] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class ForwardMemory(BackwardMemory):
    """The forwards of one rank on one stage."""

    lists: StageList
    recording: bool = True
    keep_gathered: bool = False  # inside the second run of a segment: gathered weights are kept too
    leaves: dict[str, Var] = field(default_factory=dict)  # of the stored tensors that have gradients
    cache: OpMemoryCache = field(default_factory=OpMemoryCache)
    op_memory: dict[tuple[object, ...], OpMemory] = field(default_factory=dict)  # of this rank, by the identity of a step

    def __post_init__(self) -> None:
        self.weights = DividedWeights(self.heap, self.rank, self.lists.messages.item, self._accumulate_shard)
        self._take: dict[type, Callable[[Any, Env], None]] = {
            Compute: self._compute,
            Move: self._move,
            Free: self._free,
            Fetch: self._fetch,
            Launch: self._message,
            Await: self._message,
            RunPasses: self._passes,
            RunSegment: self._segment,
        }
        self.pieces: list[Tensor] = []  # of the passes under way, by number
        self.started: dict[str, tuple[Block, Block]] = {}  # started exchanges of passes: results and buffers

    def forward(self, lists: StageList, env: Env) -> None:
        """Run the forward list of a size of micro-batch; `env` ends as the runtime's does."""
        self.lists = lists
        self._run_all(lists.forward, env)

    def _run_all(self, actions: Sequence[Action], env: Env) -> None:
        for action in actions:
            self._take[type(action)](action, env)

    def _free(self, action: Free, env: Env) -> None:
        for slot in action.slots:
            self.heap.drop(env.pop(slot).block)

    def _fetch(self, action: Fetch, env: Env) -> None:
        env[action.move.target] = self._gathered(action, env[action.move.source])

    def _message(self, action: Launch | Await, env: Env) -> None:
        if not isinstance(action.message, Opening):
            self.act((action,))
        elif isinstance(action, Launch):
            self._start_exchange(action.message)
        else:
            self._finish_exchange(action.message, env)

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                self._launch(action)
            elif isinstance(action, Await):
                assert isinstance(action.message, Bunch)
                self.weights.arrive(action.message)
            elif isinstance(action, Fetch):
                self.weights.refill(action.move, action.source)
            elif isinstance(action, Release):
                self.weights.release(action.move)
            elif isinstance(action, Give):
                self.weights.give(action.move, action.target)
            elif isinstance(action, Limit):
                self.weights.limit(action.most)

    def _launch(self, action: Launch) -> None:
        """Several gradients of a bucket are copied into its buffer; one is summed where it lies."""
        if isinstance(action.message, Bunch):
            self.weights.launch(action.message)
        elif isinstance(action.message, Bucket) and len(action.message.names) > 1:
            for name in action.message.names:
                var = self.leaves.get(name)
                if var is not None and var.grad is not None:
                    self.heap.drop(var.grad)
                    var.grad = None

    def _accumulate_shard(self, move: Move, shard: Block) -> None:
        self.accumulate(self.leaves[move.source], shard)

    def backward_of(self, lists: StageList, nodes: list[Node], *, last: bool) -> None:
        """Run the backward list of a size of micro-batch on what its forward recorded."""
        self.lists = lists
        self.backward(nodes, lists.last(self.coords) if last else lists.backward)

    def _compute(self, step: Compute, env: Env) -> None:
        self.heap.now, over = step.op.path, id(step) in self.lists.in_place
        ins = [env[slot] for slot in step.inputs]
        memory = self._op_memory(step, ins, over)
        space, saved = memory.workspace, memory.saved
        outs = self._results(memory, ins)
        gradients = any(t.var is not None for t in ins)
        live = gradients and self.recording
        buffers = [self.heap.take(size, "activations") for size in saved.buffers]
        self.heap.pass_through(space.forward, "workspace")
        if live:
            held = [self._save_block((ins[k] if k >= 0 else outs[-1 - k]).block) for k in saved.tensors]
            self._record(memory, ins, outs, held + buffers)
        else:
            for block in buffers:
                self.heap.drop(block)
            if gradients:  # a segment's first run: its results do have gradients
                for out in outs:
                    out.var = Var(size=out.bytes)
        env.update(zip(step.outputs, outs, strict=True))

    def _op_memory(self, step: Compute, ins: list[Tensor], over: bool) -> OpMemory:
        """Computed once for all micro-batches and for all ranks with an equal share."""
        key = (id(step), over, *[t.var is not None for t in ins])
        if key not in self.op_memory:
            shared = (*key, share_of(step, self.coords), *(t.lies for t in ins))
            if shared not in self.cache.by_share:
                self.cache.by_share[shared] = self._compute_op_memory(step, ins, over)
            self.op_memory[key] = self.cache.by_share[shared]
        return self.op_memory[key]

    def _compute_op_memory(self, step: Compute, ins: list[Tensor], over: bool) -> OpMemory:
        share = Share(step, self.coords, tuple(t.item for t in ins), tuple(map(self._item, step.dtypes)))
        space, saved = self._workspace_and_saved(share, [t.var is not None for t in ins])
        copied = [_needs_own_gradient(t.var) and is_gradient_strided(share, k) for k, t in enumerate(ins)]
        return OpMemory(
            share=share,
            results=tuple(results(share, [t.lies for t in ins], over)),
            workspace=space,
            saved=saved,
            passes_gradient=tuple(passes_gradient(share, k) and not copied[k] for k in range(len(ins))),
            operand_bytes=tuple(t.bytes for t in ins),
        )

    def _item(self, dtype: str) -> int:
        return item_bytes(dtype, self.lists.messages.precision)

    def _workspace_and_saved(self, share: Share, gradients: Sequence[bool]) -> tuple[Workspace, Saving]:
        """What the op takes for a while, and what it keeps."""
        if self.machine.gpu:
            return gpu.workspace(share, gradients), gpu.kept(share, saving(share, gradients))
        return workspace(share, gradients, self.machine.block), saving(share, gradients)

    def _save_block(self, block: Block) -> Block:
        """Hold a block for backward; a gathered weight is not held, it is gathered again."""
        return block if block.gathered else self.heap.hold(block)

    def _results(self, memory: OpMemory, ins: list[Tensor]) -> list[Tensor]:
        """The results: views of the first operand or new memory."""
        share, out = memory.share, []
        for k, lies in enumerate(memory.results):
            view = lies.of is not None
            block = self.heap.hold(ins[lies.of or 0].block) if view else self.heap.take(share.result_bytes(k), "activations")
            out.append(Tensor(block, lies, share.result_items[k]))
        return out

    def _record(self, memory: OpMemory, ins: list[Tensor], outs: list[Tensor], saved: list[Block]) -> None:
        step, space = memory.share.step, memory.workspace.backward
        for out, dtype in zip(outs, step.dtypes, strict=True):
            if dtype.startswith(("float", "bfloat", "complex")):
                out.var = Var(size=out.bytes)
        made, read = [out.var or Var() for out in outs], [t.var for t in ins]

        def backward(given: list[Block]) -> list[Block | None]:
            out: list[Block | None] = []
            for var, size, through in zip(read, memory.operand_bytes, memory.passes_gradient, strict=True):
                if var is None:
                    out.append(None)
                elif through and given:
                    out.append(self.heap.hold(given[0]))
                else:
                    out.append(self.heap.take(size, "gradients" if var.leaf else "backward"))
            self.heap.pass_through(space, "workspace")
            return out

        self.nodes.append(Node(step, step.op.path, read, made, saved, backward))

    # --- exchanges ---

    def _move(self, step: Move, env: Env) -> None:
        self.heap.now = f"exchange of {step.value}"
        source = env[step.source]
        there = exchange_memory(step.exchange, self.rank, source.item, self.lists.paths)
        env[step.target] = self._exchange_result(step, source, self._exchange_block(there, source.block, "exchange"))

    def _exchange_result(self, step: Move, source: Tensor, block: Block) -> Tensor:
        """The result of an exchange; its adjoint is recorded."""
        out = Tensor(block, Strided.fresh(step.exchange.target.local_shape(self.coords)), source.item)
        if source.var is not None:
            out.var = Var(size=out.bytes)
            if self.recording:
                back = exchange_memory(step.exchange.adjoint, self.rank, source.item, self.lists.paths)
                name = f"exchange of {step.value}"
                self.nodes.append(Node(step, name, [source.var], [out.var], [], lambda g: [self._exchange_back(back, g)]))
        return out

    def _exchange_back(self, steps: tuple[ExchangeMemory, ...], given: list[Block]) -> Block:
        return self._exchange_block(steps, given[0], "backward")

    def _exchange_block(self, steps: tuple[ExchangeMemory, ...], source: Block, kind: str) -> Block:
        block = self.heap.hold(source)
        for step in steps:
            if step.result is None:
                continue
            new = self.heap.take(step.result, "activations" if kind == "exchange" else kind)
            self.heap.pass_through(step.beside, "exchange")
            self.heap.drop(block)
            block = new
        return block

    def _gathered(self, action: Fetch, source: Tensor) -> Tensor:
        """A divided weight gathered for the ops that read it, and let go."""
        move = action.move
        self.heap.now = f"exchange of {move.value}"
        block = self.weights.fetch(move, action.source)
        block.gathered = not self.keep_gathered and self.recording
        out = Tensor(block, Strided.fresh(move.exchange.target.local_shape(self.coords)), source.item)
        if source.var is not None:
            out.var = Var(size=out.bytes)
            if self.recording:
                backward = partial(self._take_gradient, move)
                self.nodes.append(Node(move, self.heap.now, [source.var], [out.var], [], backward))
        return out

    def _take_gradient(self, move: Move, grads: list[Block]) -> list[Block | None]:
        """Keep the gradient of a gathered weight until its `Give` action."""
        self.weights.grads[move] = self.heap.hold(grads[0])
        return [None]

    # --- passes ---

    def _passes(self, action: RunPasses, env: Env) -> None:
        step = action.step
        (entry, dim), count = step.entries[0], len(step.bodies)
        source = env[entry]
        pieces = self.pieces = self._pieces(source, dim, count)
        outs: dict[str, list[Tensor]] = {outside: [] for _, outside, _ in step.exits}
        for body, piece in zip(action.bodies, pieces, strict=True):
            inner = {**env, entry: piece}
            for some in inner.values():
                self.heap.hold(some.block)
            self._run_all(body, inner)
            for inside_slot, outside, _ in step.exits:
                self.heap.hold(inner[inside_slot].block)
                outs[outside].append(inner[inside_slot])
            for some in inner.values():
                self.heap.drop(some.block)
        for piece in pieces:
            self.heap.drop(piece.block)
        for _, outside, at in step.exits:
            env[outside] = self._join_pieces(outs[outside], at)

    def _start_exchange(self, opening: Opening) -> None:
        """Start the exchange of a pass: its result and its buffers are alive from now on."""
        source = self.pieces[opening.number]
        self.heap.now = f"exchange of {opening.move.value}"
        *first, last = exchange_memory(opening.move.exchange, self.rank, source.item, self.lists.paths)
        block = self._exchange_block(tuple(first), source.block, "exchange")
        assert last.result is not None
        result, beside = self.heap.take(last.result, "activations"), self.heap.take(last.beside, "exchange")
        self.heap.drop(block)
        self.started[opening.key] = result, beside

    def _finish_exchange(self, opening: Opening, env: Env) -> None:
        result, beside = self.started.pop(opening.key)
        self.heap.drop(beside)
        env[opening.move.target] = self._exchange_result(opening.move, self.pieces[opening.number], result)

    def _pieces(self, source: Tensor, dim: int, count: int) -> list[Tensor]:
        sizes = [source.lies.shape[dim] * (k + 1) // count - source.lies.shape[dim] * k // count for k in range(count)]
        out = []
        for size in sizes:
            shape = tuple(size if d == dim else n for d, n in enumerate(source.lies.shape))
            var = Var(size=math.prod(shape) * source.item) if source.var is not None else None
            out.append(Tensor(self.heap.hold(source.block), Strided(shape, source.lies.strides, 0), source.item, var))
        if source.var is not None and self.recording:
            made = [t.var for t in out if t.var is not None]
            size = source.bytes
            self.nodes.append(Node(None, "passes", [source.var], made, [], lambda g: [self.heap.take(size, "backward")]))
        return out

    def _join_pieces(self, pieces: list[Tensor], dim: int) -> Tensor:
        first = pieces[0]
        shape = tuple(sum(p.lies.shape[d] for p in pieces) if d == dim else n for d, n in enumerate(first.lies.shape))
        size = math.prod(shape) * first.item
        out = Tensor(self.heap.take(size, "activations"), Strided.fresh(shape), first.item)
        if any(p.var is not None for p in pieces):
            out.var = Var(size=size)
            if self.recording:
                ins = [p.var for p in pieces]
                self.nodes.append(Node(None, "passes", ins, [out.var], [], lambda g: [self.heap.hold(g[0]) for _ in ins]))
        for piece in pieces:
            self.heap.drop(piece.block)
        return out

    # --- recomputed segments ---

    def _segment(self, segment: RunSegment, env: Env) -> None:
        given = {slot: env[slot] for slot in segment.given}
        for tensor in given.values():
            self.heap.hold(tensor.block)
        results, _ = self._run_segment(segment.actions, given, segment.results, record=False)
        for slot in segment.spent:
            self.heap.drop(env.pop(slot).block)
        env.update(results)
        outs = {slot: t.var for slot, t in results.items() if t.var is not None}
        held = [tensor.block for tensor in given.values()]

        def backward(grads: list[Block]) -> list[Block | None]:
            """Run the segment again; what it records runs backward next, and its inputs are held until then."""
            again, nodes = self._run_segment(segment.again, given, segment.results, record=True)
            for slot, tensor in again.items():
                if slot in outs and tensor.var is not None:
                    tensor.var.grad, outs[slot].grad = outs[slot].grad, None
                self.heap.drop(tensor.block)
            self.pending += [Node(None, "segment", [], [], node.saved, lambda _: []), *nodes]
            node.saved = []
            return []

        node = Node(segment, "segment", [], list(outs.values()), held, backward)
        self.nodes.append(node)

    def _run_segment(
        self, actions: Sequence[Action], given: Mapping[str, Tensor], wanted: Sequence[str], *, record: bool
    ) -> tuple[Env, list[Node]]:
        """Run the actions of a segment on its inputs: its results, and the recorded ops."""
        inner: Env = dict(given)
        for tensor in inner.values():
            self.heap.hold(tensor.block)
        before = self.recording, self.keep_gathered, self.nodes
        self.recording, self.keep_gathered, self.nodes = record, record, []
        self._run_all(actions, inner)
        nodes = self.nodes
        self.recording, self.keep_gathered, self.nodes = before
        out = {slot: inner.pop(slot) for slot in wanted}
        for tensor in inner.values():
            self.heap.drop(tensor.block)
        return out, nodes


def _needs_own_gradient(var: Var | None) -> bool:
    return var is not None and (var.leaf or var.ends)
