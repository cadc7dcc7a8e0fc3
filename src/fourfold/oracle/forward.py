"""A program's forward on one rank with blocks of memory instead of numbers, written down for its backward.

Slots are made and freed in the runtime's order. What an op keeps, which results are views, and which gradients are merely
passed on are told by `saving` and `results`; exchanges, passes and recomputed segments are those of `runtime`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fourfold.oracle import gpu
from fourfold.oracle.alike import share_of
from fourfold.oracle.heap import Block, Gathered
from fourfold.oracle.moving import Moved, moving
from fourfold.oracle.results import Strided, passes, results, strided
from fourfold.oracle.saving import Saving, Share, saving
from fourfold.oracle.tape import Env, Node, Tape, Tensor, Var
from fourfold.oracle.wired import Bunches, Sums
from fourfold.oracle.workspace import Workspace, workspace
from fourfold.plans.buckets import is_gather
from fourfold.plans.lifetimes import frees, overwriting, reads, writes
from fourfold.plans.program import Compute, Move, Program, Repeat, Step


@dataclass
class Wires:
    """How weights come to a rank forward and backward, and their gradients to their owners."""

    there: Bunches
    back: Bunches
    sums: Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One op on one rank: how its results lie, what it takes for a while and keeps, which operands get its gradient as is."""

    share: Share
    lies: tuple[Strided, ...]
    space: Workspace
    kept: Saving
    passes: tuple[bool, ...]
    sizes: tuple[int, ...]  # bytes of the operands


@dataclass(eq=False)
class Known:
    """What was found out of programs and steps, by their identity, for all ranks that run them."""

    lives: dict[int, tuple[Sequence[tuple[str, ...]], frozenset[int]]] = field(default_factory=dict)  # of the programs' slots
    facts: dict[tuple[object, ...], Facts] = field(default_factory=dict)


@dataclass(eq=False)
class Forward(Tape):
    """One rank's forwards."""

    recording: bool = True
    keeping: bool = False  # inside the second run of a segment: gathered weights are kept too
    again: list[Node] = field(default_factory=list)  # what the second run of a segment wrote down
    wired: Wires | None = None  # gathered weights travel so; through common memory without it
    known: Known = field(default_factory=Known)
    facts: dict[tuple[object, ...], Facts] = field(default_factory=dict)  # of this rank, by the identity of a step

    def forward(self, program: Program, env: Env) -> None:
        """Run all steps; what is left in the env is what the runtime has then."""
        if id(program) not in self.known.lives:
            self.known.lives[id(program)] = frees(program), overwriting(program)
        free, over = self.known.lives[id(program)]
        if self.wired is not None:
            self.wired.there.reset()
        at = 0
        for low, high in program.segments:
            self._steps(program.steps, range(at, low), env, free, over)
            self._segment(program, low, high, env, free, over)
            at = high
        self._steps(program.steps, range(at, len(program.steps)), env, free, over)

    def _steps(
        self, steps: Sequence[Step], span: range, env: Env, free: Sequence[tuple[str, ...]], over: frozenset[int]
    ) -> None:
        for k in span:
            self.step(steps[k], env, k in over)
            for slot in free[k]:
                self.heap.drop(env.pop(slot).block)

    def step(self, step: Step, env: Env, over: bool = False) -> None:
        if isinstance(step, Compute):
            self._compute(step, env, over)
        elif isinstance(step, Move):
            self._move(step, env)
        else:
            self._repeat(step, env)

    def _compute(self, step: Compute, env: Env, over: bool) -> None:
        self.heap.now = step.op.path
        ins = [env[slot] for slot in step.inputs]
        facts = self._facts(step, ins, over)
        space, kept = facts.space, facts.kept
        outs = self._made(facts, ins)
        gradients = any(t.var is not None for t in ins)
        live = gradients and self.recording
        buffers = [self.heap.take(size, "activations") for size in kept.buffers]
        self.heap.pass_through(space.forward, "workspace")
        if live:
            held = [self._kept((ins[k] if k >= 0 else outs[-1 - k]).block) for k in kept.tensors]
            self._record(facts, ins, outs, held + buffers)
        else:
            for block in buffers:
                self.heap.drop(block)
            if gradients:  # a segment's first run: its results do have gradients
                for out in outs:
                    out.var = Var(size=out.bytes)
        env.update(zip(step.outputs, outs, strict=True))

    def _facts(self, step: Compute, ins: list[Tensor], over: bool) -> Facts:
        """Worked out once for all micro-batches, in which a step's operands lie the same, and for ranks with such a share."""
        key = (id(step), over, *[t.var is not None for t in ins])
        if key not in self.facts:
            shared = (*key, share_of(step, self.coords), *(t.lies for t in ins))
            if shared not in self.known.facts:
                self.known.facts[shared] = self._found(step, ins, over)
            self.facts[key] = self.known.facts[shared]
        return self.facts[key]

    def _found(self, step: Compute, ins: list[Tensor], over: bool) -> Facts:
        share = Share(step, self.coords, tuple(t.item for t in ins), tuple(map(self.machine.item, step.dtypes)))
        space, kept = self._needs(share, [t.var is not None for t in ins])
        copied = [_ends(t.var) and strided(share, k) for k, t in enumerate(ins)]
        return Facts(
            share=share, lies=tuple(results(share, [t.lies for t in ins], over)), space=space, kept=kept,
            passes=tuple(passes(share, k) and not copied[k] for k in range(len(ins))), sizes=tuple(t.bytes for t in ins),
        )  # fmt: skip

    def _needs(self, share: Share, gradients: Sequence[bool]) -> tuple[Workspace, Saving]:
        """What the op takes for a while, and what it keeps."""
        if self.machine.gpu:
            return gpu.workspace(share, gradients), gpu.kept(share, saving(share, gradients))
        return workspace(share, gradients, self.machine.block), saving(share, gradients)

    def _kept(self, block: Block) -> Block:
        """A block autograd keeps; of a gathered weight it keeps a note."""
        return block if block.gathered is not None else self.heap.hold(block)

    def _made(self, facts: Facts, ins: list[Tensor]) -> list[Tensor]:
        """The results: views of the first operand or new memory."""
        share, out = facts.share, []
        for k, lies in enumerate(facts.lies):
            view = lies.of is not None
            block = self.heap.hold(ins[lies.of or 0].block) if view else self.heap.take(share.result_bytes(k), "activations")
            out.append(Tensor(block, lies, share.result_items[k]))
        return out

    def _record(self, facts: Facts, ins: list[Tensor], outs: list[Tensor], saved: list[Block]) -> None:
        step, space = facts.share.step, facts.space.backward
        for out, dtype in zip(outs, step.dtypes, strict=True):
            if dtype.startswith(("float", "bfloat", "complex")):
                out.var = Var(size=out.bytes)
        made, read = [out.var or Var() for out in outs], [t.var for t in ins]

        def backward(given: list[Block]) -> list[Block | None]:
            out: list[Block | None] = []
            for var, size, through in zip(read, facts.sizes, facts.passes, strict=True):
                if var is None:
                    out.append(None)
                elif through and given:
                    out.append(self.heap.hold(given[0]))
                else:
                    out.append(self.heap.take(size, "gradients" if var.leaf else "backward"))
            self.heap.pass_through(space, "workspace")
            return out

        self.nodes.append(Node(step.op.path, read, made, saved, backward))

    # --- exchanges ---

    def _move(self, step: Move, env: Env) -> None:
        self.heap.now = f"exchange of {step.value}"
        source = env[step.source]
        shape = step.exchange.target.local_shape(self.coords)
        if source.block.kind == "weights" and is_gather(step):
            env[step.target] = self._gather(step, source, shape)
            return
        there = moving(step.exchange, self.rank, source.item, self.machine)
        block = self._moved(there, source.block, "exchange")
        out = Tensor(block, Strided.fresh(shape), source.item)
        if source.var is not None:
            out.var = Var(size=out.bytes)
            if self.recording:
                back = moving(step.exchange.adjoint, self.rank, source.item, self.machine)
                self.nodes.append(Node(self.heap.now, [source.var], [out.var], [], lambda g: [self._back(back, g)]))
        env[step.target] = out

    def _back(self, steps: tuple[Moved, ...], given: list[Block]) -> Block:
        return self._moved(steps, given[0], "backward")

    def _moved(self, steps: tuple[Moved, ...], source: Block, kind: str) -> Block:
        block = self.heap.hold(source)
        for step in steps:
            if step.result is None:
                continue
            new = self.heap.take(step.result, "activations" if kind == "exchange" else kind)
            self.heap.pass_through(step.beside, "exchange")
            self.heap.drop(block)
            block = new
        return block

    def _gather(self, step: Move, source: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A stored weight gathered for the ops that read it, and let go."""
        size = math.prod(shape) * source.item
        wired = self.wired if not self.keeping else None
        note = Gathered(size, fetch=(lambda: wired.back.fetch(step, size)) if wired is not None else None)
        block = wired.there.fetch(step, size) if wired is not None else self.heap.take(size, "gathered weights")
        block.gathered = note if not self.keeping and self.recording else None
        out = Tensor(block, Strided.fresh(shape), source.item)
        if source.var is not None:
            out.var, leaf = Var(size=size), source.var
            if self.recording:
                self.nodes.append(Node(self.heap.now, [leaf], [out.var], [], lambda g: [self._given(step, note, leaf, g[0])]))
        return out

    def _given(self, step: Move, note: Gathered, leaf: Var, grad: Block) -> Block | None:
        """The gradient of a gathered weight: this rank's part goes to its shard, the others' to shared memory or on a wire."""
        if note.full is not None:
            self.heap.drop(note.full)
            note.full = None
        if self.wired is not None:
            self.wired.sums.give(step, self.heap.hold(grad))
            return None
        return self.heap.take(leaf.size, "gradients") if leaf.grad is None else None

    # --- passes ---

    def _repeat(self, step: Repeat, env: Env) -> None:
        (entry, dim), count = step.entries[0], len(step.bodies)
        source = env[entry]
        pieces = self._pieces(source, dim, count)
        outs: dict[str, list[Tensor]] = {outside: [] for _, outside, _ in step.exits}
        for body, piece in zip(step.bodies, pieces, strict=True):
            inner = {**env, entry: piece}
            for some in inner.values():
                self.heap.hold(some.block)
            for inside in body:
                self.step(inside, inner)
            for inside_slot, outside, _ in step.exits:
                self.heap.hold(inner[inside_slot].block)
                outs[outside].append(inner[inside_slot])
            for some in inner.values():
                self.heap.drop(some.block)
        for piece in pieces:
            self.heap.drop(piece.block)
        for _, outside, at in step.exits:
            env[outside] = self._joined(outs[outside], at)

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
            self.nodes.append(Node("passes", [source.var], made, [], lambda g: [self.heap.take(size, "backward")]))
        return out

    def _joined(self, pieces: list[Tensor], dim: int) -> Tensor:
        first = pieces[0]
        shape = tuple(sum(p.lies.shape[d] for p in pieces) if d == dim else n for d, n in enumerate(first.lies.shape))
        size = math.prod(shape) * first.item
        out = Tensor(self.heap.take(size, "activations"), Strided.fresh(shape), first.item)
        if any(p.var is not None for p in pieces):
            out.var = Var(size=size)
            if self.recording:
                ins = [p.var for p in pieces]
                self.nodes.append(Node("passes", ins, [out.var], [], lambda g: [self.heap.hold(g[0]) for _ in ins]))
        for piece in pieces:
            self.heap.drop(piece.block)
        return out

    # --- recomputed segments ---

    def _segment(
        self, program: Program, low: int, high: int, env: Env, free: Sequence[tuple[str, ...]], over: frozenset[int]
    ) -> None:
        steps = program.steps[low:high]
        made = {slot for step in steps for slot in writes(step)}
        given = {slot: env[slot] for slot in sorted({slot for step in steps for slot in reads(step)} - made)}
        later = {slot for step in program.steps[high:] for slot in reads(step)} | set(program.slots.values())
        for tensor in given.values():
            self.heap.hold(tensor.block)
        results = self._body(program, range(low, high), given, made & later, free, over, record=False)
        for k in range(low, high):
            for slot in free[k]:
                if slot in given:
                    self.heap.drop(env.pop(slot).block)
        env.update(results)
        outs = {slot: t.var for slot, t in results.items() if t.var is not None}

        def backward(grads: list[Block]) -> list[Block | None]:
            again = self._body(program, range(low, high), given, made & later, free, over, record=True)
            return self._through(again, outs)

        held = [tensor.block for tensor in given.values()]
        self.nodes.append(Node("segment", [], list(outs.values()), held, backward))

    def _body(
        self, program: Program, span: range, given: Mapping[str, Tensor], wanted: set[str],
        free: Sequence[tuple[str, ...]], over: frozenset[int], *, record: bool,
    ) -> Env:  # fmt: skip
        """The steps of a segment on what was given; its results."""
        inner: Env = dict(given)
        for tensor in inner.values():
            self.heap.hold(tensor.block)
        before = self.recording, self.keeping, self.nodes
        self.recording, self.keeping, self.nodes = record, record, []
        self._steps(program.steps, span, inner, free, over)
        self.again = self.nodes
        self.recording, self.keeping, self.nodes = before
        out = {slot: inner.pop(slot) for slot in sorted(wanted)}
        for tensor in inner.values():
            self.heap.drop(tensor.block)
        return out

    def _through(self, again: Env, outs: Mapping[str, Var]) -> list[Block | None]:
        """Backward of a segment's second run."""
        nodes = self.again
        for slot, tensor in again.items():
            if slot in outs and tensor.var is not None:
                tensor.var.grad, outs[slot].grad = outs[slot].grad, None
            self.heap.drop(tensor.block)
        self._run(nodes)
        return []


def _ends(var: Var | None) -> bool:
    return var is not None and (var.leaf or var.ends)
