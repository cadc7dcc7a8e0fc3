"""ZeRO-3: weights that are stored divided are gathered for the op that reads them, dropped, and gathered again for backward.

The program says where: a `Move` of kind "parameter" before the first op that reads one. Autograd would keep the gathered
weight from forward to backward. So forward runs under hooks that save a note in its place, and backward, where it meets the
note, asks for the weight again; it is let go when its own gradient has come and been dealt out to the shards.

How weights and gradients travel is told by a `Carrier`: through shared memory (`ring.py`) or by collectives (`wired.py`).
Inside recomputed segments the hooks of the segment take precedence, and the gather is part of what is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.plans.buckets import gathered
from fourfold.plans.program import Compute, Move, Program
from fourfold.runtime.carrier import Carrier, Gathered
from fourfold.runtime.exchange import moved
from fourfold.runtime.ring import Shared
from fourfold.runtime.wired import Wired
from fourfold.runtime.world import World

Env = dict[str, Any]


class Note:
    """What autograd keeps instead of a gathered weight: which one, which view of it, and for which op."""

    __slots__ = ("gathered", "offset", "size", "stride", "user")

    def __init__(self, gathered: Gathered, view: Tensor, user: str) -> None:
        self.gathered, self.user = gathered, user
        self.size, self.stride, self.offset = view.size(), view.stride(), view.storage_offset()


class Weights:
    """The gathered parameters of one stage: of one program, or of several by their batch sizes."""

    def __init__(self, programs: Mapping[int, Program], state: Mapping[str, Tensor], world: World) -> None:
        self.state, self.world = state, world
        self.known: dict[Move, Gathered] = {}
        self.orders = {size: [self._gathered(m) for m in gathered(program)] for size, program in programs.items()}
        self.carrier: Carrier | None = None
        if self.known:
            everyone = list(self.known.values())
            self.carrier = Shared.open(everyone, state, world) or Wired(self.orders, world)
        self.open = False  # whether a step is under way: only then do all ranks wait for each other's updates
        self.user = ""  # the op that now runs
        self.alive: dict[int, tuple[Gathered, StorageWeakRef]] = {}  # storages of gathered weights

    def _gathered(self, move: Move) -> Gathered:
        if move not in self.known:
            (there,), (back,) = move.exchange.steps, move.exchange.adjoint.steps
            shape, shard = there.target.local_shape(self.world.coords), self.state[move.value]
            self.known[move] = Gathered(len(self.known), move.value, there, back, shape, shard)
        return self.known[move]

    # --- what the executor calls ---

    @property
    def kept(self) -> list[Tensor]:
        """Memory that stays between steps, beside the shards."""
        return self.carrier.kept if self.carrier is not None else []

    def begin(self) -> None:
        self.open = True
        if self.carrier is not None:
            self.carrier.begin()

    def finish(self) -> None:
        self.open = False
        if self.carrier is not None:
            self.carrier.finish()
            for gathered in self.known.values():
                gathered.full = None

    def bound(self, step: Move) -> Callable[[Env], None] | None:
        """The move of a parameter as a function; None if it is an ordinary one."""
        gathered = self.known.get(step) if step.kind == "parameter" else None
        if gathered is None:
            return None
        plain, source, target = moved(step.exchange, self.world), step.source, step.target

        def gather(env: Env) -> None:
            env[target] = self._gather(gathered) if self.open else plain(env[source])

        return gather

    def watched(self, step: Compute, run: Callable[..., Any]) -> Callable[..., Any]:
        """An op, its name known while it runs."""
        if self.carrier is None:
            return run
        name = step.outputs[0]

        def known(*tensors: Any) -> Any:
            self.user = name
            out = run(*tensors)
            if self.open and self.carrier is not None:
                self.carrier.ran(name, out)
            return out

        return known

    @contextmanager
    def saving(self, size: int) -> Iterator[None]:
        """Around a forward: what it saves for backward."""
        if self.carrier is None or not self.open:
            yield
            return
        self.carrier.forward(size)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self.alive.clear()
        self.carrier.forward_done(size)

    # --- forward and backward ---

    def _gather(self, gathered: Gathered) -> Tensor:
        out: Tensor = _Gather.apply(gathered.shard, self, gathered)  # type: ignore[no-untyped-call]
        reference = StorageWeakRef(out.untyped_storage())
        self.alive[reference.cdata] = (gathered, reference)  # the reference keeps the address from being used again
        return out

    def _pack(self, tensor: Tensor) -> Tensor | Note:
        found = self.alive.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        assert self.carrier is not None
        self.carrier.saved(found[0], self.user)
        return Note(found[0], tensor, self.user)

    def _unpack(self, saved: Tensor | Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        gathered = saved.gathered
        full = gathered.full
        if full is None:
            assert self.carrier is not None
            full = self.carrier.refill(gathered, saved.user)
            if gathered.shard.requires_grad:  # of a frozen one no gradient comes that would end its use
                gathered.full = full
        return full.as_strided(saved.size, saved.stride, saved.offset)


class _Gather(torch.autograd.Function):
    """A gathered weight; its gradient goes to the carrier, which adds each rank's part to the shards."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, weights: Weights, gathered: Gathered) -> Tensor:
        ctx.weights, ctx.gathered = weights, gathered
        return weights.carrier.fetch(gathered)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.gathered.full = None
        ctx.weights.carrier.give(ctx.gathered, grads[0])
        return None, None, None
