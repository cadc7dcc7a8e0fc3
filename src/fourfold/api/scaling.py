"""How strategies scale over numbers of devices, predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.api.planning import graph_of
from fourfold.api.settings import priced_graph, setting_of
from fourfold.cluster import Cluster
from fourfold.errors import InvalidInput
from fourfold.oracle.cost_model import Setting, strategies_of
from fourfold.oracle.scaling import Row, Study
from fourfold.plans import Options
from fourfold.plans.strategies.named import parse

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fourfold.graph.capture import Inputs, Loss
    from fourfold.workload.model_graph import ModelGraph
    from fourfold.workload.workload import Workload

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ScalingRequest:
    """Strategies on numbers of devices, each with what it is priced for; checked before a model is captured."""

    devices: tuple[int, ...]
    strategies: tuple[str, ...]
    settings: dict[int, Setting]  # that of one device too
    weak: bool
    samples: int | None
    options: Options | None

    @property
    def cells(self) -> list[tuple[int, str]]:
        return [(count, name) for count in self.devices for name in self.strategies]

    @property
    def largest(self) -> Setting:
        """What the largest number of devices is priced for."""
        return self.settings[self.devices[-1]]


@dataclass(frozen=True, kw_only=True)
class ScalingTable:
    """A predicted row for each number of devices and strategy; printed, its table."""

    model: str
    study: Study
    rows: tuple[Row, ...]
    largest: Setting

    @property
    def feasible(self) -> bool:
        """Whether any strategy fits."""
        return any(row.feasible for row in self.rows)

    def __str__(self) -> str:
        from fourfold.report.scaling import scaling_text
        from fourfold.report.text import console

        with (page := console()).capture() as text:
            page.print(scaling_text(self.study, self.rows, self.largest, model=self.model, trace=None))
        return text.get()


def simulate(
    model: str | nn.Module | Workload,
    inputs: Inputs | None = None,
    *,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    cluster: str | Cluster,
    devices: Sequence[int],
    strategies: Sequence[str] = (),
    weak: bool = False,
    batch: int | None = None,
    samples: int | None = None,
    precision: str = "fp32",
    optimizer: str = "sgd",
    cost_model: str = "fourfold",
    options: Options | None = None,
) -> ScalingTable:
    """Predict a step of each strategy (all, if none is named) on each number of devices. The batch is that of all devices or,
    with `weak`, of each; `samples` are those of an epoch. The model is named as for `plan`."""
    request = request_scaling(
        cluster,
        devices,
        strategies=strategies,
        weak=weak,
        samples=samples,
        precision=precision,
        optimizer=optimizer,
        cost_model=cost_model,
        options=options,
    )
    return scaling_table(request, graph_of(model, inputs, targets=targets, loss=loss, batch=batch))


def request_scaling(
    cluster: str | Cluster,
    devices: Sequence[int],
    *,
    strategies: Sequence[str] = (),
    weak: bool = False,
    samples: int | None = None,
    precision: str = "fp32",
    optimizer: str = "sgd",
    cost_model: str = "fourfold",
    options: Options | None = None,
) -> ScalingRequest:
    """What is to be predicted, each number of devices once, rising."""
    for name in strategies:
        parse(name)
    counts = tuple(sorted(set(devices)))
    if not counts or counts[0] < 1:
        raise InvalidInput(f"devices={list(devices)}; give numbers of devices, each at least 1")
    settings = {
        count: setting_of(cluster, count, precision=precision, optimizer=optimizer, cost_model=cost_model)
        for count in sorted({1, *counts})
    }
    names = tuple(dict.fromkeys(strategies or strategies_of(settings[1].model)))
    return ScalingRequest(devices=counts, strategies=names, settings=settings, weak=weak, samples=samples, options=options)


def scaling_table(
    request: ScalingRequest, source: ModelGraph, progress: Progress = lambda words, done, total: None
) -> ScalingTable:
    """Predict row by row."""
    study = Study(
        graph=priced_graph(source.graph, request.settings[1]),
        settings=request.settings,
        batch=source.batch,
        scaling="weak" if request.weak else "strong",
        samples=request.samples,
        options=request.options,
    )
    rows, cells = [], request.cells
    for done, (count, name) in enumerate(cells):
        progress(f"{name} on {count}", done, len(cells))
        rows.append(study.row(name, count))
    return ScalingTable(model=source.text or "the model", study=study, rows=tuple(rows), largest=request.largest)
