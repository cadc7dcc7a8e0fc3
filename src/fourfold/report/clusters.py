"""Clusters for a terminal and for scripts: one line each, or one with every number and its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fourfold.cluster import Cluster, Device, Link, Sources
from fourfold.report.text import _table
from fourfold.units import bytes_text, flops_text, seconds_text

GIGA, TERA = 1e9, 1e12


def clusters_text(clusters: Iterable[Cluster]) -> RenderableType:
    """`clusters`: what is built in."""
    table = _table("cluster", "devices>", "per node>", "device", "memory>", "fp32 TFLOP/s>", "links, GB/s each way")
    for cluster in clusters:
        kinds = [(run, kind) for run in cluster.nodes for kind in cluster.kinds if kind.name == run.device]
        for row, (run, kind) in enumerate(kinds):
            name, size = (cluster.name, str(cluster.capacity)) if row == 0 else ("", "")
            links = ", ".join(f"{link.name} {link.bandwidth / GIGA:.3g}" for link in cluster.links) if row == 0 else ""
            table.add_row(name, size, str(run.devices), kind.name, bytes_text(kind.memory), _rate_text(kind), links)
    return table


def cluster_text(cluster: Cluster) -> RenderableType:
    """`clusters NAME`: every number and where it comes from."""
    table = _table("part", "quantity", "value>", "source")
    for part, rows in _parts(cluster):
        for index, (quantity, value, source) in enumerate(rows):
            same = index > 0 and source == rows[index - 1][2]
            table.add_row(part if index == 0 else "", quantity, value, "as above" if same else source or "not stated")
        table.add_section()
    head = f"{cluster.name}: {cluster.about}" if cluster.about else cluster.name
    size = f"{_count(cluster.capacity, 'device')} on {_count(cluster.node_count, 'node')}"
    curves = len(cluster.measured.curves)
    measured = f"{curves} measured curves of collectives" if curves else "collectives not measured"
    return Group(Text(head), table, Text(f"{size}; {measured}"))


def cluster_record(cluster: Cluster) -> dict[str, Any]:
    """A cluster for scripts, in SI units."""
    return {
        "name": cluster.name,
        "about": cluster.about,
        "devices": cluster.capacity,
        "device_kinds": [_device_record(kind) for kind in cluster.kinds],
        "nodes": [
            {"count": run.count, "device": run.device, "devices_per_node": run.devices, "sources": _sources_record(run.sources)}
            for run in cluster.nodes
        ],
        "links": [_link_record(link) for link in cluster.links],
        "measured_curves": len(cluster.measured.curves),
    }


def _device_record(kind: Device) -> dict[str, Any]:
    return {
        "name": kind.name,
        "kind": kind.kind,
        "memory_bytes": kind.memory,
        "bandwidth_bytes_per_second": kind.bandwidth,
        "flops_per_second": dict(kind.rates),
        "launch_seconds": kind.launch,
        "asynchronous": kind.asynchronous,
        "cores": kind.cores,
        "on_chip_bytes": kind.on_chip,
        "sources": _sources_record(kind.sources),
    }


def _link_record(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "joins_devices": link.devices or None,
        "joins_nodes": link.nodes or None,
        "latency_seconds": link.latency,
        "bandwidth_bytes_per_second": link.bandwidth,
        "shared_by": link.shared_by,
        "oversubscription": link.oversubscription,
        "sources": _sources_record(link.sources),
    }


def _sources_record(sources: Sources) -> dict[str, str]:
    whole = {"": sources.whole} if sources.whole else {}
    return whole | dict(sources.single)


def _rate_text(kind: Device) -> str:
    rates = dict(kind.rates)
    return f"{rates['fp32'] / TERA:.3g}" if "fp32" in rates else ""


Row = tuple[str, str, str]


def _parts(cluster: Cluster) -> Iterator[tuple[str, list[Row]]]:
    for kind in cluster.kinds:
        yield f"{kind.kind} {kind.name}", list(_device_rows(kind))
    for run in cluster.nodes:
        of = run.sources.of
        rows = [("nodes", str(run.count), of("count")), ("devices per node", str(run.devices), of("devices_per_node"))]
        yield f"nodes of {run.device}", rows
    for link in cluster.links:
        yield f"link {link.name}", list(_link_rows(link))


def _device_rows(kind: Device) -> Iterator[Row]:
    of = kind.sources.of
    yield "memory", bytes_text(kind.memory), of("memory")
    yield "bandwidth", _bandwidth_text(kind.bandwidth), of("bandwidth")
    for precision, rate in kind.rates:
        yield f"peak {precision}", f"{flops_text(rate)}/s", of(f"rate_{precision}")
    if kind.launch:
        yield "launch", seconds_text(kind.launch), of("launch")
    if kind.cores:
        yield "cores", str(kind.cores), of("cores")
    if kind.on_chip:
        yield "on chip", bytes_text(kind.on_chip), of("on_chip")
    if kind.asynchronous:
        yield "transfers", "under compute", "a property of the design"


def _link_rows(link: Link) -> Iterator[Row]:
    of = link.sources.of
    if link.devices:
        yield "joins", _count(link.devices, "device"), of("devices")
    else:
        yield "joins", _count(link.nodes, "node") if link.nodes else "everything", of("nodes")
    yield "latency", seconds_text(link.latency), of("latency")
    yield "bandwidth", _bandwidth_text(link.bandwidth), of("bandwidth")
    yield "ranks per link", str(link.shared_by), of("shared_by")
    if link.oversubscription != 1:
        yield "oversubscription", f"{link.oversubscription:g}", of("oversubscription")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _bandwidth_text(bandwidth: float) -> str:
    return f"{bandwidth / GIGA:.4g} GB/s"
