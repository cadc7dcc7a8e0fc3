"""How a model scales: a step predicted for each strategy and number of devices, row by row.

Strong scaling keeps the batch, weak scaling the batch of each device. What a strategy cannot do is a row too, with the reason.
An epoch is as many steps as its samples make, the last one counted by its share. Efficiency is against one device that takes
its batch whole, whether or not its memory would hold that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fourfold.errors import Error, InvalidInput
from fourfold.graph import Graph
from fourfold.oracle.cost_model import Forecast, Setting, forecast
from fourfold.plans import Options, lower_plan, named

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on a number of devices. `forecast` is None where the strategy cannot be used; `limits` then says why."""

    devices: int
    strategy: str
    batch: int
    forecast: Forecast | None
    limits: tuple[str, ...]
    single_device_speed: float  # samples per second
    samples: int | None  # of an epoch

    @property
    def feasible(self) -> bool:
        return self.forecast is not None and self.forecast.feasible

    @property
    def samples_per_second(self) -> float | None:
        return None if self.forecast is None else self.batch / self.forecast.step_seconds

    @property
    def efficiency(self) -> float | None:
        """Samples per second and device, in those of one device."""
        speed = self.samples_per_second
        return None if speed is None else speed / self.devices / self.single_device_speed

    @property
    def epoch_seconds(self) -> float | None:
        speed = self.samples_per_second
        return None if speed is None or self.samples is None else self.samples / speed


@dataclass(frozen=True, kw_only=True)
class Study:
    """A graph to predict on several sizes of a cluster. `settings`: by number of devices; that of one device is needed too."""

    graph: Graph
    settings: Mapping[int, Setting]
    batch: int  # of all devices or, under weak scaling, of each
    scaling: Scaling = "strong"
    samples: int | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise InvalidInput(f"--samples {self.samples}; an epoch has at least 1")
        if self.scaling == "weak" and self.graph.batch is not None:
            raise InvalidInput(
                f"the model fixes its batch at {self.graph.batch}, so it cannot grow with the devices; leave --weak out"
            )

    def batch_of(self, devices: int) -> int:
        """The batch of so many devices together."""
        return self.batch * devices if self.scaling == "weak" else self.batch

    @cached_property
    def single_device_speed(self) -> float:
        """Samples per second of one device."""
        made = named("data", self.graph, ranks=1, batch=self.batch)
        return self.batch / forecast(lower_plan(self.graph, made), self.settings[1]).step_seconds

    def row(self, strategy: str, devices: int) -> Row:
        """A strategy predicted on so many devices."""
        batch = self.batch_of(devices)
        found, limits = self._predicted(strategy, devices, batch)
        return Row(
            devices=devices,
            strategy=strategy,
            batch=batch,
            forecast=found,
            limits=limits,
            single_device_speed=self.single_device_speed,
            samples=self.samples,
        )

    def _predicted(self, strategy: str, devices: int, batch: int) -> tuple[Forecast | None, tuple[str, ...]]:
        try:
            made = named(strategy, self.graph, ranks=devices, batch=batch, options=self.options)
            found = forecast(lower_plan(self.graph, made), self.settings[devices])
            return found, found.limits
        except Error as refusal:
            return None, (str(refusal),)


def fastest(rows: Iterable[Row]) -> dict[int, Row]:
    """By number of devices, the feasible row with the shortest step; of equals the first."""
    out: dict[int, Row] = {}
    for row in rows:
        if row.feasible and (row.devices not in out or _seconds(row) < _seconds(out[row.devices])):
            out[row.devices] = row
    return out


def _seconds(row: Row) -> float:
    assert row.forecast is not None
    return row.forecast.step_seconds
