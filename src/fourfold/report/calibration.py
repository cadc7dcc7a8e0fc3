"""A calibration for a terminal and for scripts: the measured curves of collectives, a few sizes each."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fourfold.cluster import Cluster, Curve
from fourfold.report.clusters import cluster_record
from fourfold.report.text import _table
from fourfold.units import bytes_text, flops_text, seconds_text

SHOWN = (2.0**10, 2.0**16, 2.0**20, 2.0**23)  # bytes, of those that are measured


def calibration_text(cluster: Cluster, *, file: str) -> RenderableType:
    """`calibrate`: what was measured."""
    table = _table("collective", "over", "ranks>", *(f"{bytes_text(size)}>" for size in SHOWN), "spread>")
    for curve in cluster.measured.curves:
        times = [seconds_text(_at(curve, size)) if curve.sizes[-1] >= size else "" for size in SHOWN]
        groups = f"{curve.groups} x {curve.ranks}" if curve.groups > 1 else str(curve.ranks)
        table.add_row(curve.collective, curve.level, groups, *times, f"{_spread(curve):.0%}")
    (device,) = cluster.kinds
    rate, bandwidth = f"{flops_text(dict(device.rates)['fp32'])}/s", f"{device.bandwidth / 1e9:.3g} GB/s"
    who = "each GPU" if device.kind == "gpu" else f"{device.cores} cores a host, together"
    if device.kind == "gpu" and device.cores:
        who = f"{device.cores} shared GPU{'s' if device.cores > 1 else ''}, together"
    head = f"{cluster.name}: {cluster.about}; {who} {rate} and {bandwidth}"
    return Group(Text(head), table, Text(f"written to {file}"))


def calibration_record(cluster: Cluster, *, file: str) -> dict[str, Any]:
    """`calibrate --json`, in SI units."""
    curves = [
        {
            "collective": curve.collective,
            "level": curve.level,
            "ranks": curve.ranks,
            "groups": curve.groups,
            "sizes": list(curve.sizes),
            "seconds": list(curve.seconds),
            "spreads": list(curve.spreads),
        }
        for curve in cluster.measured.curves
    ]
    return {**cluster_record(cluster), "curves": curves, "kernels": cluster.measured.kernels, "file": file}


def _at(curve: Curve, size: float) -> float:
    """The time at the measured size nearest above."""
    return next(seconds for known, seconds in zip(curve.sizes, curve.seconds, strict=True) if known >= size)


def _spread(curve: Curve) -> float:
    """The middle one of the spreads, relative."""
    ratios = sorted(spread / seconds for spread, seconds in zip(curve.spreads, curve.seconds, strict=True))
    return ratios[len(ratios) // 2]
