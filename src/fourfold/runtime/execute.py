"""A program bound to one rank: every step a function of local tensors, run in the program's order.

Forward runs under autograd; backward is autograd's engine, whose order follows from forward's and is therefore the same
on every rank. A stage has one program per size of micro-batch, all on the same stored tensors. Buffers that forward
writes are kept aside until the step is over, so that every micro-batch's backward finds what its forward read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import InvalidInput
from fourfold.graph.spec import Constant
from fourfold.plans.exchange import Exchange
from fourfold.plans.layout import Layout
from fourfold.plans.lifetimes import frees, order_of_use, overwriting, reads, writes
from fourfold.plans.program import Compute, Move, Program, Repeat, Step
from fourfold.runtime.exchange import is_inexact, moved, mover, started
from fourfold.runtime.gradients import Gradients
from fourfold.runtime.kernels import Local, Randomness, build
from fourfold.runtime.recompute import recomputed
from fourfold.runtime.shared_sum import SharedSums
from fourfold.runtime.world import World
from fourfold.runtime.zero import Weights

Env = dict[str, Any]
BoundStep = tuple[Callable[[Env], None], tuple[str, ...]]
Bound = list[BoundStep]
"""Steps as functions, each with the slots nobody reads after it."""
FullTensor = Callable[[str, Layout], Tensor]
"""Gives this rank's part of the stored tensor with a state_dict key."""


class Executor:
    """One rank's state and the bound steps, of one program or of several by their batch sizes."""

    def __init__(
        self,
        program: Program | Mapping[int, Program],
        world: World,
        load: FullTensor,
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        randomness: Randomness | None = None,
        trains: bool = True,
    ) -> None:
        """`trains`: False where the tensors are another executor's, which this one only reads."""
        self.programs = {0: program} if isinstance(program, Program) else dict(program)
        self.program, self.world = next(iter(self.programs.values())), world
        program = self.program
        self.local = Local(world, randomness or Randomness(), dict(dtypes or {}))
        graph = program.graph
        self.state: dict[str, Tensor] = {}
        used = order_of_use(program)
        for parameter in sorted(graph.parameters, key=lambda p: used.get(p.name, -1)):
            layout = program.stored.get(parameter.name)
            if layout is None:
                continue
            tensor = load(parameter.key, layout)
            self.state[parameter.name] = tensor.requires_grad_() if parameter.trainable else tensor
        self.constants = {c.name: self._constant(c) for c in graph.constants if c.name in program.stored}
        self.keys = {p.name: p.key for p in graph.parameters}
        trainable = {n: t for n, t in self.state.items() if t.requires_grad}
        reductions = program.reductions if trains else {}
        for axes in sorted(set(reductions.values())):  # by all ranks, whichever way their gradients go
            world.group(axes)
            world.group(axes, "gradients")
        self.shared = SharedSums(trainable, reductions, world)
        rest = {name: axes for name, axes in reductions.items() if name not in self.shared.names}
        self.gradients = Gradients(trainable, rest, world)
        self.weights = Weights(self.programs if trains else {}, self.state, world)
        self._steps = {
            size: self._segmented(known, list(zip(map(self._bound, _reusing(known)), frees(known), strict=True)))
            for size, known in self.programs.items()
        }
        self.written: dict[str, Tensor] = {}
        partial = program.layouts[graph.loss].partial if graph.loss else frozenset()
        self._loss_axes = world.mesh.ordered(a for a in partial if world.mesh.extent(a) > 1)
        if self._loss_axes:
            world.group(self._loss_axes)  # made now, by all ranks

    @property
    def randomness(self) -> Randomness:
        return self.local.randomness

    def _constant(self, constant: Constant) -> Tensor:
        spec = self.program.graph.values[constant.name]
        dtype = getattr(torch, spec.dtype)
        flat = torch.frombuffer(bytearray(constant.data), dtype=dtype) if constant.data else torch.empty(0, dtype=dtype)
        whole = flat.reshape(spec.shape).to(self.world.device, self.local.dtype(spec.dtype))
        return self.local.cut(whole, self.program.stored[constant.name])

    def _bound(self, step: Step) -> Callable[[Env], None]:
        if isinstance(step, Compute):
            return _compute(step, self.weights.watched(step, build(step, self.local)))
        if isinstance(step, Move):
            return self.weights.bound(step) or _move(step, moved(step.exchange, self.world))
        return self._repeat(step)

    def _segmented(self, program: Program, steps: Bound) -> Bound:
        """The steps, those of each recomputed segment as one."""
        out, at = [], 0
        for low, high in program.segments:
            out += [*steps[at:low], self._segment(program, steps, low, high)]
            at = high
        return [*out, *steps[at:]]

    def _segment(self, program: Program, steps: Bound, low: int, high: int) -> BoundStep:
        inside, randomness = steps[low:high], self.randomness
        made = {slot for step in program.steps[low:high] for slot in writes(step)}
        needed = {slot for step in program.steps[low:high] for slot in reads(step)} - made
        later = {slot for step in program.steps[high:] for slot in reads(step)} | set(program.slots.values())
        results = sorted(made & later)
        spent = tuple(slot for _, dead in inside for slot in dead if slot in needed)
        buffers = needed & {p.name for p in program.graph.parameters if p.buffer}

        def run(env: Env) -> None:
            given, moment = {slot: env[slot] for slot in needed}, (randomness.step, randomness.microbatch)

            def body(again: bool) -> list[Any]:
                now, inner = (randomness.step, randomness.microbatch), dict(given)
                if again:  # running statistics were updated by the first run
                    inner.update({slot: inner[slot].clone() for slot in buffers})
                randomness.step, randomness.microbatch = moment
                for bound, dead in inside:
                    bound(inner)
                    for slot in dead:
                        del inner[slot]
                randomness.step, randomness.microbatch = now
                return [inner[slot] for slot in results]

            env.update(zip(results, recomputed(body), strict=True))

        return run, spent

    def _repeat(self, step: Repeat) -> Callable[[Env], None]:
        """Passes; the exchange that opens pass j+1 travels while pass j computes."""
        (entry, dim), count = step.entries[0], len(step.bodies)
        opening = [next((s for s in b if isinstance(s, Move) and s.source == entry), None) for b in step.bodies]
        launches = [started(m.exchange, self.world) if m is not None else None for m in opening]
        bodies = [
            [self._bound(s) for s in body if s is not first] for body, first in zip(step.bodies, opening, strict=True)
        ]

        def run(env: Env) -> None:
            pieces = torch.tensor_split(env[entry], count, dim)
            outs: dict[str, list[Tensor]] = {outside: [] for _, outside, _ in step.exits}
            flying = launches[0](pieces[0]) if launches[0] is not None else None
            for k, (piece, body) in enumerate(zip(pieces, bodies, strict=True)):
                inner, first, arrived = {**env, entry: piece}, opening[k], flying
                ahead = launches[k + 1] if k + 1 < count else None
                flying = ahead(pieces[k + 1]) if ahead is not None else None
                if first is not None and arrived is not None:
                    inner[first.target] = arrived()
                for bound in body:
                    bound(inner)
                for inside, outside, _ in step.exits:
                    outs[outside].append(inner[inside])
            for _, outside, at in step.exits:
                env[outside] = torch.cat(outs[outside], at)

        return run

    def forward(self, feeds: Mapping[str, Tensor], size: int = 0) -> Env:
        """Run forward on local inputs; the result holds loss, outputs and buffer writes by value name."""
        env: Env = {**self.state, **self.written, **self.constants, **feeds}
        with self.weights.saving(size):
            for run, dead in self._steps[size]:
                run(env)
                for slot in dead:
                    del env[slot]
        program = self.programs[size]
        out = {name: env[slot] for name, slot in program.slots.items()}
        self.written.update({buffer: out[buffer].detach() for buffer, _ in program.graph.writes})
        return out

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for tensor in self.state.values():
            tensor.grad = None
        self.weights.begin()

    @torch.no_grad()
    def settle(self) -> None:
        """Put what forward wrote into the buffers."""
        for buffer, value in self.written.items():
            self.state[buffer].copy_(value)
        self.written.clear()

    def kept(self) -> list[Tensor]:
        """The tensors that stay here between steps; gradients lie under their parameters."""
        beside = [*self.shared.own, *self.gradients.kept, *self.weights.kept]
        return [*self.state.values(), *self.constants.values(), *beside]

    def finish(self) -> None:
        """Complete the gradients and the buffers of a step."""
        self.weights.finish()
        self.gradients.finish()
        self.shared.finish()
        self.settle()

    def total(self, loss: Tensor) -> Tensor:
        """The global loss from this rank's share."""
        return self.world.summed(loss, self._loss_axes) if self._loss_axes else loss

    def cut(self, name: str, tensor: Tensor, size: int | None = None) -> Tensor:
        """This rank's part of a whole input, target or parameter; a tensor of the local shape is taken as the part itself."""
        program = self.program if size is None else self.programs[size]
        layout, spec = program.stored[name], program.graph.values[name]
        shape, part = spec.shape, self.local.shape(layout)
        dtype = self.local.dtype(spec.dtype)
        tensor = tensor.to(self.world.device)
        tensor = tensor.to(dtype) if is_inexact(tensor) else tensor
        if tuple(tensor.shape) == tuple(shape):
            return self.local.cut(tensor, layout).contiguous()
        if tuple(tensor.shape) == part:
            return tensor
        raise InvalidInput(f"input '{name}' has shape {tuple(tensor.shape)}; the plan wants the whole {tuple(shape)} or "
                           f"this rank's {part}; plan again for another batch")  # fmt: skip

    def whole(self, layout: Layout, tensor: Tensor) -> Tensor:
        """A tensor gathered from all ranks; all must call."""
        exchange = Exchange(self.world.mesh, layout, Layout.same(layout.shape))
        return mover(exchange, self.world)(tensor.detach())


def _compute(step: Compute, run: Callable[..., Any]) -> Callable[[Env], None]:
    inputs, outputs = step.inputs, step.outputs
    if len(outputs) == 1 and outputs[0] == step.op.name:
        name = outputs[0]

        def one(env: Env) -> None:
            env[name] = run(*[env[slot] for slot in inputs])

        return one

    def many(env: Env) -> None:
        env.update(zip(outputs, run(*[env[slot] for slot in inputs]), strict=True))

    return many


def _move(step: Move, run: Callable[[Tensor], Tensor]) -> Callable[[Env], None]:
    source, target = step.source, step.target

    def move(env: Env) -> None:
        env[target] = run(env[source])

    return move


def _reusing(program: Program) -> list[Step]:
    """The steps, with ops the model wrote in place done in place again where nobody else reads their input."""
    again = overwriting(program)
    return [
        replace(step, op=replace(step.op, target=step.op.inplace)) if k in again and isinstance(step, Compute) else step
        for k, step in enumerate(program.steps)
    ]
