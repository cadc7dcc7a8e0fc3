"""Which gathered weights the backward of each op reads: those that autograd saves, themselves or as views.

Ranks may differ: an op saves nothing where a rank has no rows. They must gather alike, so that all gather what any rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.plans.lists.result_layout import Strided, results
from fourfold.plans.lists.saved_tensors import Share, saving
from fourfold.plans.lowering.program import Compute, Move, Program, inside

Operands = Callable[[Compute], Sequence[bool]]
"""Which operands of an op get a gradient."""


def weights_read_by_backward(
    program: Program,
    moves: Sequence[Move],
    *,
    gradients: Operands,
    item: Callable[[str], int],
    backwards: frozenset[int],
    overwriting: frozenset[int],
) -> dict[int, list[Move]]:
    """By the identity of an op with a backward, the weights that it reads, in the order of its operands. `item`: bytes of an
    element of a value; `overwriting`: the numbers of the steps done in place."""
    out: dict[int, list[Move]] = {}
    for members in rank_classes(program.mesh, [program]):
        walk = _Walk(moves, program.mesh.coords(members[0]), gradients, item)
        for step, found in walk.steps(program, overwriting):
            mine = out.setdefault(id(step), [])
            mine += [move for move in found if move not in mine]
    return {op: found for op, found in out.items() if found and op in backwards}


class _Walk:
    """One rank: slots that are weights, or views of them, are followed."""

    def __init__(self, moves: Iterable[Move], coords: Coords, gradients: Operands, item: Callable[[str], int]) -> None:
        self.coords, self.gradients, self.item = coords, gradients, item
        self.lies = {move.target: Strided.fresh(move.exchange.target.local_shape(coords)) for move in moves}
        self.weight = {move.target: move for move in moves}

    def steps(self, program: Program, overwriting: frozenset[int]) -> Iterator[tuple[Compute, list[Move]]]:
        for number, outer in enumerate(program.steps):
            for step in inside(outer):
                if isinstance(step, Compute) and any(slot in self.weight for slot in step.inputs):
                    yield step, self._saved(step, over=number in overwriting)

    def _saved(self, step: Compute, *, over: bool) -> list[Move]:
        share = Share(step, self.coords, tuple(map(self.item, step.op.operands)), tuple(map(self.item, step.op.results)))
        pairs = zip(step.inputs, share.operands, strict=True)
        operands = [self.lies[slot] if slot in self.lies else Strided.fresh(shape) for slot, shape in pairs]
        for slot, made in zip(step.outputs, results(share, operands, over), strict=True):
            source = step.inputs[made.of] if made.of is not None else ""
            if source in self.weight:
                self.lies[slot], self.weight[slot] = made, self.weight[source]
        kept = self._kept(step, share)
        slots = [step.inputs[k] if k >= 0 else step.outputs[-1 - k] for k in kept]
        return list(dict.fromkeys(self.weight[slot] for slot in slots if slot in self.weight))

    def _kept(self, step: Compute, share: Share) -> Sequence[int]:
        """Operands and results that autograd saves; of an op without a rule nobody knows, so all operands."""
        gradients = self.gradients(step)
        if not any(gradients):
            return ()
        return range(len(step.inputs)) if step.nest.kernel == "replicated" else saving(share, gradients).tensors
