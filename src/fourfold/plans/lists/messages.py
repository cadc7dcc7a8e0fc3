"""What one stage sends together, and which of it goes through shared memory: gradients in buckets, divided weights in bunches,
updated slices in chunks. `lists` says when each is sent.

Shared memory comes first to the sums of gradients, then to divided weights, then to slices, as long as there is room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fourfold.graph import Graph
from fourfold.graph.spec import item_bytes
from fourfold.plans.layout.exchange import Exchange
from fourfold.plans.layout.layout import Layout
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists import comm_batches
from fourfold.plans.lists.actions import Bunch, GatherSlices, Sum
from fourfold.plans.lists.backward_weights import weights_read_by_backward
from fourfold.plans.lists.comm_batches import Bucket, Gradient
from fourfold.plans.lists.paths import Path, Paths
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.plans.lowering.lifetimes import backwards, order_of_use, overwriting
from fourfold.plans.lowering.program import Compute, Move, Program, inside


@dataclass(frozen=True)
class StageMessages:
    """The messages of one stage for one size of micro-batch.

    `live`: the values that have a gradient. `shared_bytes`: memory that the stage's ranks on one host can share; None: as much
    as they need. `trains`: False where only forward runs, on the tensors of another runner: then divided weights move by
    ordinary exchanges.
    """

    program: Program
    paths: Paths
    live: frozenset[str]
    precision: str = "fp32"
    shared_bytes: int | None = None
    trains: bool = True
    _buckets: dict[tuple[int, ...], tuple[Bucket, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        return self.program.graph

    def item(self, value: str) -> int:
        """Bytes of an element of a value."""
        return item_bytes(self.graph.values[value].dtype, self.precision)

    def dtype(self, value: str) -> str:
        return self.graph.values[value].dtype

    @cached_property
    def overwriting(self) -> frozenset[int]:
        """The numbers of the steps done in place."""
        return overwriting(self.program)

    @cached_property
    def trained(self) -> frozenset[str]:
        return frozenset(p.name for p in self.graph.parameters if p.trainable)

    @cached_property
    def backwards(self) -> frozenset[int]:
        """The identities of the ops and exchanges that have a backward."""
        return backwards(self.program, self.live)

    # --- divided weights ---

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves that gather a divided weight."""
        return tuple(comm_batches.weight_gathers(self.program)) if self.trains else ()

    @cached_property
    def trained_moves(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.value in self.trained)

    @cached_property
    def backward_weights(self) -> Mapping[int, Sequence[Move]]:
        """By the identity of an op, the gathered weights that its backward reads."""
        if not self.moves:
            return {}
        return weights_read_by_backward(
            self.program,
            self.moves,
            gradients=self.gradients,
            item=self.item,
            backwards=self.backwards,
            overwriting=self.overwriting,
        )

    def gradients(self, step: Compute) -> list[bool]:
        """Which operands of an op get a gradient."""
        return [name in self.live for name in step.op.operands]

    @cached_property
    def users(self) -> tuple[Compute, ...]:
        """The ops outside recomputed segments whose backward reads gathered weights, in forward's order."""
        again = {k for low, high in self.program.segments for k in range(low, high)}
        steps = (step for k, outer in enumerate(self.program.steps) if k not in again for step in inside(outer))
        return tuple(step for step in steps if isinstance(step, Compute) and id(step) in self.backward_weights)

    @cached_property
    def gathers(self) -> tuple[Bunch, ...]:
        """Divided weights for forward."""
        return () if self.weights_shared else self._bunched("gather", self.moves)

    @cached_property
    def refills(self) -> tuple[Bunch, ...]:
        """Divided weights for backward: those it reads and no others, in the order in which forward last uses them."""
        last = {move: n for n, user in enumerate(self.users) for move in self.backward_weights[id(user)]}
        place = {move: n for n, move in enumerate(self.moves)}
        return () if self.weights_shared else self._bunched("refill", sorted(last, key=lambda move: (last[move], place[move])))

    @cached_property
    def returns(self) -> tuple[Bunch, ...]:
        """The gradients of divided weights, on their way to the owners of their parts."""
        return () if self.weights_shared else self._bunched("sum", self.trained_moves, back=True)

    def _bunched(self, word: str, moves: Sequence[Move], *, back: bool = False) -> tuple[Bunch, ...]:
        steps = [(m.exchange.adjoint if back else m.exchange).steps[0] for m in moves]
        items, dtypes = [self.item(m.value) for m in moves], [self.dtype(m.value) for m in moves]
        groups = comm_batches.weight_bunches(steps, items, dtypes, most=self.paths.policy.bunch_bytes)
        return tuple(
            Bunch(f"{word} {k}", tuple(moves[n] for n in group), tuple(steps[n] for n in group), back)
            for k, group in enumerate(groups)
        )

    # --- sums of gradients ---

    @cached_property
    def _reduced(self) -> tuple[str, ...]:
        """Parameters whose gradients are summed, in the order of their use."""
        first = order_of_use(self.program)
        found = self.program.reductions if self.trains else ()
        return tuple(sorted(found, key=lambda name: first.get(name, -1)))

    def buckets(self, coords: Coords) -> tuple[Bucket, ...]:
        """The gradients that a rank sums by collectives during backward."""
        within = {name for found in self.sums for name in found.names}
        names = [name for name in self._reduced if name not in within]
        sizes = tuple(math.prod(self.program.stored[n].local_shape(coords)) * self.item(n) for n in names)
        if sizes not in self._buckets:
            axes, policy = self.program.reductions, self.paths.policy
            gradients = [Gradient(n, size, axes[n], self.dtype(n)) for n, size in zip(names, sizes, strict=True)]
            found = comm_batches.buckets(gradients, most=policy.bucket_bytes, last=policy.last_bucket_bytes)
            self._buckets[sizes] = found
        return self._buckets[sizes]

    # --- what goes through shared memory ---

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The gradients that are summed after backward through shared memory."""
        groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for name in self._reduced:
            axes = self.program.reductions[name]
            if self.paths.share_memory(axes):
                groups.setdefault((axes, self.dtype(name)), []).append(name)
        out, left = [], self.shared_bytes
        for (axes, dtype), names in groups.items():
            size = self._shared_bytes(names, self.program.stored)
            if size and (left is None or size <= left):
                out.append(Sum(tuple(names), axes, dtype))
                left = left - size if left is not None else None
        return tuple(out)

    @cached_property
    def weights_shared(self) -> bool:
        """Whether divided weights, and their gradients, go through shared memory."""
        return bool(self.moves) and self.paths.all_share_memory and self._fits(self._weight_bytes, beside=self._sum_bytes)

    @cached_property
    def slices(self) -> tuple[GatherSlices, ...]:
        """Updated slices on their way to all copies of their parameters (ZeRO-1)."""
        return tuple(self._slices())

    def _slices(self) -> Iterator[GatherSlices]:
        program, used = self.program, self._sum_bytes + (self._weight_bytes if self.weights_shared else 0)
        groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for name, layout in program.updates.items():
            steps = Exchange(program.mesh, layout, program.stored[name]).steps
            assert len(steps) <= 1, f"{name} is gathered in {len(steps)} steps"
            for step in steps:
                groups.setdefault((step.axes, self.dtype(name)), []).append(name)
        kinds = [program.mesh.coords(members[0]) for members in rank_classes(program.mesh, [program])] if groups else []
        for (axes, dtype), names in groups.items():
            item = self.item(names[0])
            shapes = [[program.updates[name].local_shape(coords) for name in names] for coords in kinds]
            longest = max((math.prod(shape[1:]) for some in shapes for shape in some if shape and shape[0]), default=1)
            most = max(sum(map(math.prod, some)) for some in shapes)
            elements = max(min(self.paths.policy.chunk_bytes // item, most), longest)
            size = 2 * self.paths.most_on_a_host * elements * item
            shared = self.paths.share_memory(axes) and self._fits(size, beside=used)
            used += size if shared else 0
            taken = elements * (self.paths.extent(axes) - 1)
            path: Path = "shared" if shared else self.paths.one_to_all("all_gather", axes, 0, taken)
            rounds = max(len(comm_batches.chunks(some, elements)) for some in shapes)
            yield GatherSlices(tuple(names), axes, dtype, elements, rounds, path)

    def _fits(self, size: int, *, beside: int) -> bool:
        return self.shared_bytes is None or size + beside <= self.shared_bytes

    @cached_property
    def _sum_bytes(self) -> int:
        return sum(self._shared_bytes(found.names, self.program.stored) for found in self.sums)

    @cached_property
    def _weight_bytes(self) -> int:
        """Of divided weights in shared memory, and of the ring that their gradients go through."""
        weights = self._shared_bytes([move.value for move in self.moves], self.program.stored)
        return self.ring_bytes * self.paths.most_on_a_host + weights

    @property
    def ring_bytes(self) -> int:
        """Of a rank's area in the ring of gradients."""
        return comm_batches.ring_bytes(self.trained_moves, [self.item(move.value) for move in self.trained_moves])

    def _shared_bytes(self, names: Sequence[str], layouts: Mapping[str, Layout]) -> int:
        """Bytes on the fullest host, if every rank had the largest part of each tensor."""
        largest = sum(self.item(n) * math.prod(max(own.counts) for own in layouts[n].dims) for n in names)
        return largest * self.paths.most_on_a_host
