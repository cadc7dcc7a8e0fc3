"""Steps that were measured on an H200 are predicted: with the network's own kernels, and with what comes with Fourfold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from fourfold.cluster import cluster_named
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.oracle.time.estimate import estimate
from fourfold.plans import lower_plan, named

RAW = Path(__file__).parents[2] / "benchmarks/results/2026-11-18-h200-steps.json"
ROWS = [row for row in json.loads(RAW.read_text())["rows"] if row["model"] in ("alexnet", "vgg16")]


@pytest.fixture(scope="module")
def graphs():
    out = {}
    for model in ("alexnet", "vgg16"):
        with torch.device("meta"):
            plain = capture(*MODELS[model](batch=2))
        out |= {(model, "tf32"): plain, (model, "bf16"): under_autocast(plain)}
    return out


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['batch']}-{row['precision']}")
def test_a_step_on_an_h200(graphs, row) -> None:
    graph = graphs[row["model"], row["precision"]]
    lowered = lower_plan(graph, named("data", graph, ranks=1, batch=row["batch"]))
    shipped = Prices(cluster=cluster_named("dgx-h200", devices=1), precision=row["precision"])
    kernels = {k: KernelTime(forward=t["forward"], backward=t["backward"]) for k, t in row["kernels"].items()}
    own = Prices(cluster=shipped.cluster, precision=row["precision"], kernels=kernels)
    measured = statistics.median(row["steps"])
    assert estimate(lowered, own, optimizer="momentum").step_seconds == pytest.approx(measured, rel=0.03)
    assert estimate(lowered, shipped, optimizer="momentum").step_seconds == pytest.approx(measured, rel=0.2)
