"""The limits and bottlenecks of a plan, named: ParaDL's list, each with the layer, the numbers and what to change.

`findings` is the door. Limits are here: memory that does not suffice, is held twice or lost to rounding; work done twice; how
far each split goes. Where the step goes is in `bottlenecks`. All follow from the program, the estimate and the peaks;
nothing is replayed again.
"""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.cluster import Cluster
from fourfold.oracle.findings.bottlenecks import bottlenecks, compute_seconds
from fourfold.oracle.findings.finding import (
    FRAGMENTED_SHARE,
    HEADROOM,
    MEMORY_SHARE,
    REPLICATED_SHARE,
    SHRINKING,
    Finding,
    FindingContext,
)
from fourfold.oracle.findings.redundancy import HeldTensor, SplitKernel, held_tensors, split_kernels
from fourfold.oracle.memory.device_rules import CUDA, LARGE, ROUND
from fourfold.oracle.memory.peak import Memory
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import Estimate
from fourfold.plans.lists.lowered_plan import LoweredPlan, LoweredStage
from fourfold.units import bytes_text, seconds_text

SMALL, SMALL_SEGMENT, MIDDLE_SEGMENT = 2**20, 2 * 2**20, 20 * 2**20
"""PyTorch's caching allocator on CUDA (c10/cuda/CUDACachingAllocator): sizes are rounded up to blocks of 512 bytes; those up to
1 MiB are cut from segments of 2 MiB, those under 10 MiB from segments of 20 MiB, larger ones are multiples of 2 MiB."""
SPLIT_WORDS = {"batch": "samples", "filter": "filters", "channel": "channels"}


def findings(
    lowered: LoweredPlan, prices: Prices, estimate: Estimate, memory: Memory, *, optimizer: str = "sgd"
) -> tuple[Finding, ...]:
    """What limits the plan and what holds it up: limits first, bottlenecks by how much of the step they take."""
    context = FindingContext(lowered=lowered, prices=prices, estimate=estimate, memory=memory, optimizer=optimizer)
    slow = sorted(bottlenecks(context), key=lambda finding: -finding.numbers["seconds"])
    return (
        *capacity(context),
        *scaling(context),
        *memory_redundancy(context),
        *fragmentation(context),
        *compute_limits(context),
        *slow,
    )


def capacity(context: FindingContext) -> Iterator[Finding]:
    """Ranks that need more than their device holds, the worst of every stage."""
    cluster = context.prices.cluster
    for place in context.lowered.places:
        peaks = [peak for peak in context.memory.peaks if peak.ranks[0] in place]
        peak = max(peaks, key=lambda peak: peak.bytes / _capacity(cluster, peak.ranks))
        holds = _capacity(cluster, peak.ranks)
        if peak.bytes > holds:
            stage = next(part for part in context.parts if part.stage.ranks == place)
            where = f"stage {stage.index}" if len(context.parts) > 1 else f"rank {peak.ranks[0]}"
            most = max(peak.parts, key=lambda kind: peak.parts[kind])
            yield Finding(
                name="memory-capacity",
                kind="limit",
                where=where,
                text=f"{where} needs {bytes_text(peak.bytes)}, the device holds {bytes_text(holds)}: the largest part is "
                f"{most} ({bytes_text(peak.parts[most])}), the peak is at {peak.op or peak.action}; {_remedy(most)}",
                numbers={"bytes": float(peak.bytes), "capacity_bytes": holds, "over_bytes": peak.bytes - holds},
            )


def _capacity(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """Bytes of the smallest device among ranks with equal shards."""
    return min(cluster.memory(rank) for rank in (ranks if len(cluster.kinds) > 1 else ranks[:1]))


def _remedy(kind: str) -> str:
    if kind in ("weights", "gradients", "optimizer", "summed gradients"):
        return "shard weights and optimizer state over replicas (--zero 3), use more stages, or split by filter over more ranks"
    return "recompute activations (--recompute), use more stages, micro-batches or ranks, or a smaller batch"


def scaling(context: FindingContext) -> Iterator[Finding]:
    """Axes whose split a layer stops: it has fewer filters, channels, rows or examples than a longer axis would need."""
    seen = set()
    for part in context.parts:
        for (axis, label), (size, layer) in _smallest_loops(part).items():
            extent = part.stage.mesh.extent(axis)
            if extent > 1 and HEADROOM * extent > size and (axis, label) not in seen:
                seen.add((axis, label))
                yield _scaling_limit(axis, label, extent, size, layer)


def _smallest_loops(part: LoweredStage) -> dict[tuple[str, str], tuple[int, str]]:
    """By axis and split: the layer with the smallest loop, those left whole because they are too thin among them."""
    anchors = [step for step in part.program.computes() if step.nest.anchor]
    labels = {(axis, label) for step in anchors for axis, label in step.labels().items()}
    out: dict[tuple[str, str], tuple[int, str]] = {}
    for step in anchors:
        mine = step.labels()
        for axis, label in labels:
            sizes = [loop.size // loop.unit // loop.outer for loop in step.nest.loops_with_label(label)]
            if sizes and mine.get(axis) in (label, "replicate"):
                out[axis, label] = min(out.get((axis, label), (max(sizes), step.op.path)), (max(sizes), step.op.path))
    return out


def _scaling_limit(axis: str, label: str, extent: int, size: int, layer: str) -> Finding:
    what = SPLIT_WORDS.get(label, f"indices in {label}")
    remedy = (
        "use a larger batch"
        if label == "batch"
        else "put more ranks on another axis instead (batch, while each rank still gets a sample)"
    )
    return Finding(
        name="scaling-limit",
        kind="limit",
        where=layer,
        text=f"mesh axis {axis} has {extent} ranks, {layer} has {size} {what}: "
        f"{'it runs in full on every rank or leaves ranks idle' if size < extent else f'at most {size} ranks can share it'}; "
        f"{remedy}",
        numbers={"limit": float(size), "ranks": float(extent)},
    )


def memory_redundancy(context: FindingContext) -> Iterator[Finding]:
    """Weights, state and activations that other ranks of a stage hold too, on the stage that has most."""
    by_stage = {part.index: _redundant_bytes(context, part) for part in context.parts if part.stage.mesh.size > 1}
    if not by_stage:
        return
    index = max(by_stage, key=lambda k: sum(by_stage[k].values()))
    part, sizes = context.parts[index], by_stage[index]
    repeated, peak = sum(sizes.values()), context.memory.of(context.parts[index].stage.ranks[0]).tensors
    if repeated < MEMORY_SHARE * peak:
        return
    most = max(sizes, key=lambda kind: sizes[kind])
    listed = ", ".join(f"{bytes_text(size)} of {kind}" for kind, size in sizes.items() if size > 0.01 * repeated)
    holder = context.stage(part)
    yield Finding(
        name="memory-redundancy",
        kind="limit",
        where=holder,
        text=f"{holder} stores {bytes_text(repeated)} that other ranks also store ({listed}), of a peak of {bytes_text(peak)}; "
        f"{_division_remedy(most)}",
        numbers={"bytes": repeated, "peak_bytes": float(peak), **{f"{kind}_bytes": size for kind, size in sizes.items()}},
    )


def _redundant_bytes(context: FindingContext, part: LoweredStage) -> dict[str, float]:
    out = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 0.0)
    for tensor in _held_tensors(context, part):
        out[tensor.kind] += tensor.repeated(part.stage.mesh.size)
    return out


def _held_tensors(context: FindingContext, part: LoweredStage) -> list[HeldTensor]:
    return held_tensors(part, context.optimizer, context.lowered.plan.timetable.in_flight(part.index), context.prices.precision)


def _division_remedy(kind: str) -> str:
    if kind == "activations":
        return "split layers by batch or domain instead of filter or channel"
    return "shard them over the replicas (--zero 1 for optimizer state, --zero 3 for weights too) or split by filter"


def fragmentation(context: FindingContext) -> Iterator[Finding]:
    """What an allocator of segments loses at least on the tensors a rank holds; holes that freed ones leave come on top."""
    peak = context.memory.heaviest
    cluster, rank = context.prices.cluster, peak.ranks[0]
    if cluster.device(rank).kind != "gpu":
        return
    sizes = [
        t.local
        for part in context.parts
        if rank in part.stage.ranks
        for t in _held_tensors(context, part)
        for _ in range(t.count)
    ]
    lost = reserved(sizes) - sum(sizes)
    holds = _capacity(cluster, peak.ranks)
    tight = peak.bytes <= holds < peak.bytes + lost
    if lost < FRAGMENTED_SHARE * peak.tensors and not tight:
        return
    room = f" on a device of {bytes_text(holds)}" if tight else ""
    yield Finding(
        name="fragmentation",
        kind="limit",
        where=f"rank {rank}",
        text=f"rank {rank} loses at least {bytes_text(lost)} to fragmentation in PyTorch's caching allocator, beside a peak of "
        f"{bytes_text(peak.bytes)}{room}; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or leave that much free",
        numbers={"bytes": lost, "peak_bytes": float(peak.bytes), "tensors": float(len(sizes))},
    )


def reserved(sizes: list[int]) -> float:
    """Bytes of segments that hold tensors of these sizes, packed as well as can be."""
    rounded = [-(-size // CUDA.granularity) * CUDA.granularity for size in sizes]
    small = sum(size for size in rounded if size <= SMALL)
    middle = sum(size for size in rounded if SMALL < size < LARGE)
    large = sum(-(-size // ROUND) * ROUND for size in rounded if size >= LARGE)
    return float(-(-small // SMALL_SEGMENT) * SMALL_SEGMENT + -(-middle // MIDDLE_SEGMENT) * MIDDLE_SEGMENT + large)


def compute_limits(context: FindingContext) -> Iterator[Finding]:
    """Split kernels that do not shrink with their ranks, and ops that all ranks of an axis do alike."""
    live = context.lowered.cut.live
    every = [
        (part, one) for part in context.parts if part.stage.mesh.size > 1 for one in split_kernels(part, context.prices, live)
    ]
    yield from _split_overhead(context, [(part, one) for part, one in every if one.split > 1])
    yield from _replicated_compute(context, [(part, one) for part, one in every if one.copies > 1])


def _split_overhead(context: FindingContext, some: list[tuple[LoweredStage, SplitKernel]]) -> Iterator[Finding]:
    taken, ideal = sum(one.local for _, one in some), sum(one.whole / one.split for _, one in some)
    if not ideal or taken < SHRINKING * ideal:
        return
    _, worst = max(some, key=lambda pair: pair[1].excess)
    yield Finding(
        name="compute-redundancy",
        kind="limit",
        where=worst.path,
        text=f"kernels split over ranks take {taken / ideal:.1f} times as long as an ideal division ({seconds_text(taken)} per "
        f"micro-batch instead of {seconds_text(ideal)}), worst at {worst.path}: {seconds_text(worst.local)} on each of "
        f"{worst.split} ranks, {seconds_text(worst.whole)} whole on one; use fewer ranks or split these layers by batch",
        numbers={
            "seconds": taken,
            "ideal_seconds": ideal,
            "factor": taken / ideal,
            "layer_factor": worst.local * worst.split / worst.whole if worst.whole else 1.0,
        },
    )


def _replicated_compute(context: FindingContext, some: list[tuple[LoweredStage, SplitKernel]]) -> Iterator[Finding]:
    wasted = context.microbatches * sum(one.repeated for _, one in some)
    whole = sum(compute_seconds(context, part) for part in context.parts)
    if not whole or wasted < REPLICATED_SHARE * whole:
        return
    _, worst = max(some, key=lambda pair: pair[1].repeated)
    yield Finding(
        name="replicated-compute",
        kind="limit",
        where=worst.path,
        text=f"{len([one for _, one in some if one.repeated])} ops are not split over every mesh axis, so ranks repeat "
        f"their work: {seconds_text(wasted)} of {seconds_text(whole)} compute ({wasted / whole:.0%}), most at {worst.path} "
        f"({seconds_text(context.microbatches * worst.repeated)}, the same on {worst.copies} ranks); split these layers "
        "(plan --fix) or put fewer ranks on the axis that does not split them",
        numbers={"seconds": wasted, "share": wasted / whole, "copies": float(worst.copies)},
    )


__all__ = ["Finding", "findings"]
