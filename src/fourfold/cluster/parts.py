"""What a cluster is made of: kinds of devices, runs of nodes, levels of links, and where their numbers come from.

Everything is SI: bytes, seconds, FLOP/s. Each value is valid once constructed; how the parts fit is the cluster's concern.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fourfold.errors import InvalidInput

Precision = Literal["fp64", "fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Kind = Literal["gpu", "cpu", "fpga"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where numbers come from: one text for a group of them, and one for each that differs."""

    whole: str = ""
    single: tuple[tuple[str, str], ...] = ()  # quantity, text

    def of(self, quantity: str) -> str:
        """The source of one quantity (`memory`, `rate_fp32`...), or nothing if it was not stated."""
        return dict(self.single).get(quantity, self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device. Where `cores` is not 0 it is a processor that all ranks of a node share: its memory, rates and
    bandwidth are then those of the whole node."""

    name: str
    kind: Kind
    memory: float  # bytes
    bandwidth: float  # bytes/s between memory and arithmetic units
    rates: tuple[tuple[Precision, float], ...]  # peak FLOP/s
    launch: float = 0.0  # seconds from asking for a kernel until it runs, however small it is
    asynchronous: bool = False  # transfers stream under compute (FPGA)
    cores: int = 0
    on_chip: float = 0.0  # bytes next to the arithmetic units, where a stage's weights may stay (FPGA)
    updates: tuple[tuple[str, float], ...] = ()  # optimizer, bytes/s of parameters that one rank updates with it
    drift: float = 0.0  # how far the same computing strays from one time to another, relative; 0 if not measured
    pace: float = 0.0  # seconds of a fixed piece of work, with which times taken at other moments compare; 0 if not measured
    sources: Sources = Sources()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"device {self.name!r} is of kind {self.kind!r}; kinds are {', '.join(KINDS)}")
        amounts = {
            "memory": self.memory,
            "bandwidth": self.bandwidth,
            **{f"rate_{p}": rate for p, rate in self.rates},
            **{f"update_{name}": speed for name, speed in self.updates},
        }
        _check_positive(f"device {self.name!r}", amounts)
        _check_not_negative(
            f"device {self.name!r}",
            {"launch": self.launch, "cores": self.cores, "on_chip": self.on_chip, "drift": self.drift, "pace": self.pace},
        )
        if not self.rates:
            raise InvalidInput(f"device {self.name!r} has no rate; give at least rate_fp32")

    def rate(self, precision: Precision) -> float:
        """Peak FLOP/s. Hardware without tf32 computes in fp32 when asked for it; other gaps are refused."""
        found = dict(self.rates)
        rate = found.get(precision, found.get("fp32") if precision == "tf32" else None)
        if rate is None:
            known = ", ".join(p for p, _ in self.rates)
            text = f"device {self.name!r} has no rate for {precision}, only for {known}"
            raise InvalidInput(f"{text}; choose one of these or describe rate_{precision}")
        return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A run of equal nodes. On nodes of processors, `devices` is how many ranks share one."""

    count: int
    device: str
    devices: int
    sources: Sources = Sources()

    def __post_init__(self) -> None:
        _check_positive(f"nodes of {self.device!r}", {"count": self.count, "devices": self.devices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level: what joins the devices of one unit. The unit is so many `devices` of a node, so many `nodes`, or, if both
    are 0, everything."""

    name: str
    devices: int = 0
    nodes: int = 0
    latency: float  # seconds of a small message whose way reaches up to this level, all in all
    bandwidth: float  # bytes/s of one link in one direction
    shared_by: int = 1  # ranks that share one such link on the way out of a unit of the level below
    oversubscription: float = 1.0  # by how much those links together exceed what this level carries
    sources: Sources = Sources()

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        _check_positive(where, {"bandwidth": self.bandwidth, "shared_by": self.shared_by})
        _check_not_negative(where, {"latency": self.latency, "devices": self.devices, "nodes": self.nodes})
        if not 1 <= self.oversubscription < math.inf:
            raise InvalidInput(f"{where}: oversubscription is {self.oversubscription:g}, at least 1 is needed (1 = none)")
        if self.devices and self.nodes:
            raise InvalidInput(f"{where} joins {self.devices} devices and {self.nodes} nodes; say one of them")


def _check_positive(what: str, amounts: dict[str, float]) -> None:
    for name, amount in amounts.items():
        if not 0 < amount < math.inf:
            raise InvalidInput(f"{what}: {name} is {amount:g}, it must be positive")


def _check_not_negative(what: str, amounts: dict[str, float]) -> None:
    for name, amount in amounts.items():
        if not 0 <= amount < math.inf:
            raise InvalidInput(f"{what}: {name} is {amount:g}, it must not be negative")
