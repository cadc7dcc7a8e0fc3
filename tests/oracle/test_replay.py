"""The replay of action lists and the estimate: laws, and BaPipe's times from the lists that really run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cluster import cluster_named, local
from fourfold.errors import Infeasible
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.time.estimate import estimate
from fourfold.oracle.time.replay import Lane, Machine, Replay, Work
from fourfold.plans import LoweredPlan, Options, lower_plan, named
from fourfold.plans.lists.rank_schedule import UNTIMED, StageAction
from small import batch_of, graph_of

NAMES = ("vgg16-cifar", "gpt2", "unet3d")
STRATEGIES = ("data", "filter", "spatial", "data+filter", "splitbrain", "pipeline", "data+pipeline", "fsdp")


def lowered(name: str, strategy: str, ranks: int, **options: object) -> LoweredPlan:
    graph = graph_of(name)
    batch = int(options.pop("batch", batch_of(name)))  # type: ignore[call-overload]
    return lower_plan(graph, named(strategy, graph, ranks=ranks, batch=batch, options=Options(**options)))  # type: ignore[arg-type]


def played(made: LoweredPlan, forward: float, backward: float, transfer: float, cores: int = 0) -> float:
    """The time of a pipeline's lists with the same stage times everywhere; with cores, all stages on one node."""
    lanes = [
        Lane(first=ranks[0], tasks=tuple(t for t in made.rank_schedule(ranks[0]) if t.kind in ("F", "B", "send", "receive")),
             nodes=((0 if cores else k, 1),))
        for k, ranks in enumerate(made.places)
    ]  # fmt: skip
    stages, batches = range(len(made.parts)), range(made.plan.microbatches)
    work = {(s, k, m): Work(seconds=t) for s in stages for k, t in (("F", forward), ("B", backward)) for m in batches}
    messages = {(c.source, c.target, "F"): transfer for c in made.crossings}
    messages |= {(c.target, c.source, "B"): transfer for c in made.crossings}
    return Replay(lanes, Machine(cores={0: cores} if cores else {}), work, messages).run().seconds


@pytest.mark.parametrize(("schedule", "seconds"), [("1f1b-sno", 138.5), ("1f1b-so", 108.0)])
def test_the_lists_that_run_take_bapipes_times(schedule: str, seconds: float) -> None:
    made = lowered("vgg16-cifar", "pipeline", 4, batch=32, microbatches=32, schedule=schedule)
    assert played(made, 1.0, 2.0, 0.5) == pytest.approx(seconds)


def test_stages_that_share_cores_take_turns() -> None:
    made = lowered("vgg16-cifar", "pipeline", 4, batch=32, microbatches=32, schedule="1f1b-so")
    alone, crowded = played(made, 1.0, 2.0, 0.0), played(made, 1.0, 2.0, 0.0, cores=2)
    assert crowded >= 4 * 32 * 3.0 / 2 > alone, "work is conserved: four stages' work on two cores"


def on_two_cores(*works: tuple[int, Work], beside: int = 0) -> float:
    """Seconds of lanes on one node of two cores, each with so many ranks and one piece of work."""
    lanes = [
        Lane(first=k, tasks=(StageAction(kind="F", stage=k),), nodes=((0, n),), beside=beside) for k, (n, _) in enumerate(works)
    ]
    work = {(k, "F", 0): given for k, (_, given) in enumerate(works)}
    return Replay(lanes, Machine(cores={0: 2}), work, {}).run().seconds


def test_ranks_that_wait_for_the_slowest_leave_their_cores() -> None:
    assert on_two_cores((4, Work(seconds=1.0))) == pytest.approx(2.0)
    assert on_two_cores((4, Work(seconds=1.0, mean_over_max=0.75))) == pytest.approx(1.5)
    for even in (0.5, 0.25):
        assert on_two_cores((4, Work(seconds=1.0, mean_over_max=even))) == pytest.approx(1.0)
    assert on_two_cores((2, Work(seconds=1.0)), (2, Work(seconds=1.0, mean_over_max=0.5))) == pytest.approx(1.5)


def test_exchanges_measured_beside_others_are_not_slowed_by_them_again() -> None:
    pair = (2, Work(seconds=0.0, blocked=1.0))
    assert on_two_cores(pair, beside=2) == pytest.approx(1.0) == on_two_cores(pair, pair, beside=2)
    assert on_two_cores(pair, pair) == pytest.approx(2.0), "each was measured alone"


@pytest.mark.parametrize(("ranks", "turns"), [(2, 1), (4, 2), (6, 3)])
def test_updates_take_turns_on_the_cores(ranks: int, turns: int) -> None:
    here = local(ranks)
    cluster = replace(here, kinds=tuple(replace(kind, cores=2) for kind in here.kinds))
    found = estimate(lowered("vgg16-cifar", "data", ranks), Prices(cluster=cluster))
    assert found.breakdown["update"] == pytest.approx(turns * found.stages[0]["update"])


def test_a_faster_link_is_never_slower() -> None:
    made = lowered("vgg16-cifar", "pipeline", 3, batch=8, microbatches=8)
    times = [played(made, 1.0, 2.0, transfer) for transfer in (2.0, 1.0, 0.5, 0.1, 0.0)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_terms_sum_to_the_step_and_the_interval_holds_it(name: str, strategy: str) -> None:
    found = estimate(lowered(name, strategy, 4), Prices(cluster=cluster_named("abci", devices=4)))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert all(seconds >= -1e-12 for seconds in found.breakdown.values())
    assert found.interval[0] < found.step_seconds < found.interval[1]


@pytest.mark.parametrize("name", NAMES)
def test_one_device_communicates_nothing(name: str) -> None:
    found = estimate(lowered(name, "data", 1), Prices(cluster=cluster_named("abci", devices=1)))
    exchanged = ("gradient_exchange", "layer_exchange", "halo", "pipeline")
    assert all(found.breakdown[term] == 0 for term in exchanged)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_bandwidth_is_never_slower(strategy: str) -> None:
    cluster = cluster_named("ethernet-10g", devices=4)
    faster = replace(cluster, links=tuple(replace(link, bandwidth=4 * link.bandwidth) for link in cluster.links))
    made = lowered("vgg16-cifar", strategy, 4)
    before, after = (estimate(made, Prices(cluster=c)).step_seconds for c in (cluster, faster))
    assert after <= before * (1 + 1e-9)


def test_the_events_are_the_lists_actions() -> None:
    made = lowered("gpt2", "pipeline", 2)
    found = estimate(made, Prices(cluster=cluster_named("abci", devices=2)))
    for rank in (0, 1):
        assert found.timeline.actions(rank) == tuple(
            str(t) for t in made.rank_schedule(rank) if t.kind not in (*UNTIMED, "update")
        )


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_schedule_of_forwards_and_backwards_at_once_is_not_predicted_with_stages_or_without(microbatches: int) -> None:
    graph, where = graph_of("gpt2"), Prices(cluster=cluster_named("abci", devices=2))
    for strategy in ("data", "pipeline"):
        plan = named(strategy, graph, ranks=2, batch=4, options=Options(microbatches=microbatches))
        with pytest.raises(Infeasible, match=r"schedule fbp-as .* is not predicted yet; choose 1f1b-as"):
            estimate(lower_plan(graph, replace(plan, schedule="fbp-as")), where)


def test_a_plan_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(Infeasible, match="needs 4 devices, cluster 'abci' has 2"):
        estimate(lowered("gpt2", "data", 4), Prices(cluster=cluster_named("abci", devices=2)))
