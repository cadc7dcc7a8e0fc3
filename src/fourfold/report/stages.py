"""What each stage of a pipeline holds and sends, and its schedule as lines to read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.graph.spec import ITEM_BYTES
from fourfold.plans import Layout, LoweredPlan, Plan
from fourfold.plans.lists.lowered_plan import LoweredStage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage in numbers."""

    in_flight: int  # the most micro-batches between forward and backward
    parameter_bytes: int  # parameters and buffers that one rank stores: of each its largest part
    sent_bytes: int  # what other stages take of the forward of one micro-batch, the largest one
    flops: int  # forward, of one micro-batch on all ranks


def stage_facts(lowered: LoweredPlan) -> tuple[StageFacts, ...]:
    """The facts of every stage, in order."""
    return tuple(
        StageFacts(
            in_flight=lowered.plan.timetable.in_flight(part.index),
            parameter_bytes=_parameter_bytes(part),
            sent_bytes=_sent_bytes(lowered, part.index),
            flops=sum(compute.nest.flops for compute in part.program.computes()),
        )
        for part in lowered.parts
    )


def _parameter_bytes(part: LoweredStage) -> int:
    program = part.program
    found = [
        (program.stored[p.name], program.graph.values[p.name].dtype) for p in part.graph.parameters if p.name in program.stored
    ]
    return sum(_largest(layout) * ITEM_BYTES[dtype] for layout, dtype in found)


def _largest(layout: Layout) -> int:
    return math.prod(max(len(indices) for indices in own.sets) for own in layout.dims)


def _sent_bytes(lowered: LoweredPlan, stage: int) -> int:
    """Every rank of a reading stage takes what it needs once."""
    size, total = lowered.plan.sizes[0], 0
    for crossing in (c for c in lowered.crossings if c.source == stage):
        reader = lowered.parts[crossing.target]
        layout, mesh = reader.slot_layout(crossing.value, size), reader.stage.mesh
        each = [math.prod(layout.local_shape(mesh.coords(rank))) for rank in range(mesh.size)]
        total += sum(each) * ITEM_BYTES[reader.graph.values[crossing.value].dtype]
    return total


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`3`, `0-3`, or all of them where they are not in a row."""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def options_text(plan: Plan) -> str:
    """Micro-batches, schedule and memory options, or nothing where a plan has none of them."""
    words = []
    if plan.stages or plan.microbatches > 1:
        sizes = f"of {plan.sizes[0]}" if len(set(plan.sizes)) == 1 else f"of {plan.sizes[0]} and {plan.sizes[-1]}"
        count = "1 micro-batch" if plan.microbatches == 1 else f"{plan.microbatches} micro-batches"
        words += [f"{count} {sizes}", f"schedule {plan.schedule}"]
    if plan.recompute:
        words.append(f"{len(plan.recompute)} segments recomputed")
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}")
    return ", ".join(words)


def schedule_lines(plan: Plan, width: int) -> list[str]:
    """A line of actions for each set of ranks; where they do not fit, the first ones and dots."""
    places = list(dict.fromkeys(stage.ranks for stage in plan.parts))
    heads = [f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}" for ranks in places]
    rows = [[str(action) for action in row] for row in plan.timetable.rows]
    cell = max(len(action) for row in rows for action in row) + 1
    room = width - max(map(len, heads)) - 4
    fits = max(map(len, rows)) * cell - 1 <= room
    shown = max(map(len, rows)) if fits else max((room - 3) // cell, 1)
    return [
        f"  {head:<{max(map(len, heads))}}  " + "".join(f"{a:<{cell}}" for a in row[:shown]).rstrip() + ("" if fits else " ...")
        for head, row in zip(heads, rows, strict=True)
    ]
