"""What a prediction is made for: a cluster, a precision, an optimizer and a cost model, checked by name."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from fourfold.cluster import LOCAL, Cluster, cluster_named
from fourfold.errors import InvalidInput, nearest

if TYPE_CHECKING:
    from fourfold.graph import Graph
    from fourfold.oracle.cost_model import Setting

Name = TypeVar("Name", bound=str)

__all__ = ["LOCAL", "cluster_of", "default_cluster", "freeze_gc", "one_of", "priced_graph", "setting_of"]


def setting_of(
    cluster: str | Cluster, devices: int, *, precision: str = "fp32", optimizer: str = "sgd", cost_model: str = "fourfold"
) -> Setting:
    """What a plan for so many devices is predicted for; refuses unknown names and a cluster that is too small."""
    from fourfold.calibrate.kernel_table import known_prices
    from fourfold.cluster.parts import PRECISIONS
    from fourfold.graph.spec import check_precision
    from fourfold.optimizers import OPTIMIZERS
    from fourfold.oracle.cost_model import COST_MODELS, Setting

    if devices < 1:
        raise InvalidInput(f"{devices} ranks asked for; use at least 1")
    prices = known_prices(cluster_of(cluster, devices), one_of("precision", precision, PRECISIONS))
    for kind, _ in prices.cluster.runs_in_use():
        kind.rate(prices.precision)  # refuses what the device has no rate for
        check_precision(prices.precision, kind.kind)
    model = one_of("cost model", cost_model, COST_MODELS)
    return Setting(prices=prices, optimizer=one_of("optimizer", optimizer, tuple(OPTIMIZERS)), model=model)


def cluster_of(cluster: str | Cluster, devices: int) -> Cluster:
    """A preset, a TOML file, ``local`` or a `Cluster`, with so many devices in use."""
    return cluster.with_size(devices) if isinstance(cluster, Cluster) else cluster_named(cluster, devices=devices)


def default_cluster(devices: int) -> str | None:
    """This machine, unless so many devices are surely not meant for it."""
    from fourfold.cluster.local import may_run_locally

    return LOCAL if may_run_locally(devices) else None


def priced_graph(graph: Graph, setting: Setting) -> Graph:
    """The graph that is priced: in bf16, the one with autocast's casts as ops. ParaDL's formulas know no casts."""
    if setting.model != "fourfold" or setting.prices.precision != "bf16":
        return graph
    from fourfold.graph.autocast import as_computed

    return as_computed(graph, setting.prices.precision, setting.cluster.device(0).kind)


def one_of(what: str, text: str, known: Sequence[Name]) -> Name:
    """The text as one of the known names."""
    for name in known:
        if text == name:
            return name
    raise InvalidInput(f"unknown {what} '{text}'{nearest(text, known)}; known: {', '.join(known)}")


def freeze_gc() -> None:
    """Keep the garbage collector from scanning torch and a captured graph for every plan; without it that took a third of
    an estimate on a thousand devices. For a process that ends with the command: frozen objects are never freed."""
    gc.collect()
    gc.freeze()
