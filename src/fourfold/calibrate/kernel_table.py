"""Tables of measured kernel times as files: by kernel key, for one kind of device, number of busy ranks and torch version."""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.cluster import Cluster, Precision
from fourfold.cluster.cache import kernels_file, read_cached, write_cached
from fourfold.oracle.prices.prices import KernelTime, Prices

VERSION = 1
FIELDS = ("forward", "backward", "busy", "spread")


def load_kernels(name: str) -> dict[str, KernelTime]:
    """The table of a name; empty if nothing was measured yet, or if its file is damaged: it is then measured again."""
    if not name:
        return {}
    found = read_cached(kernels_file(name), VERSION)
    if found is None or found.get("about") != name:
        return {}
    try:
        return {key: _time(*map(float, row)) for key, row in found["kernels"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def known_prices(cluster: Cluster, precision: Precision) -> Prices:
    """Prices on a cluster by what is known of it already: its table of kernels, where it names one."""
    return Prices(cluster=cluster, precision=precision, kernels=load_kernels(cluster.measured.kernels))


def add_kernels(name: str, found: Mapping[str, KernelTime]) -> None:
    """Add kernels to the table of a name; later times replace earlier ones."""
    kept = {**load_kernels(name), **found}
    rows = {key: [rounded(getattr(time, field) or 0.0) for field in FIELDS] for key, time in sorted(kept.items())}
    unit = "seconds; busy and spread are ratios"
    write_cached(kernels_file(name), VERSION, {"about": name, "fields": list(FIELDS), "unit": unit, "kernels": rows})


def _time(forward: float, backward: float, busy: float, spread: float) -> KernelTime:
    return KernelTime(forward=forward, backward=backward, busy=busy, spread=spread)


def rounded(number: float) -> float:
    """As files have it: more digits would pretend to a precision no measurement has."""
    return float(f"{number:.5g}")
