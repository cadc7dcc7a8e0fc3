"""Predictions of many plans on many clusters, written down, so that a change to lowering or to the oracle shows what it moved.

``python tests/support/golden.py`` compares with golden.json and prints what differs; ``--write`` writes the table anew, for the
change to be read in its diff. Clusters are presets and two made here, one of them with (invented) measured curves: nothing
depends on the machine this runs on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fourfold.cluster import Cluster, Device, Link, Nodes, cluster_named
from fourfold.cluster.measured import Collective, Curve, Measured, Waits
from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph import Graph
from fourfold.graph.autocast import as_computed
from fourfold.graph.capture import capture
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.predict import predict
from fourfold.oracle.prices.prices import Prices
from fourfold.planner import SearchTask, search
from fourfold.plans import Options, Plan, lower_plan, named
from fourfold.workload.model_text import build

TABLE = Path(__file__).with_suffix(".json")
TOLERANCE = 1e-9  # relative
MODELS = {
    "vgg16-cifar": 32,
    "resnet50,image=64": 16,
    "gpt2,layers=4,width=256,heads=8,vocabulary=5000,length=128": 16,
    "gnmt,layers=4,width=256,vocabulary=4000,length=16": 16,
    "unet3d,size=32,width=8": 8,
}
STRATEGIES = (
    "data", "filter", "channel", "spatial", "data+filter", "data+spatial", "splitbrain", "grid", "data --zero 1", "fsdp",
    "fsdp --recompute 3", "fsdp --microbatches 3", "data+filter --zero 3", "splitbrain --zero 3", "data --recompute 2",
    "pipeline", "pipeline --schedule gpipe --microbatches 5", "pipeline --schedule interleaved", "data+pipeline",
    "data+pipeline --zero 3 --recompute 2", "data+pipeline --zero 1", "spatial+pipeline --zero 3",
)  # fmt: skip
OPTIMIZERS = ("sgd", "momentum", "adamw")
SEARCHES = (
    ("vgg16-cifar", "ethernet-1g", 4, 64), ("vgg16-cifar", "two hosts", 4, 64),
    ("resnet50,image=64", "two hosts, measured", 4, 32),
    ("gpt2,layers=4,width=256,heads=8,vocabulary=5000,length=128", "dgx-h200", 8, 32), ("vgg16", "abci", 16, 512),
    ("unet3d,size=32,width=8", "dgx-h100", 8, 8), ("resnet50", "ethernet-10g-gpu", 8, 256),
    ("gpt2,layers=12", "ethernet-1g", 4, 8),
)  # fmt: skip


def _two_hosts(measured: Measured) -> Cluster:
    """Two hosts of two ranks that share two cores, 1 Gbit/s between them."""
    device = Device(name="cpu", kind="cpu", memory=24e9, bandwidth=20e9, rates=(("fp64", 5e10), ("fp32", 1e11), ("bf16", 1e11)),
                    launch=5e-6, cores=2)  # fmt: skip
    links = (Link(name="memory", nodes=1, latency=20e-6, bandwidth=8e9), Link(name="wire", latency=100e-6, bandwidth=1.2e8))
    return Cluster(name="two hosts", kinds=(device,), nodes=(Nodes(count=2, device="cpu", devices=2),), links=links,
                   measured=measured, size=4)  # fmt: skip


def _invented() -> Measured:
    """Curves of every collective, each with numbers of its own; groups of 2 and 4, one and two at once; waits for some."""
    kinds: tuple[tuple[Collective, float], ...] = (
        ("all_reduce", 1.0), ("all_gather", 2.1), ("reduce_scatter", 1.7), ("all_to_all", 1.4), ("send", 0.6),
        ("shared_gather", 0.3), ("shared_sum", 0.8), ("shared_fetch", 0.2), ("shared_give", 0.5),
    )  # fmt: skip
    sizes = (8.0, 4096.0, 65536.0, 2.0**20, 2.0**24)
    curves, waits = [], []
    for level, speed in (("memory", 3e9), ("wire", 1e8)):
        for ranks, groups in ((2, 1), (2, 2), (4, 1)):
            for kind, factor in kinds:
                if level == "memory" or not kind.startswith("shared"):
                    seconds = tuple(factor * groups**0.3 * (1e-4 + size / speed) for size in sizes)
                    curves.append(Curve(collective=kind, level=level, ranks=ranks, groups=groups, sizes=sizes, seconds=seconds,
                                        spreads=tuple(s / 10 for s in seconds)))  # fmt: skip
            waits.append(Waits(level=level, ranks=ranks, groups=groups, computing=(1e-3, 1e-2), seconds=(1e-3, 3e-3)))
    return Measured(curves=tuple(curves), waits=tuple(waits))


@cache
def cluster_of(name: str, devices: int) -> Cluster:
    made = {"two hosts": lambda: _two_hosts(Measured()), "two hosts, measured": lambda: _two_hosts(_invented())}
    return (made[name]() if name in made else cluster_named(name, devices=devices)).with_size(devices)


CLUSTERS = (  # devices, precision
    ("ethernet-1g", 4, "fp32"), ("two hosts", 2, "fp64"), ("two hosts", 4, "fp32"), ("two hosts, measured", 4, "fp32"),
    ("dgx-h100", 3, "fp32"), ("dgx-h200", 4, "bf16"), ("ethernet-1g", 2, "fp64"), ("two hosts", 3, "fp32"),
)  # fmt: skip


@cache
def graph_of(model: str) -> Graph:
    case = build(model, batch=None, seed=0, meta=True)
    return capture(case.module, case.inputs, case.targets, case.loss)


def plan_of(graph: Graph, text: str, ranks: int, batch: int) -> Plan:
    """A strategy with options behind it, as on a command line."""
    strategy, *rest = text.split()
    options = {key.removeprefix("--"): value if key == "--schedule" else int(value)
               for key, value in zip(rest[::2], rest[1::2], strict=True)}  # fmt: skip
    return named(strategy, graph, ranks=ranks, batch=batch, options=Options(**options))


def names() -> list[str]:
    """Every pair of plan and cluster; optimizers take turns."""
    every = itertools.product(MODELS, STRATEGIES, CLUSTERS)
    return [_name(model, strategy, *where, OPTIMIZERS[k % 3]) for k, (model, strategy, where) in enumerate(every, 1)]


def _name(*parts: object) -> str:
    return " | ".join(map(str, parts))


def predicted(name: str) -> dict[str, Any]:
    """The row of a name: what is predicted, or why it is refused."""
    model, strategy, where, devices, precision, optimizer = name.split(" | ")
    cluster = cluster_of(where, int(devices))
    graph = as_computed(graph_of(model), precision, cluster.device(0).kind)
    try:
        plan = plan_of(graph, strategy, int(devices), MODELS[model])
        found = predict(lower_plan(graph, plan), Prices(cluster=cluster, precision=precision), optimizer=optimizer)
    except (Infeasible, InvalidInput) as error:
        return {"refused": str(error)[:60]}
    timed = found.estimate
    return {
        "seconds": timed.step_seconds, "interval": list(timed.interval),
        "terms": {key: value for key, value in timed.breakdown.items() if value},
        "peaks": [peak.bytes for peak in found.memory.peaks],
    }  # fmt: skip


def searched(number: int) -> dict[str, Any]:
    """What a search finds: the best plan, and the steps of the next ones."""
    model, where, devices, batch = SEARCHES[number]
    setting = Setting(prices=Prices(cluster=cluster_of(where, devices)), optimizer="momentum")
    found = search(SearchTask(graph=graph_of(model), batch=batch, setting=setting))
    assert found.best is not None
    best = found.best.plan
    text = f"{best.strategy} on {best.mesh}, {len(best.stages)} stages, {best.microbatches} micro-batches, zero {best.zero}"
    return {"best": text, "splits": len(best.splits), "seconds": [c.step_seconds for c in found.candidates[:5]],
            "peak": found.best.peak_bytes}  # fmt: skip


def _rounded(found: Any) -> Any:
    """Twelve digits: more than the tolerance tells apart."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.12g}") if isinstance(found, float) else found


def differences(old: Any, new: Any, path: str = "", least: float = 0.0) -> Iterator[tuple[str, Any, Any]]:
    """Where two rows differ by more than rounding. `least`: what numbers are compared with if they are smaller; of the terms of
    a step, which are differences, the step itself."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            beside = old["seconds"] if key == "terms" else least
            empty = 0.0 if least else None
            yield from differences(old.get(key, empty), new.get(key, empty), f"{path}.{key}" if path else key, beside)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for k, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, f"{path}[{k}]")
    elif isinstance(old, (int, float)) and isinstance(new, (int, float)):
        if abs(old - new) > TOLERANCE * max(abs(old), abs(new), least):
            yield path, old, new
    elif old != new:
        yield path, old, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    asked = parser.parse_args()
    every = [name for name in names() if asked.only in name]
    found: dict[str, Any] = {}
    for k, name in enumerate(every):
        found[name] = predicted(name)
        if sys.stderr.isatty():
            print(f"\r{k + 1}/{len(every)}", end="", file=sys.stderr)
    for k, case in enumerate(SEARCHES if not asked.only else ()):
        found[_name("search", *case)] = searched(k)
    if asked.write:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(_rounded(row))}" for key, row in found.items())
        TABLE.write_text(f"{{\n{lines}\n}}\n")
        refused = sum("refused" in row for row in found.values())
        print(f"{len(found)} rows written, {refused} of them refused")
        return
    table = json.loads(TABLE.read_text())
    moved = {name: list(differences(table.get(name), row)) for name, row in found.items()}
    moved = {name: rest for name, rest in moved.items() if rest}
    for name, rest in moved.items():
        print(name, *(f"\n    {path}: {old} -> {new}" for path, old, new in rest))
    print(f"{len(found)} rows, {len(moved)} differ")
    sys.exit(bool(moved))


if __name__ == "__main__":
    main()
