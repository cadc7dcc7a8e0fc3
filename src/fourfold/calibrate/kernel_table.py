"""Tables of measured kernel times as files: by kernel key, for one kind of device, number of busy ranks and torch version."""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.cluster import Cluster, Precision
from fourfold.cluster.cache import kernels_file, read_cached, write_cached
from fourfold.oracle.prices.prices import KernelTime, Prices

VERSION = 1
FIELDS = ("forward", "backward", "busy", "spread")
HOST_FIELDS = ("forward_host", "backward_host")
"""Those of GPUs beside them: seconds of the host to launch the kernel."""


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
    return Prices(cluster=cluster, precision=precision, kernels=load_kernels(table_name(cluster, precision)))


def table_name(cluster: Cluster, precision: Precision) -> str:
    """The name of the table with the kernels of a precision. Keys tell dtypes apart, but not whether float32 is multiplied by
    the tf32 units of a GPU."""
    name = cluster.measured.kernels
    return f"{name} tf32" if name and precision == "tf32" and cluster.device(0).kind == "gpu" else name


def add_kernels(name: str, found: Mapping[str, KernelTime]) -> None:
    """Add kernels to the table of a name; later times replace earlier ones."""
    kept = {**load_kernels(name), **found}
    host = any(any(time.host_seconds) for time in kept.values())
    fields = (*FIELDS, *HOST_FIELDS) if host else FIELDS
    rows = {key: _row(time)[: len(fields)] for key, time in sorted(kept.items())}
    unit = "seconds; busy and spread are ratios"
    write_cached(kernels_file(name), VERSION, {"about": name, "fields": list(fields), "unit": unit, "kernels": rows})


def _row(time: KernelTime) -> list[float]:
    """A time's fields, those of the host last."""
    numbers = (*(getattr(time, field) or 0.0 for field in FIELDS), *time.host_seconds)
    return [rounded(number) for number in numbers]


def _time(
    forward: float, backward: float, busy: float, spread: float, forward_host: float = 0.0, backward_host: float = 0.0
) -> KernelTime:
    host = forward_host, backward_host
    return KernelTime(forward=forward, backward=backward, busy=busy, spread=spread, host_seconds=host)


def rounded(number: float) -> float:
    """As files have it: more digits would pretend to a precision no measurement has."""
    return float(f"{number:.5g}")
