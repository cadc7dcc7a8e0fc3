"""How long slots of a program live, and which ops may write over their input: facts of the program alone."""

from __future__ import annotations

from fourfold.plans.program import Compute, Move, Program, Step

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
