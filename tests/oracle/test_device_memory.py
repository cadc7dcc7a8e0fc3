"""Predicted peaks on a GPU against `max_memory_allocated` of steps measured on one H200, from the raw rows of a benchmark."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.graph import Graph
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.oracle.memory.device_rules import CPU, CUDA
from fourfold.oracle.memory.peak import memory
from fourfold.plans import lower_plan, named
from fourfold.plans.spec.placement import Placement

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/2026-11-15-h200-memory.json").read_text())["rows"]
MEAN, UNDER = 0.04, 0.03
GPU = Placement(hosts=(0,), devices=("gpu",))


@cache
def graphs(model: str, **arguments: Any) -> dict[str, Graph]:
    with torch.device("meta"):
        plain = capture(*MODELS[model](**arguments, batch=2))
    return {"tf32": plain, "bf16": under_autocast(plain)}


def error(row: dict[str, Any]) -> float:
    graph = graphs(row["model"], **row["arguments"])[row["precision"]]
    made = lower_plan(graph, named("data", graph, ranks=1, batch=row["batch"]))
    return memory(made, GPU, optimizer="momentum", machine=CUDA).heaviest.bytes / row["bytes"]["peak"] - 1


def assert_near(models: set[str]) -> None:
    found = {f"{r['model']} {r['batch']} {r['precision']}": error(r) for r in MEASURED if r["model"] in models}
    assert statistics.mean(map(abs, found.values())) <= MEAN, found
    assert min(found.values()) >= -UNDER, found


def test_peaks_on_a_gpu_are_near_those_measured() -> None:
    assert_near({"alexnet", "vgg16"})


@pytest.mark.slow
def test_peaks_on_a_gpu_are_near_those_measured_for_all_networks() -> None:
    assert_near({row["model"] for row in MEASURED})


def test_large_blocks_of_a_gpu_are_rounded_as_its_allocator_does() -> None:
    mebi = 2**20
    assert CUDA.rounded(1) == 512
    assert CUDA.rounded(823_410_688) == 786 * mebi  # what is left is less than a block of its own
    assert CUDA.rounded(20 * mebi + 512) == 20 * mebi + 512  # more than 1 MiB is left, and given back
    assert CPU.rounded(20 * mebi + 1) == 20 * mebi + 1
