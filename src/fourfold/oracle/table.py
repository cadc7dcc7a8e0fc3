"""Tables of measured kernel times as files: by kernel key, for one kind of device, number of busy ranks and torch version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fourfold.cluster import Cluster, Precision
from fourfold.cluster.cache import kernels_file, read_json, write_whole
from fourfold.errors import InvalidInput
from fourfold.oracle.prices import KernelTime, Prices

FIELDS = ("forward", "backward", "busy", "spread")


def load_kernels(name: str) -> dict[str, KernelTime]:
    """The table of a name; empty if nothing was measured yet."""
    if not name:
        return {}
    path = kernels_file(name)
    try:
        rows = read_json(path).get("kernels", {})
        return {key: _time(*map(float, row)) for key, row in rows.items()}
    except (TypeError, ValueError, AttributeError):
        raise InvalidInput(f"{path}: is no table of kernels; delete it, it will be measured again") from None


def known_prices(cluster: Cluster, precision: Precision) -> Prices:
    """Prices on a cluster by what is known of it already: its table of kernels, where it names one."""
    return Prices(cluster=cluster, precision=precision, kernels=load_kernels(cluster.measured.kernels))


def add_kernels(name: str, found: Mapping[str, KernelTime]) -> None:
    """Add kernels to the table of a name; later times replace earlier ones."""
    kept = {**load_kernels(name), **found}
    rows = {key: [rounded(getattr(time, field) or 0.0) for field in FIELDS] for key, time in sorted(kept.items())}
    data: dict[str, Any] = {"about": name, "fields": FIELDS, "unit": "seconds; busy and spread are ratios", "kernels": rows}
    write_whole(kernels_file(name), json.dumps(data, indent=0))


def _time(forward: float, backward: float, busy: float, spread: float) -> KernelTime:
    return KernelTime(forward=forward, backward=backward, busy=busy, spread=spread)


def rounded(number: float) -> float:
    """As files have it: more digits would pretend to a precision no measurement has."""
    return float(f"{number:.5g}")
