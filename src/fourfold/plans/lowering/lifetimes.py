"""How long slots of a program live, which ops may write over their input, and which steps are run again: facts of the steps
alone, for whoever runs them or counts their memory.
"""

from __future__ import annotations

from fourfold.graph import Graph
from fourfold.plans.lowering.program import Compute, Move, Program, Repeat, Step, inside
from fourfold.plans.spec.plan import Segment

_FRESH = ("aten.conv", "aten.batch_norm", "aten.linear", "aten.add")
"""Ops whose result is new memory that their own backward does not read."""


def reads(step: Step) -> set[str]:
    """The slots a step reads."""
    if isinstance(step, Compute):
        return set(step.inputs)
    if isinstance(step, Move):
        return {step.source}
    inner = {slot for body in step.bodies for s in body for slot in reads(s)}
    made = {slot for body in step.bodies for s in body for slot in writes(s)}
    return (inner - made) | {slot for slot, _ in step.entries}


def writes(step: Step) -> set[str]:
    """The slots a step makes."""
    if isinstance(step, Compute):
        return set(step.outputs)
    if isinstance(step, Move):
        return {step.target}
    return {outside for _, outside, _ in step.exits}


def frees(program: Program) -> list[tuple[str, ...]]:
    """For each step, the slots nobody reads after it."""
    kept = set(program.slots.values())
    last: dict[str, int] = {}
    for k, step in enumerate(program.steps):
        for slot in writes(step):
            last[slot] = k
    made = set(last)
    for k, step in enumerate(program.steps):
        for slot in reads(step) & made:
            last[slot] = k
    out: list[list[str]] = [[] for _ in program.steps]
    for slot, k in last.items():
        if slot not in kept:
            out[k].append(slot)
    return [tuple(slots) for slots in out]


def overwriting(program: Program) -> frozenset[int]:
    """The steps that the model wrote in place and that may be done so again, because nobody else reads their input."""
    readers: dict[str, int] = {}
    for step in program.steps:
        for slot in reads(step):
            readers[slot] = readers.get(slot, 0) + 1
    kept = set(program.slots.values())
    home = {k: n for n, (low, high) in enumerate(program.segments) for k in range(low, high)}
    fresh = {
        s.outputs[0]: home.get(k)
        for k, s in enumerate(program.steps)
        if isinstance(s, Compute) and s.op.target.startswith(_FRESH)
    }
    out = set()
    for k, step in enumerate(program.steps):
        if isinstance(step, Compute) and step.op.inplace and step.nest.kernel == "plain" and step.inputs:
            first = step.inputs[0]
            alone = readers[first] == 1 and first not in kept and step.inputs.count(first) == 1
            if alone and first in fresh and fresh[first] == home.get(k):
                out.add(k)
    return frozenset(out)


def segments(wanted: tuple[Segment, ...], graph: Graph, steps: tuple[Step, ...]) -> tuple[tuple[int, int], ...]:
    """The steps of each recomputed run of ops, with the parameters gathered for it."""
    order = {op.path: k for k, op in enumerate(graph.ops)}
    at: dict[int, int] = {}  # op -> step
    for k, step in enumerate(steps):
        inner = step.bodies[0] if isinstance(step, Repeat) else (step,)
        at.update({order[s.op.path]: k for s in inner if isinstance(s, Compute) and s.op.name in graph.dependent})
    out: list[tuple[int, int]] = []
    for segment in wanted:
        first, last = order.get(segment.first), order.get(segment.last)
        found = sorted(at[k] for k in at if first is not None and last is not None and first <= k <= last)
        if not found:
            continue
        low = next(k for k in range(found[0], -1, -1) if k == 0 or not _gathers(steps[k - 1]))
        out.append((max(low, out[-1][1] if out else 0), found[-1] + 1))
    return tuple((low, high) for low, high in out if low < high)


def _gathers(step: Step) -> bool:
    return isinstance(step, Move) and step.kind == "parameter"


def order_of_use(program: Program) -> dict[str, int]:
    """By stored tensor, the first step that reads it."""
    out: dict[str, int] = {}
    for k, step in enumerate(program.steps):
        for slot in reads(step):
            out.setdefault(slot.split("@")[0], k)
    return out


def backwards(program: Program, live: frozenset[str]) -> frozenset[int]:
    """The identities of the ops and exchanges that have a backward: a gradient comes to what they make, and goes on to what
    they read. `live`: the values that have a gradient; one that no op of the program reads has it from elsewhere."""
    read = {name for op in program.graph.ops for name in op.operands}
    graded = {program.slots[name] for name in (program.graph.loss, *program.graph.outputs) if name in live}
    graded |= {name for op in program.graph.ops for name in op.results if name in live and name not in read}
    out: set[int] = set()
    for outer in reversed(program.steps):
        if isinstance(outer, Repeat):
            graded |= {inside for inside, outside, _ in outer.exits if outside in graded}
        for step in reversed(inside(outer)):
            if graded.isdisjoint(writes(step)):
                continue
            names = step.op.operands if isinstance(step, Compute) else (step.value,)
            slots = step.inputs if isinstance(step, Compute) else (step.source,)
            reached = {slot for name, slot in zip(names, slots, strict=True) if name in live}
            if reached:
                out.add(id(step))
                graded |= reached
    return frozenset(out)
