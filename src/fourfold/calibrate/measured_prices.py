"""Prices of a plan on the machine that will run it: a calibration, a table of kernels, and what the table lacks timed now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from fourfold.calibrate.gpu_prices import calibrated_gpus, gpu_prices, own_table
from fourfold.calibrate.kernel_table import add_kernels, known_prices, load_kernels
from fourfold.calibrate.kernels import ROUNDS, Rounds, samples_of, time_kernels
from fourfold.calibrate.machine_speed import machine_name
from fourfold.cluster import LOCAL, Cluster, Precision, cluster_named
from fourfold.errors import Damaged, InvalidInput
from fourfold.graph.spec import computed_as
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.prices import Prices
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.runtime.comm.shared.memory import host_of_this_process
from fourfold.runtime.execution.precision import PRECISIONS, lower_for_precision
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import TorchrunRanks, is_leader, share
from fourfold.workload.workload import load_workload

ONCE = Rounds(1, 1)
TWICE = Rounds(2, 2)  # for a search: plans that win by less than a kernel strays are as good as each other
TIMED_BY_SEARCH = ("fp64", "fp32")
METHOD = "2026-11-16"  # the day since when kernels are timed as they are: earlier tables do not compare


def here(cluster: Cluster) -> Cluster:
    """A cluster known to be this machine: its kernels are those of this machine's table, whose name has everything that their
    times depend on, the pace they are told at too."""
    told = f"at {cluster.kinds[0].pace * 1e3:.4g} ms"
    name = f"{machine_name()} {len(cluster.node_ranks(0))} busy {told} {METHOD}"
    return replace(cluster, measured=replace(cluster.measured, kernels=name))


def plans_of(
    models: Iterable[str], ranks: LocalRanks | TorchrunRanks, *, batch: int | None = None, precision: str = "fp32"
) -> list[LoweredPlan]:
    """MODELs divided by data over the ranks, lowered as they run in a precision."""
    kind, seen = ranks.devices.kind, [load_workload(text, batch=batch, data=False) for text in models]
    plans = [(one.graph, one.plan("data", ranks=ranks.count)) for one in seen]
    return [lower_for_precision(graph, plan, precision=precision, device=kind) for graph, plan in plans]


def predict_on_ranks(
    lowered: LoweredPlan, ranks: LocalRanks | TorchrunRanks, *, cluster: Cluster | None, precision: Precision, optimizer: str
) -> Prediction | None:
    """A plan's step before the ranks run it; kernels that no table has are timed first, once each. None where nothing is known
    of how the ranks are joined: several hosts and no cluster given."""
    hosts = set(ranks(host_of_this_process))
    if cluster is None and len(hosts) > 1:
        return None
    if ranks.devices.kind != "cpu":
        return predict(lowered, _prices_on_gpus(lowered, ranks, cluster, precision), optimizer=optimizer)
    where = cluster or share(ranks, lambda: _local(ranks.count))
    if isinstance(where, Damaged):  # on all ranks
        raise where
    check_here(where, len(hosts))
    prices = measured_prices([lowered], where, ranks, precision=precision, rounds=ONCE)
    return predict(lowered, prices, optimizer=optimizer)


def _prices_on_gpus(
    lowered: LoweredPlan, ranks: LocalRanks | TorchrunRanks, cluster: Cluster | None, precision: Precision
) -> Prices:
    """With the kernels timed on these GPUs, if the cluster is theirs; of any other, what comes with Fourfold for it."""
    where = cluster or calibrated_gpus(ranks)
    if cluster is not None and cluster.measured.kernels != own_table(ranks):
        return known_prices(cluster, precision)
    return gpu_prices([lowered], where, ranks, precision=precision)


def _local(ranks: int) -> Cluster | Damaged:
    """This machine as it was calibrated, or what is wrong with that calibration."""
    try:
        return cluster_named(LOCAL, devices=ranks)
    except Damaged as error:
        return error


def check_here(cluster: Cluster, hosts: int) -> None:
    """Refuse a cluster that cannot be where these ranks run."""
    kind, nodes = cluster.device(0).kind, len({cluster.node(rank) for rank in range(cluster.size)})
    if kind != "cpu" or nodes != hosts:
        found = f"cluster {cluster.name!r} is of kind {kind} on {nodes} nodes, these ranks run on {hosts} hosts of kind cpu"
        raise InvalidInput(f"{found}; give the file that `fourfold calibrate` wrote here")


def timing(
    cluster: Cluster, ranks: LocalRanks | TorchrunRanks, precision: Precision
) -> Callable[[Iterable[LoweredPlan]], Prices]:
    """For the planner: times the kernels of plans on the ranks, which must be those of the cluster."""
    if ranks.devices.kind != "cpu":
        if cluster.measured.kernels != own_table(ranks):
            raise InvalidInput(
                f"cluster {cluster.name!r} was not calibrated on these GPUs; give the file that `fourfold calibrate` wrote "
                "here, or leave --measure out"
            )
        return partial(gpu_prices, cluster=cluster, ranks=ranks, precision=precision)
    check_here(cluster, len(set(ranks(host_of_this_process))))
    if precision not in TIMED_BY_SEARCH:
        known = " or ".join(TIMED_BY_SEARCH)
        raise InvalidInput(f"kernels are timed here in {known}, not in {precision}; leave --measure out")
    return partial(measured_prices, cluster=cluster, ranks=ranks, precision=precision, rounds=TWICE)


def measured_prices(
    plans: Iterable[LoweredPlan],
    cluster: Cluster,
    ranks: LocalRanks | TorchrunRanks,
    *,
    precision: Precision = "fp32",
    rounds: Rounds = ROUNDS,
) -> Prices:
    """Prices on the machine the ranks run on, every kernel of the lowered plans measured, those of all plans in turn. Times are
    kept for other plans."""
    cluster = here(cluster)
    name = cluster.measured.kernels
    known = share(ranks, lambda: load_kernels(name))
    missing = samples_of(plans, computed_as(precision), known)
    if missing:
        found = time_kernels(ranks, missing.values(), PRECISIONS[precision], rounds, cluster.kinds[0].pace)
        known = {**known, **found}
        if is_leader():
            add_kernels(name, found)
    return Prices(cluster=cluster, precision=precision, kernels=known)
