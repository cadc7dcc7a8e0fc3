"""ParaDL's own formulas (arXiv 2104.09075, table of strategies), as a second cost model beside the replay.

Symbols, of a layer l: FW, BW seconds of forward and backward of one sample on one device; WU seconds of its weight update; |w|
the number of its weights, |x|, |y| those of inputs and outputs of one sample; halo(x), halo(dy) the numbers in the border
rows of one side and one sample. K = sum (FW + BW), U = sum WU, W = sum |w|, A = sum (|x| + |y|). Of a run: B samples in a
batch, D in an epoch, p devices, p1 of them by data and p2 by model where there are two axes, S segments (micro-batches),
delta bytes of a number, alpha seconds of a message and beta seconds per byte of the links that a group uses, with
contention where groups share them.

All formulas are in proportion to D/B: each function gives one step, the epoch's time divided by D/B.

Wrong by its own account: compute is divided ideally by p, memory knows no reuse of buffers, all layers are split alike,
reading data costs nothing. Further: nothing overlaps, devices are of one kind, ZeRO and recomputation do not exist and are
refused. It stands here to be compared with; Fourfold's own estimate replays what runs.

`project` takes the formulas' bare inputs; `projection.inputs_of` makes them from a graph, a plan and a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fourfold.errors import InvalidInput
from fourfold.oracle.paradl.layers import Layer
from fourfold.oracle.prices.prices import Source
from fourfold.oracle.time.items import CATEGORIES, Category
from fourfold.units import bytes_text


@dataclass(frozen=True, slots=True)
class Wire:
    """What a group's links are: alpha, seconds of a message, and beta, seconds per byte."""

    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything the formulas read. Groups: `whole` all p devices, `data` the p1 replicas, `model` the p2 parts of one."""

    layers: tuple[Layer, ...]
    batch: int
    p1: int = 1
    p2: int = 1
    delta: int = 4
    whole: Wire = Wire()
    data: Wire = Wire()
    model: Wire = Wire()
    segments: int = 1
    groups: tuple[tuple[Layer, ...], ...] = ()  # the layers of each pipeline stage

    @property
    def p(self) -> int:
        return self.p1 * self.p2

    @property
    def work(self) -> float:
        """K, seconds per sample."""
        return sum(layer.forward + layer.backward for layer in self.layers)

    @property
    def update(self) -> float:
        """U, seconds per step."""
        return sum(layer.update for layer in self.layers)

    @property
    def weights(self) -> int:
        """W."""
        return sum(layer.weights for layer in self.layers)

    @property
    def activations(self) -> float:
        """A, numbers per sample."""
        return sum(layer.inputs + layer.outputs for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """What ParaDL predicts for a strategy, with the fields that reports read of a `Prediction`.

    `breakdown`: seconds of one step; under pipelines the bubble is part of compute.
    """

    interval: ClassVar[None] = None
    timeline: ClassVar[None] = None
    places: ClassVar[tuple[tuple[int, ...], ...]] = ()
    stage_peaks: ClassVar[tuple[int, ...]] = ()
    known_from: ClassVar[Mapping[Source, float]] = {}

    strategy: str
    devices: int
    batch: int
    breakdown: Mapping[Category, float]
    memory_bytes: float  # per device
    limit: float  # most devices the strategy can use
    limited_by: str  # a layer, or what else
    capacity_bytes: float = math.inf
    notes: tuple[str, ...] = ()  # of the plan

    @property
    def step_seconds(self) -> float:
        return sum(self.breakdown.values())

    @property
    def compute_seconds(self) -> float:
        """Of one step, the update included, as ParaDL counts it."""
        return self.breakdown["compute"] + self.breakdown["update"]

    @property
    def communication_seconds(self) -> float:
        return self.step_seconds - self.compute_seconds

    @property
    def feasible(self) -> bool:
        return self.devices <= self.limit and self.memory_bytes <= self.capacity_bytes

    @property
    def peak_bytes(self) -> int:
        return int(self.memory_bytes)

    @property
    def limits(self) -> tuple[str, ...]:
        """What stops the strategy, and the plan's notes."""
        return (*self._stops(), *self.notes)

    def _stops(self) -> Iterator[str]:
        if self.memory_bytes > self.capacity_bytes:
            yield (
                f"by ParaDL's formulas a device needs {bytes_text(self.memory_bytes)}, it holds "
                f"{bytes_text(self.capacity_bytes)}; use more devices or a smaller batch"
            )
        if self.devices > self.limit:
            yield (
                f"by ParaDL's formulas {self.strategy} goes to {self.limit:g} devices ({self.limited_by}), {self.devices} "
                "are asked for; use fewer or another strategy"
            )

    def epoch_seconds(self, samples: float) -> float:
        """Of D samples: D/B steps, the last one by its share."""
        return self.step_seconds * samples / self.batch


Terms = tuple[dict[Category, float], float]
"""Seconds of one step by kind, and bytes of a device."""


def grid(given: Inputs) -> Terms:
    """The rows serial, data, filter, channel and data+filter: batch over p1, filters or channels over p2.

    Compute D K/p + D/(B p2) U. Activations 3 (D/B)(p2-1) sum_l (alpha + B |y_l| delta beta/p): outputs gathered forward,
    gradients of inputs all-reduced backward, over the layers that are split. Gradients 2 (D/B)(p1-1)(alpha + W delta beta/p),
    a ring. Memory 2 delta (B A/p1 + W/p2), once for values and once for gradients.

    Wrong where split kernels do not shrink with p2 (measured 290 to 220 ms from 2 to 64 devices, by ParaDL itself), and where
    small layers run whole; too high where exchanges overlap with compute.
    """
    b, delta, p1, p2, p = given.batch, given.delta, given.p1, given.p2, given.p
    split = sum(given.model.alpha + b * layer.outputs * delta * given.model.beta / p for layer in given.layers if layer.split)
    terms: dict[Category, float] = {
        "compute": b * given.work / p,
        "update": given.update / p2,
        "layer_exchange": 3 * (p2 - 1) * split,
        "gradient_exchange": 2 * (p1 - 1) * (given.data.alpha + given.weights * delta * given.data.beta / p),
    }
    return terms, 2 * delta * (b * given.activations / p1 + given.weights / p2)


def spatial(given: Inputs) -> Terms:
    """The row spatial, and data+spatial: batch over p1, the domain over p2.

    Compute D K/p + (D/B) U. Gradients 2 (D/B)(p-1)(alpha + W delta beta/p) over all devices, each of which has all weights.
    Halos 2 (D/B) sum_l (2 alpha + (B/p1)(halo(x_l) + halo(dy_l)) delta beta): values forward and gradients backward, to
    either side. Memory 2 delta (B A/p + W). The paper's table has p1 = 1; data+spatial is its rows spatial and data composed.

    Wrong where both sides are sent at once (too high), where a layer has fewer rows than devices, and at the head: the
    gather before fully-connected layers is left out.
    """
    b, delta, p = given.batch, given.delta, given.p
    wire = given.model
    halos = sum(
        2 * wire.alpha + b / given.p1 * (layer.halo_inputs + layer.halo_outputs) * delta * wire.beta
        for layer in given.layers
        if layer.halo_inputs or layer.halo_outputs
    )
    terms: dict[Category, float] = {
        "compute": b * given.work / p,
        "update": given.update,
        "halo": 2 * halos if given.p2 > 1 else 0.0,
        "gradient_exchange": 2 * (p - 1) * (given.whole.alpha + given.weights * delta * given.whole.beta / p),
    }
    return terms, 2 * delta * (b * given.activations / p + given.weights)


def pipeline(given: Inputs) -> Terms:
    """The row pipeline: p stages G_i, S segments.

    Compute D (p+S-1)/S (max FW_Gi + max BW_Gi) + (D/B) max WU_Gi; communication
    2 D (p+S-2)/B max (alpha + (B/S) |y_Gi| delta beta), y_Gi what stage i gives the next; memory
    2 delta max_i sum (B (|x_l| + |y_l|) + |w_l|): all segments are held, as GPipe does.

    Wrong (high) for schedules that hold fewer segments, and where transfers overlap; skip connections over several stages
    are not counted.
    """
    b, delta, stages, segments = given.batch, given.delta, len(given.groups), given.segments
    forward, backward, update = (
        max(sum(getattr(layer, what) for layer in group) for group in given.groups)
        for what in ("forward", "backward", "update")
    )
    borders = [group[-1].outputs for group in given.groups[:-1] if group]
    message = max((given.whole.alpha + b / segments * y * delta * given.whole.beta for y in borders), default=0.0)
    terms: dict[Category, float] = {
        "compute": b * (stages + segments - 1) / segments * (forward + backward),
        "update": update,
        "pipeline": 2 * (stages + segments - 2) * message,
    }
    held = [sum(b * (layer.inputs + layer.outputs) + layer.weights for layer in group) for group in given.groups]
    return terms, 2 * delta * max(held)


FORMULAS: dict[str, Callable[[Inputs], Terms]] = {
    "serial": grid,
    "data": grid,
    "filter": grid,
    "channel": grid,
    "data+filter": grid,
    "data+channel": grid,
    "spatial": spatial,
    "data+spatial": spatial,
    "pipeline": pipeline,
}


def limit_of(strategy: str, given: Inputs) -> tuple[float, str]:
    """The most devices: p <= B, min F_l, min C_l, min W_l H_l, the number of layers; of two axes, the product.

    min C_l leaves the first layer out, which has the input's few channels: ParaDL ran ResNet-50 by channel on 64.
    """
    if strategy == "serial":
        return 1, "one device"
    if strategy == "data":
        return given.batch, "the batch"
    if strategy == "pipeline":
        return len(given.layers), "the number of layers"
    size, layer = _smallest(given.layers, strategy.removeprefix("data+"))
    return (size * given.batch if strategy.startswith("data+") else size), layer


def _smallest(layers: tuple[Layer, ...], inside: str) -> tuple[float, str]:
    sizes = {"filter": "filters", "channel": "channels", "spatial": "places"}
    found = [(getattr(layer, sizes[inside]), layer.path) for layer in layers if getattr(layer, sizes[inside])]
    found = found[1:] if inside == "channel" else found
    return min(found, default=(0, "no layer that it splits"))


def project(strategy: str, given: Inputs, *, capacity: float = math.inf) -> Projection:
    """A strategy by ParaDL's formulas."""
    if strategy not in FORMULAS:
        raise InvalidInput(f"ParaDL's cost model has no strategy '{strategy}'; it has {', '.join(FORMULAS)}")
    terms, size = FORMULAS[strategy](given)
    limit, layer = limit_of(strategy, given)
    devices = len(given.groups) if strategy == "pipeline" else given.p
    return Projection(
        strategy=strategy,
        devices=devices,
        batch=given.batch,
        breakdown={term: terms.get(term, 0.0) for term in CATEGORIES},
        memory_bytes=size,
        limit=limit,
        limited_by=layer,
        capacity_bytes=capacity,
    )
