"""Many devices cost little: ranks that do the same are looked at once, and what stands for others is true of them."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

import pytest
import torch
from torch import nn

from fourfold.cluster import Cluster, cluster_named, preset_names
from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.oracle.memory.device_rules import CPU, CUDA, DeviceRules
from fourfold.oracle.memory.peak import memory
from fourfold.oracle.memory.rank import RankReplay
from fourfold.oracle.memory.steady_state import SteadyState
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.kernels import Kernel
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.oracle.prices.traffic import Traffic, pair_kind, traffic
from fourfold.plans import LoweredPlan, Options, Program, lower_plan, named
from fourfold.plans.layout.layout import Layout
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.plans.spec.placement import Placement
from small import graph_of

STRATEGIES = ("data", "data+filter:model=4", "data+spatial:space=2", "data+pipeline:stages=2", "fsdp")
LIMITS = {1024: 1.0, 16384: 5.0}
"""Seconds of a processor that an estimate of resnet152 shall take, by devices, on an idle machine."""


@dataclass(frozen=True, kw_only=True)
class Counted(Prices):
    """Prices that remember what they were asked for."""

    asked: list[str] = field(default_factory=list)

    def kernel(self, kernel: Kernel, rank: int) -> KernelTime:
        self.asked.append(kernel.key)
        return super().kernel(kernel, rank)


def devices(count: int) -> Cluster:
    """Nodes of a preset, as many as it takes."""
    cluster = cluster_named("dgx-h100")
    return replace(cluster, nodes=tuple(replace(run, count=4096) for run in cluster.nodes)).with_size(count)


def lowered(graph: Graph, strategy: str, ranks: int, batch: int, **options: int) -> LoweredPlan:
    return lower_plan(graph, named(strategy, graph, ranks=ranks, batch=batch, options=Options(**options)))  # type: ignore[arg-type]


def placed(made: LoweredPlan, machine: DeviceRules) -> Placement:
    """All ranks on one host, with the devices of a kind of machine."""
    size = made.plan.size
    return Placement(hosts=(0,) * size, devices=("gpu" if machine.gpu else "cpu",) * size)


Replayed = TypeVar("Replayed", bound=RankReplay)


def replay(
    made: LoweredPlan, rank: int, machine: DeviceRules, kind: type[Replayed] = RankReplay, *, optimizer: str = "sgd"
) -> Replayed:
    return kind(made, rank, placement=placed(made, machine), machine=machine, optimizer=optimizer)


def asked(strategy: str, ranks: int) -> int:
    prices = Counted(cluster=devices(ranks))
    predict(lowered(graph_of("resnet50"), strategy, ranks, 8 * ranks), prices)
    return len(prices.asked)


@pytest.mark.parametrize(("strategy", "factor"), [(name, 8 if name == "fsdp" else 1) for name in STRATEGIES])
def test_a_thousand_devices_ask_for_few_kernels_more_than_eight(strategy: str, factor: int) -> None:
    """Weights divided over more ranks than they have rows make kinds of ranks, a few; everything else is the same for all."""
    assert asked(strategy, 1024) <= factor * asked(strategy, 8)


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_a_thousand_devices_take_a_moment(strategy: str) -> None:
    graph = graph_of("resnet50")
    begun = time.process_time()
    found = predict(lowered(graph, strategy, 1024, 8192), Prices(cluster=devices(1024)), optimizer="momentum")
    assert time.process_time() - begun < 3, "seconds, ten times what it takes on an idle machine"
    assert sorted(rank for peak in found.memory.peaks for rank in peak.ranks) == list(range(1024))


@pytest.mark.parametrize(("name", "strategy", "batch"), [
    ("vgg16-cifar", "data", 18), ("unet3d", "data+spatial:space=4", 6), ("vgg16-cifar", "spatial", 4),
    ("vgg16-cifar", "fsdp", 12), ("vgg16-cifar", "splitbrain", 20),
    ("gpt2", "data+filter:model=4", 9), ("gpt2", "data+pipeline:stages=3", 24),
])  # fmt: skip
def test_ranks_said_to_be_alike_have_the_same_shapes_and_peaks(name: str, strategy: str, batch: int) -> None:
    made = lowered(graph_of(name), strategy, 8, batch)
    for place in made.places:
        parts = [part for part in made.parts if part.stage.ranks == place]
        programs = [program for part in parts for program in part.programs.values()]
        mesh = parts[0].stage.mesh
        layouts = [layout for program in programs for layout in _layouts(program)]
        kinds = rank_classes(mesh, programs)
        assert sorted(m for members in kinds for m in members) == list(range(mesh.size))
        shapes = [{tuple(at.local_shape(mesh.coords(m)) for at in layouts) for m in members} for members in kinds]
        assert all(len(some) == 1 for some in shapes) and len(set().union(*shapes)) == len(kinds)
        for members in kinds:
            first, last = (replay(made, place[m], CPU, optimizer="adamw").peak((0,)) for m in (members[0], members[-1]))
            assert first == last


def _layouts(program: Program) -> list[Layout]:
    computes = [layout for step in program.computes() for layout in (*step.needs, *step.gives)]
    moves = [end for move in program.moves() for end in (move.exchange.source, move.exchange.target)]
    return [*program.stored.values(), *program.updates.values(), *computes, *moves]


@pytest.mark.parametrize(("name", "strategy", "batch"), [
    ("unet3d", "data+spatial:space=4", 6), ("vgg16-cifar", "fsdp", 12), ("vgg16-cifar", "spatial", 4), ("gpt2", "data", 18),
])  # fmt: skip
def test_kinds_that_share_what_was_worked_out_have_the_peaks_they_have_alone(name: str, strategy: str, batch: int) -> None:
    made = lowered(graph_of(name), strategy, 8, batch)
    for machine in (CPU, CUDA):
        found = memory(made, placed(made, machine), optimizer="adamw", machine=machine).peaks
        assert len(found) > 1
        assert list(found) == [replay(made, peak.ranks[0], machine, optimizer="adamw").peak(peak.ranks) for peak in found]


class Patient(RankReplay):
    """Follows every micro-batch."""

    def _caught_up(self, steady: SteadyState | None, at: int) -> int:
        return at


@pytest.mark.parametrize("machine", [CPU, CUDA])
@pytest.mark.parametrize(("name", "strategy", "options"), [
    ("vgg16-cifar", "pipeline:stages=4", {"microbatches": 24}),
    ("vgg16-cifar", "pipeline:stages=4", {"microbatches": 20}),
    ("vgg16-cifar", "pipeline:stages=4", {"microbatches": 24, "schedule": "1f1b-sno"}),
    ("vgg16-cifar", "pipeline:stages=4", {"microbatches": 12, "schedule": "gpipe"}),
    ("vgg16-cifar", "pipeline:stages=8", {"microbatches": 24, "schedule": "interleaved"}),
    ("unet3d", "pipeline:stages=4", {"microbatches": 24}),
    ("gpt2", "data+pipeline:stages=2", {"microbatches": 12, "zero": 3}),
    ("gpt2", "filter+pipeline:stages=2", {"microbatches": 12, "recompute": 2}),
])  # fmt: skip
def test_micro_batches_that_are_skipped_change_no_peak(
    name: str, strategy: str, options: dict[str, int], machine: DeviceRules
) -> None:
    made = lowered(graph_of(name), strategy, 4, 48, **options)
    for place in made.places:
        both = (replay(made, place[0], machine, kind, optimizer="momentum") for kind in (RankReplay, Patient))
        short, long = (each.peak((0,)) for each in both)
        assert short == long


def test_a_full_pipeline_is_not_followed_through_every_micro_batch() -> None:
    made = lowered(graph_of("vgg16-cifar"), "pipeline:stages=4", 4, 96, microbatches=96)

    class Noting(RankReplay):
        forwards = 0

        def _forward(self, task: object) -> None:
            self.forwards += 1
            super()._forward(task)  # type: ignore[arg-type]

    for rank in range(4):
        found = replay(made, rank, CPU, Noting)
        found._run["F"] = found._forward
        found.peak((rank,))
        assert found.forwards <= 2 * (4 - rank) + 6 < 96


def test_a_chain_of_ops_that_nothing_places_is_no_deep_recursion() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), *(nn.ReLU() for _ in range(340)))
    with torch.device("meta"):
        graph = capture(chain, (torch.empty(4, 8),))
    made = lowered(graph, "filter", 2, 4)
    assert {compute.op.path for compute in made.computes()} == {op.path for op in graph.ops}


@pytest.mark.parametrize("name", preset_names())
def test_pairs_of_one_kind_have_the_same_traffic(name: str) -> None:
    whole = cluster_named(name)
    cluster = whole.with_size(min(whole.capacity, 24))
    found: dict[tuple[object, ...], set[Traffic]] = {}
    for pair in itertools.permutations(range(cluster.size), 2):
        found.setdefault(pair_kind(cluster, *pair), set()).add(traffic(cluster, (pair,)))
    assert all(len(some) == 1 for some in found.values())


def test_of_ranks_alike_the_one_on_the_slowest_and_smallest_device_counts() -> None:
    made, fast = lowered(graph_of("vgg16-cifar"), "data", 8, 8), cluster_named("abci", devices=8)
    (kind,), (run,) = fast.kinds, fast.nodes
    rates = tuple((precision, rate / 10) for precision, rate in kind.rates)
    slow = replace(kind, name="slow", rates=rates, bandwidth=kind.bandwidth / 10, launch=10 * kind.launch)
    slow = replace(slow, memory=kind.memory / 2)
    mixed = replace(fast, kinds=(kind, slow), nodes=(replace(run, count=1), replace(run, count=1, device="slow")))
    alone, together = (predict(made, Prices(cluster=cluster)) for cluster in (fast, mixed))
    assert together.estimate.breakdown["compute"] == pytest.approx(10 * alone.estimate.breakdown["compute"])
    assert (together.capacity_bytes, together.tightest) == (slow.memory, run.devices)


@cache
def resnet152() -> Graph:
    with torch.device("meta"):
        return capture(*MODELS["resnet152"](batch=8))


@pytest.mark.slow
@pytest.mark.parametrize("count", LIMITS)
@pytest.mark.parametrize(
    "strategy", ["data", "data+filter:model=4", "data+spatial:space=4", "data+pipeline:stages=8", "filter", "fsdp"]
)
def test_estimates_of_resnet152_on_thousands_of_devices(strategy: str, count: int) -> None:
    if strategy == "filter" and count > 1024:
        pytest.skip("filters of most layers are too few for so many ranks")
    graph, batch = resnet152(), 64 if strategy == "filter" else 8 * count
    gc.collect()
    gc.freeze()  # as the commands do once a graph is captured
    begun = time.process_time()
    found: Prediction = predict(lowered(graph, strategy, count, batch), Prices(cluster=devices(count)), optimizer="momentum")
    taken = time.process_time() - begun
    assert found.estimate.step_seconds > 0
    assert taken < LIMITS[count], f"{taken:.2f} s"
