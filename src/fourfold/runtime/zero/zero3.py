"""Divided weights (ZeRO-3) in forward and backward: gathered for the ops that read them, let go, gathered again for backward.

The lists say when (`plans.lists.stage_list`). Autograd would keep a gathered weight from forward to backward. So forward runs
under hooks that save a note in its place; what the list does before an op's backward (fetch the weights that it reads) runs as
a hook of that op's node in autograd's graph; the weight's own backward, which comes when its gradient is complete, does what
the list says after it (release the weight, give its gradient away). What autograd saves is compared with the list.

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
from fourfold.runtime.zero.weight_transport import Gathered
from fourfold.runtime.zero.zero3_collective import CollectiveTransport
from fourfold.runtime.zero.zero3_shared import SharedTransport


class Note:
    """What autograd keeps instead of a gathered weight: which one, and which view of it."""

    __slots__ = ("gathered", "offset", "size", "stride")

    def __init__(self, gathered: Gathered, view: Tensor) -> None:
        self.gathered = gathered
        self.size, self.stride, self.offset = view.size(), view.stride(), view.storage_offset()


class Backward:
    """What one size of micro-batch's backward list says about weights: before the backward of an op, after that of a weight,
    and at the end. Ops are known by the identity of their step."""

    def __init__(self, lists: StageList) -> None:
        backs = [action for action in lists.backward if isinstance(action, Back)]
        self.before = {id(back.step): back.before for back in backs if back.before}
        self.after = {back.step: back.after for back in backs if isinstance(back.step, Move) and back.after}
        self.end = tuple(action for action in lists.backward if isinstance(action, Release))
        self.listed = frozenset(id(back.step) for back in backs)


class Weights:
    """The gathered parameters of one stage, for all sizes of micro-batches."""

    def __init__(self, lists: Mapping[int, StageList], state: Mapping[str, Tensor], world: World) -> None:
        self.lists, self.world = lists, world
        moves = dict.fromkeys(move for found in lists.values() for move in found.messages.moves)
        self.known = {move: self._gathered(move, state[move.value]) for move in moves}
        self.backwards = {size: Backward(found) for size, found in lists.items()} if self.known else {}
        self.carrier = self._carrier(state) if self.known else None
        self.size = next(iter(lists))  # of the micro-batch whose forward or backward runs
        self.running: Compute | None = None  # the op that runs
        self.alive: dict[int, tuple[Gathered, StorageWeakRef]] = {}  # storages of gathered weights
        self.done: set[int] = set()  # ops of the backward that runs, whose weights were fetched

    def _gathered(self, move: Move, shard: Tensor) -> Gathered:
        return Gathered(move, move.exchange.steps[0].target.local_shape(self.world.coords), shard)

    def _carrier(self, state: Mapping[str, Tensor]) -> SharedTransport | CollectiveTransport:
        messages = [found.messages for found in self.lists.values()]
        if messages[0].near:
            return SharedTransport(list(self.known.values()), state, self.world, max(found.ring_bytes for found in messages))
        actions = (action for found in self.lists.values() for action in flat((*found.forward, *found.backward)))
        bunches = [a.message for a in actions if isinstance(a, Launch) and isinstance(a.message, Bunch)]
        return CollectiveTransport(
            [*bunches, *(bunch for found in messages for bunch in found.returns)], self.known, self.world
        )

    @property
    def kept(self) -> list[Tensor]:
        """Memory that stays between steps, beside the shards."""
        return self.carrier.kept if self.carrier is not None else []

    # --- forward ---

    @contextmanager
    def forward(self, size: int) -> Iterator[None]:
        """Around a forward: what autograd saves of gathered weights is noted."""
        if self.carrier is None:
            yield
            return
        self.size = size
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self.alive.clear()

    def fetched(self, action: Fetch, shard: Tensor) -> Tensor:
        """A gathered weight for the ops that follow."""
        gathered = self.known[action.move]
        self.note("fetch", gathered)
        out: Tensor = _Gather.apply(shard, self, gathered, action.source, self.size)  # type: ignore[no-untyped-call]
        reference = StorageWeakRef(out.untyped_storage())
        self.alive[reference.cdata] = (gathered, reference)  # the reference keeps the address from being used again
        return out

    def watched(self, size: int, step: Compute, run: Callable[..., Any]) -> Callable[..., Any]:
        """An op that is known while it runs, and before whose backward the list's actions are done."""
        if self.carrier is None:
            return run
        before = self.backwards[size].before.get(id(step))

        def known(*tensors: Any) -> Any:
            self.running = step
            out = run(*tensors)
            node = _node(out) if before else None
            if before and node is not None:
                node.register_prehook(partial(self._before, step, before))
            return out

        return known

    def _pack(self, tensor: Tensor) -> Tensor | Note:
        found = self.alive.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        gathered, step = found[0], self.running
        assert step is not None
        listed = self.lists[self.size].messages.backward_weights.get(id(step), ())
        if gathered.move not in listed and id(step) in self.backwards[self.size].listed:
            raise Infeasible(
                f"{step.op.path} ({step.op.target}) keeps {gathered.name} for its backward, which its rule does not say, so "
                "that nobody would gather it then; use --zero 1, or no division of weights"
            )
        return Note(gathered, tensor)

    # --- backward ---

    def backward(self, size: int) -> None:
        """A backward begins."""
        self.size = size
        self.done.clear()

    def backward_done(self) -> None:
        """It has ended: what it has left is let go, and everything listed must have been done."""
        if self.carrier is None:
            return
        found = self.backwards[self.size]
        assert self.done == found.before.keys(), f"{len(found.before) - len(self.done)} listed backwards of ops did not run"
        self.act(found.end)

    def _before(self, step: Compute, actions: Iterable[Action], _: Any) -> None:
        if id(step) not in self.done:
            self.done.add(id(step))
            self.act(actions)

    def after(self, gathered: Gathered, grad: Tensor, size: int) -> None:
        """The gradient of a weight is complete."""
        for action in self.backwards[size].after[gathered.move]:
            if isinstance(action, Give):
                self.note("give", gathered)
                assert self.carrier is not None
                self.carrier.give(gathered, grad, action.target)
            else:
                self.act((action,))

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out what a list says beside forwards and backwards."""
        for action in actions:
            if isinstance(action, Fetch):
                self._refill(action)
            elif isinstance(action, Release):
                self.note("release", self.known[action.move])
                self.known[action.move].full = None
            elif isinstance(action, Limit):
                assert self.carrier is not None
                self.carrier.limit(action.most)
            elif isinstance(action, Barrier):
                assert isinstance(self.carrier, SharedTransport)
                self.world.note("barrier", "shared", self.world.paths.wide, 0)
                self.carrier.barrier()
            else:
                assert isinstance(action, (Launch, Await)) and isinstance(action.message, Bunch)
                assert isinstance(self.carrier, CollectiveTransport)
                call = self.carrier.launch if isinstance(action, Launch) else self.carrier.arrive
                call(action.message)

    @torch.no_grad()
    def _refill(self, action: Fetch) -> None:
        gathered = self.known[action.move]
        self.note("fetch", gathered)
        assert self.carrier is not None
        gathered.full = self.carrier.fetch(gathered, action.source)

    def _unpack(self, saved: Tensor | Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        full = saved.gathered.full
        assert full is not None, f"a backward reads {saved.gathered.name}, which is not there"
        return full.as_strided(saved.size, saved.stride, saved.offset)

    def note(self, kind: str, gathered: Gathered) -> None:
        """Write down what happens to a weight."""
        size = gathered.shard.element_size() * _numel(gathered.shape) if kind != "release" else 0
        self.world.journal.note(kind, size=size, name=gathered.move.target)


class _Gather(torch.autograd.Function):
    """A gathered weight; when its gradient is complete, the list says where it goes."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, weights: Weights, gathered: Gathered, source: Bunch | None, size: int) -> Tensor:
        ctx.weights, ctx.gathered, ctx.size = weights, gathered, size
        assert weights.carrier is not None
        return weights.carrier.fetch(gathered, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.weights.after(ctx.gathered, grads[0], ctx.size)
        return (None,) * 5


def _node(out: Any) -> Any:
    """The node of autograd's graph at which the backward of an op begins, if it has one."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    return next((t.grad_fn for t in outs if isinstance(t, Tensor) and t.grad_fn is not None), None)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
