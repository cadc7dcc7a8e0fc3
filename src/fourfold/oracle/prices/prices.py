"""Seconds of kernels, collectives and updates on a cluster, from the best source there is: measured for this very shape, else
fitted to kernels measured on such devices, else the roofline.

Roofline: ``launch + max(flops / rate, bytes / bandwidth)``, seconds; the rate and bandwidth are those of one rank: on a
shared processor, of the threads it has. It is too low: no kernel reaches either limit (Williams et al. 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from fourfold.cluster import Cluster, Collective, Device, Precision
from fourfold.optimizers import OPTIMIZERS
from fourfold.oracle.prices.collectives import FREE, Cost, collective_cost, measured_cost, waiting
from fourfold.oracle.prices.efficiency import Efficiency, format_of, shipped_efficiency
from fourfold.oracle.prices.kernels import Kernel
from fourfold.oracle.prices.traffic import Traffic, traffic
from fourfold.plans.spec.placement import Placement

Source = Literal["measured", "fitted", "roofline"]
SOURCES: tuple[Source, ...] = get_args(Source)
UNKNOWN_SPREAD = {"measured": 0.05, "fitted": 0.15, "roofline": 0.4}
"""Relative uncertainty of a time by where it comes from, where none was recorded: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Seconds of a kernel's forward and backward on one rank alone, and the factor when all ranks of a node are busy."""

    forward: float
    backward: float
    busy: float = 1.0
    spread: float | None = None  # relative, between quartiles
    source: Source = "measured"
    host_seconds: tuple[float, float] = (0.0, 0.0)  # of the host, to launch forward and backward


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A cluster with the tables at hand. `kernels`: measured times by kernel key. `efficiencies`: by kind of device, where not
    what comes with Fourfold."""

    cluster: Cluster
    precision: Precision = "fp32"
    kernels: Mapping[str, KernelTime] = field(default_factory=dict)
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    _traffic: dict[tuple[tuple[int, ...], ...], Traffic] = field(default_factory=dict, compare=False)
    _times: dict[tuple[Kernel, str, float], KernelTime] = field(default_factory=dict, init=False, repr=False, compare=False)

    def on(self, cluster: Cluster) -> Prices:
        """The same tables on another cluster."""
        return replace(self, cluster=cluster, _traffic={})

    def kernel(self, kernel: Kernel, rank: int) -> KernelTime:
        """The time of a kernel on a rank's device; layers repeat, and each is looked up once."""
        key = kernel, self.cluster.device(rank).name, self.share(rank)
        if key not in self._times:
            self._times[key] = self._kernel(kernel, rank)
        return self._times[key]

    def _kernel(self, kernel: Kernel, rank: int) -> KernelTime:
        device = self.cluster.device(rank)
        found = self.kernels.get(kernel.key) or self._fitted(kernel, device, self.share(rank))
        if found is not None:
            return self._with_host_seconds(found, kernel, device)
        forward = self._roofline(kernel, kernel.flops, kernel.moved, device, rank)
        backward = self._roofline(kernel, kernel.backward_flops, kernel.backward_moved, device, rank)
        return KernelTime(forward=forward, backward=backward, source="roofline")

    def _with_host_seconds(self, found: KernelTime, kernel: Kernel, device: Device) -> KernelTime:
        """With the host's launch seconds, where they are known: a GPU and the host that fills its queue work at once. Those
        that were measured with the kernel stay."""
        known = self._efficiency(device)
        if known is None or kernel.empty or any(found.host_seconds):
            return found
        return replace(found, host_seconds=(known.host_seconds(kernel, "forward"), known.host_seconds(kernel, "backward")))

    def _fitted(self, kernel: Kernel, device: Device, share: float) -> KernelTime | None:
        """By the kernels measured on such devices that come with Fourfold; on a rank's share of what its node has of them."""
        known = self._efficiency(device)
        if known is None or kernel.empty:
            return None
        rate, bandwidth = share * device.rate(format_of(kernel, self.precision)), share * device.bandwidth
        forward = known.seconds(kernel, "forward", precision=self.precision, rate=rate, bandwidth=bandwidth)
        backward = known.seconds(kernel, "backward", precision=self.precision, rate=rate, bandwidth=bandwidth)
        if forward is None or backward is None:
            return None
        return KernelTime(forward=forward, backward=backward, source="fitted")

    def _efficiency(self, device: Device) -> Efficiency | None:
        return self.efficiencies.get(device.name) or shipped_efficiency(device.name)

    def _roofline(self, kernel: Kernel, flops: float, moved: float, device: Device, rank: int) -> float:
        if not moved or kernel.empty:
            return 0.0
        share = self.share(rank)
        precision: Precision = "fp64" if kernel.results[0].dtype == "float64" else self.precision
        return device.launch + max(flops / (device.rate(precision) * share), moved / (device.bandwidth * share))

    def copying(self, moved: float, rank: int) -> float:
        """Seconds for so many bytes read or written by one rank in its memory."""
        return moved / (self.cluster.device(rank).bandwidth * self.share(rank))

    @cached_property
    def placement(self) -> Placement:
        """Where the cluster's ranks run: a node is a host."""
        hosts, devices = zip(*self.cluster.places, strict=True)
        return Placement(hosts=hosts, devices=devices)

    def share(self, rank: int) -> float:
        """The part of its device a rank computes with: on a processor, its threads; taking turns on cores is the replay's."""
        cores = self.cluster.device(rank).cores
        return max(1, cores // self.cluster.ranks_per_device(rank)) / cores if cores else 1.0

    def collective(self, kind: Collective, groups: tuple[tuple[int, ...], ...], size: float) -> Cost:
        """The time of a collective of several groups at once; `size` in bytes as `cluster.Curve` says."""
        if size <= 0 or all(len(group) == 1 for group in groups):
            return FREE
        return collective_cost(self.cluster, self._between(groups), kind, size)

    def measured(self, kind: Collective, groups: tuple[tuple[int, ...], ...], size: float) -> Cost | None:
        """The same where it was measured."""
        return measured_cost(self.cluster, self._between(groups), kind, size)

    def waiting(self, groups: tuple[tuple[int, ...], ...], computing: float) -> float:
        """Seconds by which exchanges of these groups take longer after so much computing than those that were measured."""
        return waiting(self.cluster, self._between(groups), computing)

    def _between(self, groups: tuple[tuple[int, ...], ...]) -> Traffic:
        if groups not in self._traffic:
            self._traffic[groups] = traffic(self.cluster, groups)
        return self._traffic[groups]

    def update(self, optimizer: str, size: float, rank: int) -> float:
        """Seconds to update parameters of so many bytes: measured, or as many passes over memory as it takes."""
        device = self.cluster.device(rank)
        speed = dict(device.updates).get(optimizer)
        return size / (speed or device.bandwidth * self.share(rank) / OPTIMIZERS[optimizer].passes)
