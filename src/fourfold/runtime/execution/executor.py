"""A stage's lists bound to one rank: every action a function of local tensors, run in the list's order.

Forward runs under autograd. Backward is autograd's engine, whose order follows from forward's and is therefore the same on
every rank; the list's other actions of backward run in hooks. A stage has one list per size of micro-batch, all on the same
stored tensors. Buffers that forward updates are written only at the end of the step, so that every micro-batch's backward reads
what its forward read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import InvalidInput, OutOfMemory
from fourfold.graph.spec import Constant
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.actions import (
    Action,
    Await,
    Complete,
    Fetch,
    Free,
    Launch,
    Opening,
    RunPasses,
    RunSegment,
    Sum,
)
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lowering.lifetimes import order_of_use
from fourfold.plans.lowering.program import Compute, Move
from fourfold.runtime.comm.exchange import Finish, differentiable_launcher, differentiable_mover, is_inexact, mover
from fourfold.runtime.comm.gradient_buckets import GradientBuckets
from fourfold.runtime.comm.shared.sums import SharedSum
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution.recompute import run_without_saving
from fourfold.runtime.kernels import Randomness, RankContext, build
from fourfold.runtime.kernels.recurrent import flatten_weights
from fourfold.runtime.zero.zero3 import Zero3Weights
from fourfold.units import bytes_text

Env = dict[str, Any]
BoundAction = Callable[[Env], None]
LoadPart = Callable[[str, Layout], Tensor]
"""Returns this rank's part of the stored tensor with a state_dict key."""


class Executor:
    """One rank's state and the bound lists of a stage, by size of micro-batch."""

    def __init__(
        self,
        lists: Mapping[int, StageList],
        world: World,
        load: LoadPart,
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        """`dtypes`: the dtype to run in, by captured dtype."""
        self.lists, self.world = dict(lists), world
        self.programs = {size: found.program for size, found in self.lists.items()}
        first = next(iter(self.lists.values()))
        self.program = program = first.program
        self.local = RankContext(world, randomness or Randomness(), dict(dtypes or {}))
        graph = program.graph
        self.state: dict[str, Tensor] = {}
        used = order_of_use(program)
        for parameter in sorted(graph.parameters, key=lambda p: used.get(p.name, -1)):
            layout = program.stored.get(parameter.name)
            if layout is None:
                continue
            tensor = load(parameter.key, layout)
            self.state[parameter.name] = tensor.requires_grad_() if parameter.trainable else tensor
        for step in program.computes():
            if step.nest.kernel == "lstm" and world.device.type == "cuda":  # before anybody has views of the weights
                flatten_weights(step, self.state)
        self.constants = {c.name: self._constant(c) for c in graph.constants if c.name in program.stored}
        self.keys = {p.name: p.key for p in graph.parameters}
        for axes in sorted(set(program.reductions.values())):  # by all ranks, whichever path their gradients take
            world.group(axes)
            world.group(axes, "gradients")
        self.begin_actions, self.finish_actions = first.begin, first.finish(world.coords)
        self.sums = {action: self._shared_sum(action) for action in first.messages.sums}
        self.gradients = GradientBuckets(self.state, first.messages.buckets(world.coords), world)
        self.weights = Zero3Weights(self.lists, self.state, world)
        self._forward = {size: self._bind_all(size, found.forward) for size, found in self.lists.items()}
        self.buffer_updates: dict[str, Tensor] = {}
        if program.loss_axes:
            world.group(program.loss_axes)  # created now, because all ranks must take part

    def _shared_sum(self, action: Sum) -> SharedSum:
        return SharedSum.open([self.state[name] for name in action.names], action.axes, self.world)

    def casts(self) -> AbstractContextManager[Any]:
        """Around forward in bf16: autocast. Casts of operands are ops of the list; what an op casts inside (a loss its logits)
        is left to autocast, and so done as in eager PyTorch."""
        if self.lists[next(iter(self.lists))].messages.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16, cache_enabled=False)

    @property
    def randomness(self) -> Randomness:
        return self.local.randomness

    def _constant(self, constant: Constant) -> Tensor:
        spec = self.program.graph.values[constant.name]
        dtype = getattr(torch, spec.dtype)
        flat = torch.frombuffer(bytearray(constant.data), dtype=dtype) if constant.data else torch.empty(0, dtype=dtype)
        whole = flat.reshape(spec.shape).to(self.world.device, self.local.dtype(spec.dtype))
        return self.local.cut(whole, self.program.stored[constant.name])

    # --- the actions of forward as functions ---

    def _bind_all(self, size: int, actions: Iterable[Action]) -> list[BoundAction]:
        return [self._bind(size, action) for action in actions]

    def _bind(self, size: int, action: Action) -> BoundAction:
        if isinstance(action, Compute):
            step = action
            if id(action) in self.lists[size].in_place:  # the model wrote it in place, and nobody else reads its input
                step = replace(action, op=replace(action.op, target=action.op.inplace))
            return _compute(action, self.weights.wrap_op(size, action, build(step, self.local)))
        if isinstance(action, Move):
            return _move(action, differentiable_mover(action.exchange, self.world, action.value))
        if isinstance(action, Fetch):
            return self._fetch(action)
        if isinstance(action, Free):
            return _free(action.slots)
        if isinstance(action, RunPasses):
            return self._passes(size, action)
        if isinstance(action, RunSegment):
            return self._segment(size, action)
        weights = self.weights
        return lambda env: weights.execute((action,))

    def _fetch(self, action: Fetch) -> BoundAction:
        source, target, weights = action.move.source, action.move.target, self.weights

        def fetch(env: Env) -> None:
            env[target] = weights.fetch(action, env[source])

        return fetch

    def _segment(self, size: int, action: RunSegment) -> BoundAction:
        """Steps that run again when backward comes to them."""
        first, second = self._bind_all(size, action.actions), self._bind_all(size, action.again)
        randomness = self.randomness

        def run(env: Env) -> None:
            given, moment = {slot: env[slot] for slot in action.given}, (randomness.step, randomness.microbatch)

            def body(again: bool) -> list[Any]:
                now, inner = (randomness.step, randomness.microbatch), dict(given)
                if again:  # running statistics were updated by the first run
                    inner.update({slot: inner[slot].clone() for slot in action.buffers})
                randomness.step, randomness.microbatch = moment
                with self.casts():
                    for bound in second if again else first:
                        bound(inner)
                randomness.step, randomness.microbatch = now
                return [inner[slot] for slot in action.results]

            env.update(zip(action.results, run_without_saving(body), strict=True))
            for slot in action.spent:
                del env[slot]

        return run

    def _passes(self, size: int, action: RunPasses) -> BoundAction:
        """Passes, each on the next slice of every member's examples."""
        (entry, dim), count = action.step.entries[0], len(action.bodies)
        in_flight: dict[Opening, Finish] = {}
        pieces: list[Tensor] = []
        bodies = [[self._bind_in_pass(size, inner, pieces, in_flight) for inner in body] for body in action.bodies]

        def run(env: Env) -> None:
            pieces[:] = torch.tensor_split(env[entry], count, dim)
            outs: dict[str, list[Tensor]] = {outside: [] for _, outside, _ in action.step.exits}
            for piece, body in zip(list(pieces), bodies, strict=True):
                inner = {**env, entry: piece}
                for bound in body:
                    bound(inner)
                for inside, outside, _ in action.step.exits:
                    outs[outside].append(inner[inside])
            pieces.clear()
            for _, outside, at in action.step.exits:
                env[outside] = torch.cat(outs[outside], at)

        return run

    def _bind_in_pass(
        self, size: int, action: Action, pieces: Sequence[Tensor], in_flight: dict[Opening, Finish]
    ) -> BoundAction:
        """An action of a pass; `pieces`: the passes' examples, `in_flight`: their opening exchanges that were started."""
        if not (isinstance(action, (Launch, Await)) and isinstance(action.message, Opening)):
            return self._bind(size, action)
        opening, journal = action.message, self.world.journal
        if isinstance(action, Launch):
            launch = differentiable_launcher(opening.move.exchange, self.world, opening.move.value)

            def start(env: Env) -> None:
                in_flight[opening] = launch(pieces[opening.number])

            return start

        def wait(env: Env) -> None:
            env[opening.move.target] = in_flight.pop(opening)()
            journal.note("await", name=opening.key)

        return wait

    # --- a step ---

    def forward(self, feeds: Mapping[str, Tensor], size: int = 0) -> Env:
        """Run forward on local inputs; the result holds loss, outputs and buffer writes by value name."""
        env: Env = {**self.state, **self.buffer_updates, **self.constants, **feeds}
        at = 0
        try:
            with self.casts(), self.weights.forward(size):
                for at, run in enumerate(self._forward[size]):  # noqa: B007
                    run(env)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(f"in forward of {_name(self.lists[size].forward[at])}", self.world) from error
        program = self.programs[size]
        out = {name: env[slot] for name, slot in program.slots.items()}
        self.buffer_updates.update({buffer: out[buffer].detach() for buffer, _ in program.graph.writes})
        return out

    def backward(self, starts: Sequence[Any], gradients: Sequence[Tensor | None], size: int = 0, *, last: bool = True) -> None:
        """Backward from these tensors or edges of one forward's graph; `last`: it completes the gradients."""
        self.gradients.is_last_backward = last
        if starts:
            self.weights.backward(size)
            try:
                torch.autograd.backward(starts, gradients)
            except torch.OutOfMemoryError as error:
                raise out_of_memory("in backward", self.world) from error
            self.weights.end_backward()

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for tensor in self.state.values():
            tensor.grad = None
        self._execute(self.begin_actions)

    def _execute(self, actions: Iterable[Action]) -> None:
        """Run actions of a list outside forward and backward."""
        for action in actions:
            if isinstance(action, Complete):
                self.gradients.finish()
            elif isinstance(action, Sum):
                self.world.note("sum", "shared", action.axes, self.sums[action].own_row.nbytes)
                self.sums[action].sum()
            else:
                self.weights.execute((action,))

    @torch.no_grad()
    def write_buffers(self) -> None:
        """Write the buffers that forward updated."""
        for buffer, value in self.buffer_updates.items():
            self.state[buffer].copy_(value)
        self.buffer_updates.clear()

    @property
    def updated_bytes(self) -> int:
        """Of the parameters that this rank's optimizer updates."""
        item = {name: tensor.element_size() for name, tensor in self.state.items()}
        updates = self.program.updates.items()
        return sum(item[name] * math.prod(self.local.shape(layout)) for name, layout in updates)

    def persistent_tensors(self) -> list[Tensor]:
        """The tensors that stay here between steps; gradients are attributes of their parameters."""
        beside = [*(shared_sum.own_row for shared_sum in self.sums.values()), *self.gradients.buffers, *self.weights.buffers]
        return [*self.state.values(), *self.constants.values(), *beside]

    def finish(self) -> None:
        """Complete the gradients and the buffers of a step."""
        self._execute(self.finish_actions)
        self.write_buffers()

    def global_loss(self, loss: Tensor) -> Tensor:
        """The global loss from this rank's share."""
        return self.world.all_reduce(loss, self.program.loss_axes)

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
        raise InvalidInput(
            f"input '{name}' has shape {tuple(tensor.shape)}; the plan wants the whole {tuple(shape)} or "
            f"this rank's {part}; plan again for another batch"
        )

    def gather_full(self, layout: Layout, tensor: Tensor) -> Tensor:
        """A tensor gathered from all ranks; all must call."""
        exchange = Exchange(self.world.mesh, layout, Layout.same(layout.shape))
        return mover(exchange, self.world)(tensor.detach())


def out_of_memory(where: str, world: World) -> OutOfMemory:
    """The error of a rank whose device is full."""
    free, total = torch.cuda.mem_get_info(world.device)
    held = torch.cuda.memory_allocated(world.device)
    return OutOfMemory(
        f"rank {world.ranks[world.rank]} ran out of memory {where}: it holds {bytes_text(held)}, {bytes_text(free)} of "
        f"{bytes_text(total)} are free; use more micro-batches, --recompute, --zero, a smaller batch or more ranks"
    )


def _name(action: Action) -> str:
    """What an action works on, as users name it."""
    if isinstance(action, Compute):
        return action.op.path
    return action.value if isinstance(action, Move) else type(action).__name__.lower()


def _free(slots: tuple[str, ...]) -> BoundAction:
    def free(env: Env) -> None:
        for slot in slots:
            del env[slot]

    return free


def _compute(step: Compute, run: Callable[..., Any]) -> BoundAction:
    inputs, outputs = step.inputs, step.outputs
    if len(outputs) == 1 and outputs[0] == step.op.name:
        name = outputs[0]

        def one(env: Env) -> None:
            env[name] = run(*[env[slot] for slot in inputs])

        return one

    def many(env: Env) -> None:
        env.update(zip(outputs, run(*[env[slot] for slot in inputs]), strict=True))

    return many


def _move(step: Move, run: Callable[[Tensor], Tensor]) -> BoundAction:
    source, target = step.source, step.target

    def move(env: Env) -> None:
        env[target] = run(env[source])

    return move
