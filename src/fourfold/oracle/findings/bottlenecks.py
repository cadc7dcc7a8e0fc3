"""Where a plan's step goes: exchanges, shared links, uneven stages, the update. Each is a term of the estimate or follows from
its items; what no category shows (routing, other jobs, input data) is not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fourfold.oracle.findings.finding import (
    CONGESTION_SHARE,
    EXCHANGE_SHARE,
    IMBALANCE,
    UPDATE_SHARE,
    Finding,
    FindingContext,
    layer_of,
)
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.items import CATEGORIES, CATEGORY_LABELS, Category, Item
from fourfold.oracle.time.stage_comm import groups_along
from fourfold.plans.lists.lowered_plan import LoweredStage
from fourfold.units import bytes_text, seconds_text

Layers = dict[tuple[str, int], tuple[float, float]]
"""By layer and stage: seconds and bytes of one step."""
STATISTICS_LABEL = " statistics"


def bottlenecks(context: FindingContext) -> Iterator[Finding]:
    """Every bottleneck above its threshold, in the order of ParaDL's list."""
    for find in (gradient_exchange, layer_exchange, halo, congestion, weight_update, imbalance, bubble):
        yield from find(context)


def gradient_exchange(context: FindingContext) -> Iterator[Finding]:
    """Sums of gradients, and weights gathered under ZeRO-3."""
    layers: Layers = {}
    for part in context.parts:
        for layer, (seconds, size) in _gradients(context, part).items():
            layers[layer, part.index] = seconds, size
    yield from _exchange(
        context,
        "gradient_exchange",
        "gradient-exchange",
        layers,
        "use a larger batch, split the large layers (--strategy filter or splitbrain) or use fewer data-parallel replicas",
    )


def layer_exchange(context: FindingContext) -> Iterator[Finding]:
    """Activations gathered and summed between layers: what filter and channel splits pay, O(B sum |y|)."""
    layers = _layers(context, "layer_exchange")
    norms = sum(seconds for (layer, _), (seconds, _) in layers.items() if layer.endswith(STATISTICS_LABEL))
    remedy = "keep the mesh axis within a node, put fewer ranks on it, or split these layers by batch"
    if 2 * norms > sum(seconds for seconds, _ in layers.values()):
        remedy = "most of it sums batch-norm statistics over all ranks: use a larger batch, or a norm without batch statistics"
    yield from _exchange(context, "layer_exchange", "layer-exchange", layers, remedy)


def halo(context: FindingContext) -> Iterator[Finding]:
    """Border rows sent from rank to rank."""
    yield from _exchange(
        context,
        "halo",
        "halo-exchange",
        _layers(context, "halo"),
        "put fewer ranks on the domain axis, keep them within a node, or split another dim",
    )


def _exchange(context: FindingContext, term: Category, name: str, layers: Layers, remedy: str) -> Iterator[Finding]:
    seconds = context.estimate.breakdown[term]
    share = seconds / context.step if context.step else 0.0
    if share < EXCHANGE_SHARE or not layers:
        return
    (layer, _), (most, size) = max(layers.items(), key=lambda item: item[1])
    moved = sum(b for _, b in layers.values())
    part = f"{seconds_text(seconds)} of the {seconds_text(context.step)} step ({share:.0%})"
    yield Finding(
        name=name,
        kind="bottleneck",
        where=layer,
        text=f"{CATEGORY_LABELS[term]} takes {part} and moves {bytes_text(moved)} per rank; the largest is {layer} "
        f"({seconds_text(most)}, {bytes_text(size)}); {remedy}",
        numbers={"seconds": seconds, "share": share, "bytes": moved, "layer_seconds": most, "layer_bytes": size},
    )


def _layers(context: FindingContext, term: Category) -> Layers:
    out: Layers = {}
    for part in context.parts:
        for item, times in context.items(part):
            if item.category == term:
                key = layer_of(part, item.label), part.index
                seconds, size = out.get(key, (0.0, 0.0))
                out[key] = seconds + times * item.seconds, size + times * item.size * item.is_blocking
    return out


def _gradients(context: FindingContext, part: LoweredStage) -> dict[str, tuple[float, float]]:
    """By parameter: items that carry one, and those that carry many, told apart in proportion to bytes."""
    items = [(item, times) for item, times in context.items(part) if item.category == "gradient_exchange"]
    carried = {axes: _carried(part, axes) for axes in {item.axes for item, _ in items}}
    out: dict[str, tuple[float, float]] = {}
    for item, times in items:
        one = item.label in part.graph.values
        for name, share in {item.label: 1.0}.items() if one else carried[item.axes].items():
            seconds, size = out.get(name, (0.0, 0.0))
            out[name] = seconds + share * times * item.seconds, size + share * times * item.size * item.is_blocking
    return {layer_of(part, name): found for name, found in out.items()}


def _carried(part: LoweredStage, axes: tuple[str, ...]) -> dict[str, float]:
    """The parameters whose gradients are summed over these axes, or that are gathered over them: shares of their bytes."""
    program, coords = part.program, part.program.mesh.coords(0)
    summed = [name for name, over in program.reductions.items() if over == axes]
    moves = [m for m in program.moves() if m.kind == "parameter" and m.source in program.stored]
    names = summed + [m.source for m in moves if any(step.axes == axes for step in m.exchange.steps)]
    numel = {name: math.prod(program.stored[name].local_shape(coords)) for name in names}
    every = sum(numel.values()) or 1
    return {name: count / every for name, count in numel.items()}


def congestion(context: FindingContext) -> Iterator[Finding]:
    """Groups of one exchange that share links: what each would take if it were alone, and what it takes."""
    exposed = {term: context.exposed_share(term) for term in CATEGORIES}
    found = []
    for part in context.parts:
        for axes, items in _by_axes(context, part).items():
            groups = groups_along(part.stage.mesh, part.stage.ranks, axes)
            if len(groups) > 1:
                alone, all_at_once = ([_cost(context.prices, item, some) for item, _ in items] for some in (groups[:1], groups))
                more = [a - b for a, b in zip(all_at_once, alone, strict=True)]
                lost = [one * times * exposed[item.category] for (item, times), one in zip(items, more, strict=True)]
                factor = sum(all_at_once) / (sum(alone) or 1.0)
                found.append((sum(lost), part.index, " and ".join(axes), factor, len(groups)))
    worst = max(found, default=None)
    if worst is None or worst[0] < CONGESTION_SHARE * context.step:
        return
    lost_seconds, stage, along, times_longer, count = worst
    share = lost_seconds / context.step
    yield Finding(
        name="network-congestion",
        kind="bottleneck",
        where=f"axis {along}" + (f" of stage {stage}" if len(context.parts) > 1 else ""),
        text=f"{count} groups along mesh axis {along} communicate at the same time over shared links: their exchanges take "
        f"{times_longer:.1f} times as long as those of one group alone, which costs {seconds_text(lost_seconds)} of the "
        f"{seconds_text(context.step)} step ({share:.0%}); keep the axis with most traffic within a node, or shorten it",
        numbers={"seconds": lost_seconds, "share": share, "factor": times_longer, "groups": float(count)},
    )


def _by_axes(context: FindingContext, part: LoweredStage) -> dict[tuple[str, ...], list[tuple[Item, int]]]:
    """The exchanges of a stage by the axes of their groups, and how often a step does each."""
    out: dict[tuple[str, ...], list[tuple[Item, int]]] = {}
    for item, times in context.items(part):
        if item.is_blocking:
            out.setdefault(item.axes, []).append((item, times))
    return out


def _cost(prices: Prices, item: Item, groups: tuple[tuple[int, ...], ...]) -> float:
    pattern: Any = item.pattern
    return prices.collective(pattern, groups, item.size).seconds


def weight_update(context: FindingContext) -> Iterator[Finding]:
    """ParaDL found 11 to 13 % of the compute in the update, more with Adam."""
    update, compute = (context.estimate.breakdown[term] for term in ("update", "compute"))
    share = update / compute if compute else 0.0
    if share < UPDATE_SHARE:
        return
    yield Finding(
        name="weight-update",
        kind="bottleneck",
        where="optimizer",
        text=f"the weight update ({context.optimizer}) takes {seconds_text(update)}, {share:.0%} of the compute time "
        f"({seconds_text(compute)}); shard the optimizer state over replicas (--zero 1), use a larger batch or an optimizer "
        "with less state",
        numbers={"seconds": update, "share": share, "compute_seconds": compute},
    )


def imbalance(context: FindingContext) -> Iterator[Finding]:
    """The slowest set of ranks of a pipeline, whose stages the others wait for."""
    if len(context.lowered.places) < 2:
        return
    work = {ranks: 0.0 for ranks in context.lowered.places}
    for part, record in zip(context.parts, context.estimate.stages, strict=True):
        work[part.stage.ranks] += record["forward"] + record["backward"]
    slowest = max(work, key=lambda ranks: work[ranks])
    mean = sum(work.values()) / len(work)
    factor = work[slowest] / mean if mean else 1.0
    if factor < IMBALANCE:
        return
    stages = [part for part in context.parts if part.stage.ranks == slowest]
    names = f"stage{'s' if len(stages) > 1 else ''} {', '.join(str(part.index) for part in stages)}"
    heavy = max(((item, part) for part in stages for item, _ in context.items(part)), key=lambda pair: pair[0].seconds)
    yield Finding(
        name="workload-imbalance",
        kind="bottleneck",
        where=names,
        text=f"{names}: {seconds_text(work[slowest])} per micro-batch, {factor:.2f} times the mean over the stages "
        f"({seconds_text(mean)}); move layers to other stages (the slowest is {layer_of(heavy[1], heavy[0].label)}) or give "
        f"{'them' if len(stages) > 1 else 'it'} more ranks",
        numbers={"seconds": work[slowest], "mean_seconds": mean, "factor": factor},
    )


def bubble(context: FindingContext) -> Iterator[Finding]:
    """Waiting for other stages: while the pipeline fills and empties, for slower stages, for transfers."""
    places, count = len(context.lowered.places), context.microbatches
    waited = context.estimate.breakdown["pipeline"]
    if places < 2 or waited < EXCHANGE_SHARE * context.step:
        return
    even = (places - 1) / (count + places - 1)
    yield Finding(
        name="pipeline-bubble",
        kind="bottleneck",
        where=context.lowered.plan.schedule,
        text=f"waiting for other stages takes {seconds_text(waited)} of the {seconds_text(context.step)} step "
        f"({waited / context.step:.0%}); {places} equally fast stages with {count} micro-batches and no transfer time would "
        f"wait {even:.0%}; use more micro-batches (--microbatches) or fewer stages (--stages)",
        numbers={"seconds": waited, "share": waited / context.step, "even_share": even, "microbatches": float(count)},
    )


def compute_seconds(context: FindingContext, part: LoweredStage) -> float:
    """Seconds of a step's kernels on a stage, both ways."""
    return sum(item.seconds * times for item, times in context.items(part) if item.category == "compute")
