"""Everything a prediction says, as plain data; run as a program, of the graph in a file: for a process without a past."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from fourfold.cluster import cluster_named
from fourfold.graph import Graph
from fourfold.oracle.predict import predict
from fourfold.oracle.prices.prices import Prices
from fourfold.plans import lower_plan, named


def facts(graph: Graph, strategy: str, batch: int) -> list[Any]:
    made = lower_plan(graph, named(strategy, graph, ranks=4, batch=batch))
    found = predict(made, Prices(cluster=cluster_named("abci", devices=4)), optimizer="adamw")
    peaks = [[list(peak.ranks), peak.bytes, peak.action, peak.op, dict(peak.parts)] for peak in found.memory.peaks]
    events = [[event.rank, event.action, event.start, event.end] for event in found.estimate.timeline.events]
    return [found.estimate.step_seconds, list(found.estimate.interval), dict(found.estimate.breakdown), peaks, events]


if __name__ == "__main__":
    graph, strategies, batch = pickle.loads(Path(sys.argv[1]).read_bytes())
    print(json.dumps([facts(graph, strategy, batch) for strategy in strategies]))
