"""Clusters as TOML files. Every number's key ends in its unit, and a `source` says where numbers come from.

docs/clusters.md explains each key. Errors name the file, the table, the key and the reason.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

from fourfold.cluster import quantity as q
from fourfold.cluster.cache import write_with_folders
from fourfold.cluster.measured import COLLECTIVES, Collective, Curve, Measured, Waits
from fourfold.cluster.parts import KINDS, PRECISIONS, Device, Kind, Link, Nodes, Sources
from fourfold.cluster.spec import Cluster
from fourfold.cluster.table import LARGEST, MOST_BYTES, SOURCE, ClusterTable, read_table, toml_text
from fourfold.errors import Damaged, Error, InvalidInput, nearest
from fourfold.files import read_text
from fourfold.optimizers import OPTIMIZERS
from fourfold.table import NAME

VERSION = 1
MOST_DEVICES = 2**20  # ten times what the largest machines have
_SEAL = "# measured by fourfold calibrate; sha256 of what follows: "
KINDS_READ, RUNS_READ, LINKS_READ, CURVES_READ = 1_000, 1_000, 64, 10_000


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file."""
    table = read_table(path)
    try:
        return _cluster(table)
    except Error as error:
        text = str(error)
        raise InvalidInput(text if text.startswith(f"{path}: ") else f"{path}: {text}") from None


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file that reads back as the same value."""
    write_with_folders(path, cluster_text(cluster))


def save_calibration(cluster: Cluster, path: Path) -> None:
    """Write what `calibrate` found into the cache, with the hash of its text."""
    text = cluster_text(cluster)
    write_with_folders(path, f"{_SEAL}{_hash(text)}\n{text}")


def load_calibration(path: Path, ranks: int) -> Cluster:
    """Read what `calibrate` put into the cache. One that is damaged is refused: it takes minutes to measure again, and to plan
    by assumptions instead would be another answer."""
    try:
        seal, _, text = read_text(path, most=MOST_BYTES).partition("\n")
        if not seal.startswith(_SEAL):
            raise InvalidInput("it has no content hash, as those of an earlier Fourfold have none")
        if seal != _SEAL + _hash(text):
            raise InvalidInput("its content hash is off")
        return load_cluster(path)
    except (OSError, Error) as error:
        why = str(error).removeprefix(f"{path}: ")
        remedy = f"run `fourfold calibrate --ranks {ranks}` again or delete it"
        raise Damaged(f"the calibration {path} cannot be used: {why}; {remedy}") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cluster(table: ClusterTable) -> Cluster:
    table.check_keys(["version", "name", "about", "in_use", "kernels", "device", "nodes", "link", "measured", "waits"])
    if (version := table.whole("version")) != VERSION:
        table.fail("version", f"is {version}, this Fourfold reads {VERSION}")
    kinds = tuple(_device(name, entry) for name, entry in table.named_tables("device", most=KINDS_READ).items())
    runs = tuple(_nodes(entry, [kind.name for kind in kinds]) for entry in table.tables("nodes", most=RUNS_READ))
    links = tuple(_link(entry) for entry in table.tables("link", most=LINKS_READ))
    names = [link.name for link in links]
    curves = tuple(_curve(entry, names) for entry in table.tables("measured", most=CURVES_READ))
    waits = tuple(_waits(entry, names) for entry in table.tables("waits", most=CURVES_READ))
    devices = sum(run.count * run.devices for run in runs)
    if devices > MOST_DEVICES:
        table.fail("nodes", f"have {devices:,} devices, at most {MOST_DEVICES:,} are read")
    return Cluster(
        name=table.text("name", most=NAME),
        about=table.text("about", "", lines=True),
        kinds=kinds,
        nodes=runs,
        links=links,
        measured=Measured(curves=curves, waits=waits, kernels=table.text("kernels", "", most=NAME)),
        size=table.whole("in_use", max(1, devices)),
    )


def _device(name: str, table: ClusterTable) -> Device:
    rates = {precision: q.rate(precision) for precision in PRECISIONS}
    updates = {name: q.update(name) for name in OPTIMIZERS}
    known = [q.MEMORY, q.BANDWIDTH, q.LAUNCH, q.PACE, q.ON_CHIP, *rates.values(), *updates.values()]
    table.check_keys(["kind", "asynchronous", "cores", "drift"], known)
    given = {precision: table.amount(rate, 0.0) for precision, rate in rates.items()}
    speeds = {name: table.amount(speed, 0.0) for name, speed in updates.items()}
    return Device(
        name=name,
        kind=cast(Kind, table.chosen("kind", KINDS)),
        memory=table.amount(q.MEMORY),
        bandwidth=table.amount(q.BANDWIDTH),
        rates=tuple((precision, rate) for precision, rate in given.items() if rate),
        launch=table.amount(q.LAUNCH, 0.0),
        asynchronous=table.flag("asynchronous"),
        cores=table.whole("cores", 0, most=MOST_DEVICES),
        on_chip=table.amount(q.ON_CHIP, 0.0),
        updates=tuple((name, speed) for name, speed in speeds.items() if speed),
        drift=table.number("drift", 0, least=0, most=1_000),
        pace=table.amount(q.PACE, 0.0),
        sources=table.sources(),
    )


def _nodes(table: ClusterTable, known: list[str]) -> Nodes:
    table.check_keys(["count", "device", "devices_per_node"])
    device = table.text("device")
    if device not in known:
        table.fail("device", f"names {device!r}, which no [device.{device}] describes{nearest(device, known)}")
    devices = table.whole("devices_per_node", 1)
    return Nodes(count=table.whole("count"), device=device, devices=devices, sources=table.sources())


def _link(table: ClusterTable) -> Link:
    table.check_keys(["name", "devices", "nodes", "shared_by", "oversubscription"], [q.LATENCY, q.BANDWIDTH])
    return Link(
        name=table.text("name", most=NAME),
        devices=table.whole("devices", 0),
        nodes=table.whole("nodes", 0),
        latency=table.amount(q.LATENCY),
        bandwidth=table.amount(q.BANDWIDTH),
        shared_by=table.whole("shared_by", 1),
        oversubscription=table.number("oversubscription", 1, most=LARGEST),
        sources=table.sources(),
    )


def _curve(table: ClusterTable, known: list[str]) -> Curve:
    table.check_keys(["collective", "level", "ranks", "groups"], [q.SIZE, q.TIME, q.SPREAD])
    return Curve(
        collective=cast(Collective, table.chosen("collective", COLLECTIVES)),
        level=_level(table, known),
        ranks=table.whole("ranks"),
        groups=table.whole("groups", 1),
        sizes=table.amounts(q.SIZE),
        seconds=table.amounts(q.TIME),
        spreads=table.amounts(q.SPREAD),
        source=table.text(SOURCE, "", lines=True),
    )


def _waits(table: ClusterTable, known: list[str]) -> Waits:
    table.check_keys(["level", "ranks", "groups"], [q.COMPUTING, q.TIME])
    return Waits(
        level=_level(table, known),
        ranks=table.whole("ranks"),
        groups=table.whole("groups", 1),
        computing=table.amounts(q.COMPUTING),
        seconds=table.amounts(q.TIME),
        source=table.text(SOURCE, "", lines=True),
    )


def _level(table: ClusterTable, known: list[str]) -> str:
    level = table.text("level")
    if level not in known:
        table.fail("level", f"names {level!r}, which is no link{nearest(level, known)}")
    return level


def cluster_text(cluster: Cluster) -> str:
    """A cluster as TOML."""
    data: dict[str, Any] = {"version": VERSION, "name": cluster.name}
    if cluster.about:
        data["about"] = cluster.about
    if cluster.size != cluster.capacity:
        data["in_use"] = cluster.size
    if cluster.measured.kernels:
        data["kernels"] = cluster.measured.kernels
    data["device"] = {kind.name: _device_entries(kind) for kind in cluster.kinds}
    data["nodes"] = [_nodes_entries(run) for run in cluster.nodes]
    data["link"] = [_link_entries(link) for link in cluster.links]
    data["measured"] = [_curve_entries(curve) for curve in cluster.measured.curves]
    data["waits"] = [_waits_entries(waits) for waits in cluster.measured.waits]
    return toml_text(data)


def _device_entries(device: Device) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": device.kind}
    for quantity, value in [
        (q.MEMORY, device.memory),
        (q.BANDWIDTH, device.bandwidth),
        *((q.rate(precision), rate) for precision, rate in device.rates),
        (q.LAUNCH, device.launch),
        (q.PACE, device.pace),
        (q.ON_CHIP, device.on_chip),
        *((q.update(name), speed) for name, speed in device.updates),
    ]:
        if value:
            data |= _amount(quantity, value)
    flags = {"asynchronous": device.asynchronous, "cores": device.cores, "drift": device.drift}
    return data | {key: value for key, value in flags.items() if value} | _source_entries(device.sources)


def _nodes_entries(run: Nodes) -> dict[str, Any]:
    return {"count": run.count, "device": run.device, "devices_per_node": run.devices, **_source_entries(run.sources)}


def _link_entries(link: Link) -> dict[str, Any]:
    unit = {"devices": link.devices} if link.devices else {"nodes": link.nodes} if link.nodes else {}
    shared: dict[str, Any] = {"shared_by": link.shared_by}
    if link.oversubscription != 1:
        shared["oversubscription"] = link.oversubscription
    amounts = _amount(q.LATENCY, link.latency) | _amount(q.BANDWIDTH, link.bandwidth)
    return {"name": link.name, **unit, **amounts, **shared, **_source_entries(link.sources)}


def _curve_entries(curve: Curve) -> dict[str, Any]:
    data: dict[str, Any] = {"collective": curve.collective, "level": curve.level, "ranks": curve.ranks, "groups": curve.groups}
    amounts = _amounts((q.SIZE, curve.sizes), (q.TIME, curve.seconds), (q.SPREAD, curve.spreads))
    return data | amounts | ({SOURCE: curve.source} if curve.source else {})


def _waits_entries(waits: Waits) -> dict[str, Any]:
    data = {"level": waits.level, "ranks": waits.ranks, "groups": waits.groups}
    amounts = _amounts((q.COMPUTING, waits.computing), (q.TIME, waits.seconds))
    return data | amounts | ({SOURCE: waits.source} if waits.source else {})


def _amounts(*lists: tuple[q.Quantity, tuple[float, ...]]) -> dict[str, list[float]]:
    """Those lists that have numbers."""
    return dict(quantity.key_and_numbers(*values) for quantity, values in lists if values)


def _amount(quantity: q.Quantity, value: float) -> dict[str, Any]:
    key, (number,) = quantity.key_and_numbers(value)
    return {key: number}


def _source_entries(sources: Sources) -> dict[str, str]:
    whole = {SOURCE: sources.whole} if sources.whole else {}
    return whole | {f"{name}_{SOURCE}": text for name, text in sources.single}
