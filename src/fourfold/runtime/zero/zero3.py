"""Divided weights (ZeRO-3) in forward and backward: gathered for the ops that read them, released, gathered again for backward.

The lists say when (`plans.lists.stage_list`). Left alone, autograd would save a gathered weight from forward to backward. So
forward runs under saved-tensor hooks that save a `SavedView` in its place. What the list does before an op's backward (fetch
the weights it reads) runs as a hook of that op's node in autograd's graph. What it does after the gradient of a weight is
complete (release the weight, reduce its gradient) runs in the backward of the gather. Each tensor that autograd saves is
checked against the list.

Inside recomputed segments the hooks of the segment take precedence, and the gather is part of what is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.errors import Infeasible
from fourfold.plans.lists.actions import (
    Action,
    Await,
    Back,
    Barrier,
    Bunch,
    Fetch,
    Give,
    Launch,
    Limit,
    Release,
    flat,
)
from fourfold.plans.lists.stage_list import StageList
from fourfold.plans.lowering.program import Compute, Move
from fourfold.runtime.comm.world import World
from fourfold.runtime.zero.weight_transport import GatheredWeight, WeightTransport
from fourfold.runtime.zero.zero3_collective import CollectiveTransport
from fourfold.runtime.zero.zero3_shared import SharedTransport


class SavedView:
    """Autograd saves this in place of a view of a gathered weight: which weight, and which view."""

    __slots__ = ("offset", "size", "stride", "weight")

    def __init__(self, weight: GatheredWeight, view: Tensor) -> None:
        self.weight = weight
        self.size, self.stride, self.offset = view.size(), view.stride(), view.storage_offset()


class BackwardActions:
    """The actions on weights in the backward list of one size of micro-batch: before the backward of an op, after that of a
    weight, and at the end. Ops are looked up by the id of their step; `op_ids`: all that have a backward."""

    def __init__(self, lists: StageList) -> None:
        backs = [action for action in lists.backward if isinstance(action, Back)]
        self.before = {id(back.step): back.before for back in backs if back.before}
        self.after = {back.step: back.after for back in backs if isinstance(back.step, Move) and back.after}
        self.end = tuple(action for action in lists.backward if isinstance(action, Release))
        self.op_ids = frozenset(id(back.step) for back in backs)


class Zero3Weights:
    """The divided parameters of one stage, for all sizes of micro-batches."""

    def __init__(self, lists: Mapping[int, StageList], state: Mapping[str, Tensor], world: World) -> None:
        self.lists, self.world = lists, world
        moves = dict.fromkeys(move for stage_list in lists.values() for move in stage_list.messages.moves)
        self.weights = {move: self._gathered_weight(move, state[move.value]) for move in moves}
        self.backwards = {size: BackwardActions(stage_list) for size, stage_list in lists.items()} if self.weights else {}
        self.transport = self._new_transport(state) if self.weights else None
        self.size = next(iter(lists))  # of the micro-batch whose forward or backward runs
        self.current_op: Compute | None = None  # whose forward runs
        self.storages: dict[int, tuple[GatheredWeight, StorageWeakRef]] = {}  # of gathered weights, by address
        self.hooks_run: set[int] = set()  # ids of the ops whose hook has run in this backward

    def _gathered_weight(self, move: Move, shard: Tensor) -> GatheredWeight:
        return GatheredWeight(move, move.exchange.steps[0].target.local_shape(self.world.coords), shard)

    def _new_transport(self, state: Mapping[str, Tensor]) -> WeightTransport:
        messages = [stage_list.messages for stage_list in self.lists.values()]
        if messages[0].weights_shared:
            ring_bytes = max(one.ring_bytes for one in messages)
            return SharedTransport(list(self.weights.values()), state, self.world, ring_bytes)
        actions = (a for stage_list in self.lists.values() for a in flat((*stage_list.forward, *stage_list.backward)))
        bunches = [a.message for a in actions if isinstance(a, Launch) and isinstance(a.message, Bunch)]
        returns = [bunch for one in messages for bunch in one.returns]
        return CollectiveTransport([*bunches, *returns], self.weights, self.world)

    @property
    def buffers(self) -> list[Tensor]:
        """Memory that stays between steps, beside the shards."""
        return self.transport.buffers if self.transport is not None else []

    # --- forward ---

    @contextmanager
    def forward(self, size: int) -> Iterator[None]:
        """Around a forward: of gathered weights, autograd saves a `SavedView`."""
        if self.transport is None:
            yield
            return
        self.size = size
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self.storages.clear()

    def fetch(self, action: Fetch, shard: Tensor) -> Tensor:
        """A gathered weight for the ops that follow."""
        weight = self.weights[action.move]
        self.note("fetch", weight)
        out: Tensor = _Gather.apply(shard, self, weight, action.source, self.size)  # type: ignore[no-untyped-call]
        reference = StorageWeakRef(out.untyped_storage())
        self.storages[reference.cdata] = (weight, reference)  # the reference keeps the address from being used again
        return out

    def wrap_op(self, size: int, step: Compute, run: Callable[..., Any]) -> Callable[..., Any]:
        """An op that sets `current_op` while it runs, and whose backward is preceded by the list's actions."""
        if self.transport is None:
            return run
        before = self.backwards[size].before.get(id(step))

        def run_with_hook(*tensors: Any) -> Any:
            self.current_op = step
            out = run(*tensors)
            node = _grad_fn(out) if before else None
            if before and node is not None:
                node.register_prehook(partial(self._run_before, step, before))
            return out

        return run_with_hook

    def _pack(self, tensor: Tensor) -> Tensor | SavedView:
        found = self.storages.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        weight, step = found[0], self.current_op
        assert step is not None
        listed = self.lists[self.size].messages.backward_weights.get(id(step), ())
        if weight.move not in listed and id(step) in self.backwards[self.size].op_ids:
            raise Infeasible(
                f"{step.op.path} ({step.op.target}) keeps {weight.name} for its backward, which its rule does not say, so "
                "that nobody would gather it then; use --zero 1, or no division of weights"
            )
        return SavedView(weight, tensor)

    # --- backward ---

    def backward(self, size: int) -> None:
        """Called before the engine runs."""
        self.size = size
        self.hooks_run.clear()

    def end_backward(self) -> None:
        """Called after the engine has run: release the remaining weights, and check that every hook has run."""
        if self.transport is None:
            return
        actions = self.backwards[self.size]
        assert self.hooks_run == actions.before.keys(), (
            f"{len(actions.before) - len(self.hooks_run)} listed backwards of ops did not run"
        )
        self.execute(actions.end)

    def _run_before(self, step: Compute, actions: Iterable[Action], _: Any) -> None:
        if id(step) not in self.hooks_run:
            self.hooks_run.add(id(step))
            self.execute(actions)

    def after_gradient(self, weight: GatheredWeight, grad: Tensor, size: int) -> None:
        """Called when the gradient of a weight is complete."""
        for action in self.backwards[size].after[weight.move]:
            if isinstance(action, Give):
                self.note("give", weight)
                assert self.transport is not None
                self.transport.give(weight, grad, action.target)
            else:
                self.execute((action,))

    def execute(self, actions: Iterable[Action]) -> None:
        """Execute actions of a list other than forwards and backwards of ops."""
        for action in actions:
            if isinstance(action, Fetch):
                self._fetch_for_backward(action)
            elif isinstance(action, Release):
                self.note("release", self.weights[action.move])
                self.weights[action.move].full = None
            elif isinstance(action, Limit):
                assert self.transport is not None
                self.transport.limit(action.most)
            elif isinstance(action, Barrier):
                assert isinstance(self.transport, SharedTransport)
                self.world.note("barrier", "shared", self.world.paths.wide, 0)
                self.transport.barrier()
            else:
                assert isinstance(action, (Launch, Await)) and isinstance(action.message, Bunch)
                assert isinstance(self.transport, CollectiveTransport)
                call = self.transport.launch if isinstance(action, Launch) else self.transport.wait
                call(action.message)

    @torch.no_grad()
    def _fetch_for_backward(self, action: Fetch) -> None:
        weight = self.weights[action.move]
        self.note("fetch", weight)
        assert self.transport is not None
        weight.full = self.transport.fetch(weight, action.source)

    def _unpack(self, saved: Tensor | SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        full = saved.weight.full
        assert full is not None, f"a backward reads {saved.weight.name}, which is not there"
        return full.as_strided(saved.size, saved.stride, saved.offset)

    def note(self, kind: str, weight: GatheredWeight) -> None:
        """Record in the journal what happens to a weight."""
        size = weight.shard.element_size() * _numel(weight.shape) if kind != "release" else 0
        self.world.journal.note(kind, size=size, name=weight.move.target)


class _Gather(torch.autograd.Function):
    """Gathers a weight; its backward executes the list's actions for the complete gradient."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, weights: Zero3Weights, weight: GatheredWeight, source: Bunch | None, size: int
    ) -> Tensor:
        ctx.weights, ctx.weight, ctx.size = weights, weight, size
        assert weights.transport is not None
        return weights.transport.fetch(weight, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.weights.after_gradient(ctx.weight, grads[0], ctx.size)
        return (None,) * 5


def _grad_fn(out: Any) -> Any:
    """The node of autograd's graph with which the backward of an op begins, if it has one."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    return next((t.grad_fn for t in outs if isinstance(t, Tensor) and t.grad_fn is not None), None)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
