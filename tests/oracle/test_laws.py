"""Laws of every estimate: terms sum, one device does not communicate, better hardware never hurts, the same twice."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facts import facts
from fourfold.cluster import Cluster, cluster_named
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.prices import Prices
from fourfold.plans import LoweredPlan, lower_plan, named
from small import batch_of, graph_of

NAMES = ("vgg16-cifar", "gpt2")
STRATEGIES = ("data", "filter", "spatial", "data+filter", "splitbrain", "pipeline", "data+pipeline", "fsdp")
CLUSTERS = ("abci", "dgx-a100", "ethernet-25g-gpu", "ethernet-10g")
EXCHANGES = ("gradient_exchange", "layer_exchange", "halo", "pipeline")

laws = settings(max_examples=12, deadline=None)
plans = st.tuples(st.sampled_from(NAMES), st.sampled_from(STRATEGIES))
factors = st.floats(1.0, 100.0)


@cache
def lowered(name: str, strategy: str, ranks: int = 4) -> LoweredPlan:
    graph = graph_of(name)
    return lower_plan(graph, named(strategy, graph, ranks=ranks, batch=batch_of(name)))


def found(plan: tuple[str, str], cluster: Cluster, ranks: int = 4) -> Prediction:
    return predict(lowered(*plan, ranks), Prices(cluster=cluster), optimizer="momentum")


def linked(cluster: Cluster, *, faster: float = 1.0, nearer: float = 1.0) -> Cluster:
    links = (replace(a, bandwidth=faster * a.bandwidth, latency=a.latency / nearer) for a in cluster.links)
    return replace(cluster, links=tuple(links))


@laws
@given(plan=plans, name=st.sampled_from(CLUSTERS))
def test_terms_sum_to_the_step(plan: tuple[str, str], name: str) -> None:
    estimate = found(plan, cluster_named(name, devices=4)).estimate
    assert sum(estimate.breakdown.values()) == pytest.approx(estimate.step_seconds)
    assert all(seconds >= -1e-12 for seconds in estimate.breakdown.values())


@laws
@given(plan=plans, name=st.sampled_from(CLUSTERS))
def test_one_device_costs_no_communication(plan: tuple[str, str], name: str) -> None:
    estimate = found(plan, cluster_named(name, devices=1), ranks=1).estimate
    assert [estimate.breakdown[term] for term in EXCHANGES] == [0, 0, 0, 0]  # type: ignore[index]


@laws
@given(plan=plans, name=st.sampled_from(CLUSTERS), faster=factors, nearer=factors)
def test_more_bandwidth_and_less_latency_never_hurt(plan: tuple[str, str], name: str, faster: float, nearer: float) -> None:
    cluster = cluster_named(name, devices=4)
    base = found(plan, cluster).estimate.step_seconds
    for better in (linked(cluster, faster=faster), linked(cluster, nearer=nearer)):
        assert found(plan, better).estimate.step_seconds <= base * (1 + 1e-9)


@laws
@given(plan=plans, name=st.sampled_from(CLUSTERS), size=st.floats(1e6, 1e9), more=factors)
def test_more_memory_never_hurts(plan: tuple[str, str], name: str, size: float, more: float) -> None:
    cluster = cluster_named(name, devices=4)
    small, large = (
        found(plan, replace(cluster, kinds=tuple(replace(kind, memory=memory) for kind in cluster.kinds)))
        for memory in (size, more * size)
    )
    assert large.feasible >= small.feasible
    assert large.estimate.step_seconds == small.estimate.step_seconds and large.peak_bytes == small.peak_bytes


def test_an_estimate_is_the_same_twice_and_in_another_process(tmp_path: Path) -> None:
    """The other process orders its sets otherwise, and knows nothing of what this one has found before."""
    graph, batch = graph_of("gpt2"), batch_of("gpt2")
    strategies = [strategy for strategy in STRATEGIES if strategy != "spatial"]
    first, second = ([facts(graph, strategy, batch) for strategy in strategies] for _ in range(2))
    path = tmp_path / "graph.pkl"
    path.write_bytes(pickle.dumps((graph, strategies, batch)))
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "facts.py"), str(path)]
    other = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "12345"}, capture_output=True, text=True, check=True, timeout=120
    )
    assert first == second == json.loads(other.stdout)
