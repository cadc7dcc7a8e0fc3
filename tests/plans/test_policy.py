"""Policy and placement are what the lists are made by: change a field, and the list, the predicted time, the predicted peak and
what the ranks do in a step all change, and list and ranks agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import apart, close_apart, recorded
from fourfold.cluster import Cluster, cluster_named, local
from fourfold.errors import InvalidInput
from fourfold.graph.capture import capture
from fourfold.oracle.memory.peak import memory
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import estimate
from fourfold.plans import Mesh, Options, Plan, load_plan, lower_plan, named, save_plan
from fourfold.plans.lists.records import Record, records
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.plan_file import plan_data
from fourfold.plans.spec.policy import BOUNDS, DEFAULT, Policy
from ranks import pool
from small import Subject, batch_of, built_in, graph_of, subject

BASE = Policy(bucket_bytes=40_000, last_bucket_bytes=0, bunch_bytes=40_000, prefetch=0, chunk_bytes=8_000, small_bytes=0)
VGG = "vgg16-cifar"


class Wide(nn.Module):
    """A sum of partial results that is larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 500)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).softmax(-1)


@cache
def wide() -> Subject:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(8, 4)
    graph = capture(model, (x,), (), lambda out: out[:, :3].square().mean())
    return subject(graph, {k: p.detach().clone() for k, p in model.state_dict().items()}, [x], 8)


def wide_plan() -> Plan:
    splits = (("second", {"model": "channel"}), ("softmax", {"model": "replicate"}))
    return Plan(graph=wide().task.graph.hash, batch=8, mesh=Mesh.of(model=2), splits=splits)


def vgg_plan(zero: int) -> Plan:
    return named("data", graph_of(VGG), ranks=2, batch=batch_of(VGG), options=Options(zero=zero))


CHANGES: dict[str, tuple[Any, bool, dict[str, int]]] = {  # by field: the plan, whether its ranks share no memory, the change
    "bucket_bytes": (lambda: vgg_plan(0), True, {"bucket_bytes": 400_000}),
    "last_bucket_bytes": (lambda: vgg_plan(0), True, {"last_bucket_bytes": 20_000}),
    "bunch_bytes": (lambda: vgg_plan(3), True, {"bunch_bytes": 400_000}),
    "prefetch": (lambda: vgg_plan(3), True, {"prefetch": 3}),
    "sums_in_flight": (lambda: vgg_plan(3), True, {"sums_in_flight": 0}),
    "chunk_bytes": (lambda: vgg_plan(1), False, {"chunk_bytes": 40_000}),
    "small_bytes": (wide_plan, False, {"small_bytes": 64 * 2**10}),
}


@pytest.fixture(scope="module", autouse=True)
def end_ranks_apart() -> Iterator[None]:
    yield
    close_apart()


def cluster(*, separate: bool) -> Cluster:
    return cluster_named("ethernet-1g", devices=2) if separate else local(2)


def predicted(task: Subject, plan: Plan, *, separate: bool) -> tuple[list[list[Record]], float, int]:
    """The records that the lists of all ranks say, the time and the largest peak of a step."""
    made, prices = lower_plan(task.task.graph, plan), Prices(cluster=cluster(separate=separate), precision="fp64")
    assert prices.placement.level((0, 1)) == ("network" if separate else "host")
    listed = [records(made, prices.placement, rank, precision="fp64", clips=True) for rank in (0, 1)]
    peak = memory(made, prices.placement, precision="fp64").heaviest.bytes
    return listed, estimate(made, prices).step_seconds, peak


def ran(task: Subject, plan: Plan, *, separate: bool) -> list[list[Record]]:
    """What the ranks did."""
    answers = (apart(2) if separate else pool(2))(recorded, replace(task.task, plan=plan, result=""), None)
    return [seen for _, seen in answers]


def assert_all_change(task: Subject, one: tuple[Plan, bool], other: tuple[Plan, bool]) -> None:
    """Two plans, each with whether its ranks share no memory."""
    (listed, seconds, peak), (listed2, seconds2, peak2) = (predicted(task, plan, separate=s) for plan, s in (one, other))
    seen, seen2 = (ran(task, plan, separate=s) for plan, s in (one, other))
    assert (seen, seen2) == (listed, listed2)
    assert listed != listed2 and seconds != seconds2 and peak != peak2


def test_every_field_of_a_policy_is_changed_here() -> None:
    assert set(CHANGES) == {field.name for field in fields(Policy)} == set(BOUNDS)


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_of_the_policy_changes_the_list_the_time_the_peak_and_the_run(name: str) -> None:
    make, separate, change = CHANGES[name]
    plan = replace(make(), policy=BASE)
    task = wide() if make is wide_plan else built_in(VGG)
    changed = replace(plan, policy=replace(BASE, **change))
    assert_all_change(task, (plan, separate), (changed, separate))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_whether_ranks_share_a_host_changes_the_list_the_time_the_peak_and_the_run(zero: int) -> None:
    assert_all_change(built_in(VGG), (vgg_plan(zero), False), (vgg_plan(zero), True))


# --- files and values ---


def test_a_plan_file_says_what_its_policy_changes_and_no_more(tmp_path: Path) -> None:
    plan = replace(vgg_plan(3), policy=Policy(prefetch=2, bunch_bytes=2**20))
    assert plan_data(plan)["policy"] == {"bunch_bytes": 2**20, "prefetch": 2}
    assert plan_data(vgg_plan(3))["policy"] == {}
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_plan_file_of_before_has_the_default_policy(tmp_path: Path) -> None:
    data = plan_data(vgg_plan(0))
    del data["policy"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert load_plan(tmp_path / "plan.json").policy == DEFAULT


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"bucket_byte": 4}, "policy: bucket_byte: is no key here; did you mean 'bucket_bytes'?"),
        ({"bucket_bytes": 0}, "policy: bucket_bytes: is 0, it must be at least 1"),
        ({"prefetch": "two"}, "policy: prefetch"),
        ({"small_bytes": 2**40}, f"policy: small_bytes: is {2**40}, it must be at most {2**28}"),
        (3, "policy"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_in_one_line(policy: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**plan_data(vgg_plan(0)), "policy": policy}))
    with pytest.raises(InvalidInput) as refusal:
        load_plan(tmp_path / "plan.json")
    assert "\n" not in str(refusal.value) and words in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize("field", BOUNDS)
def test_a_field_of_a_policy_is_bounded(field: str) -> None:
    least, most = BOUNDS[field]
    assert getattr(Policy(**{field: most}), field) == most
    for value in (least - 1, most + 1, 1.5, True):
        with pytest.raises(InvalidInput, match=rf"policy: {field} is .*; use a whole number from {least} to {most}"):
            Policy(**{field: value})  # type: ignore[arg-type]


def test_options_of_a_strategy_take_a_policy() -> None:
    policy = Policy(prefetch=3)
    assert named("fsdp", graph_of(VGG), ranks=2, batch=8, options=Options(policy=policy)).policy == policy


# --- placements ---


def test_a_placement_says_what_joins_ranks() -> None:
    two = Placement(hosts=(0, 0, 1, 1), devices=("cpu",) * 4)
    assert [two.level(ranks) for ranks in ((0,), (0, 1), (1, 2), (0, 1, 2, 3))] == ["rank", "host", "network", "network"]
    assert two.shares_memory((2, 3)) and not two.shares_memory((1, 2))
    assert not Placement(hosts=(0, 0), devices=("gpu", "gpu")).shares_memory((0, 1))


def test_differences_between_placements_are_named() -> None:
    two, one = Placement(hosts=(5, 5, 9), devices=("cpu",) * 3), Placement.one_host(3)
    assert two.differences(Placement(hosts=(0, 0, 1), devices=("cpu",) * 3)) == []
    (line,) = two.differences(one)
    assert "predicted for ranks on hosts [0, 0, 1], running on hosts [0, 0, 0]" in line
    (line,) = one.differences(replace(one, devices=("gpu",) * 3))
    assert line == "predicted for 3 x cpu, running on 3 x gpu"
    (line,) = one.differences(replace(one, shared_bytes=32 * 2**20))
    assert "can share 32 MiB of memory" in line
    assert one.differences(replace(one, shared_bytes=2**34)) == []


def test_a_cluster_places_its_ranks_on_its_nodes() -> None:
    assert Prices(cluster=cluster_named("dgx-h100", devices=12)).placement.hosts == (0,) * 8 + (1,) * 4
    assert set(Prices(cluster=cluster_named("ethernet-1g", devices=3)).placement.devices) == {"cpu"}
