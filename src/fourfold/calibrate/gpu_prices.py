"""Prices of a plan on the GPUs that will run it: kernels that no table has are timed on the device first, once each.

One rank of each GPU of the first host times, its share of the kernels, while ranks that share its GPU wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from fourfold.calibrate.gpu_kernels import LEAST_HOST, DeviceKernel, DeviceTime, engine_seconds, sum_seconds
from fourfold.calibrate.gpu_machine import gpu_cluster, gpu_kernels_name, gpu_name, measure_gpu, release
from fourfold.calibrate.kernel_table import add_kernels, load_kernels, rounded, table_name
from fourfold.calibrate.kernels import Sample, samples_of
from fourfold.cluster import Cluster, Precision
from fourfold.cluster.cache import calibration_file
from fourfold.cluster.files import load_calibration
from fourfold.errors import Damaged, InvalidInput, Notice
from fourfold.graph.spec import computed_as
from fourfold.oracle.prices.kernels import Kernel
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.oracle.time.gradient_fan_in import gradient_sums
from fourfold.plans.lists.lowered_plan import LoweredPlan
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.runtime.comm.shared.memory import host_of_this_process
from fourfold.runtime.execution.precision import PRECISIONS, matrix_mode
from fourfold.runtime.host.devices import own_device
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import RankPool, TorchrunRanks, is_leader, share

METHOD = "2026-11-20"  # the day since when kernels are timed as they are: earlier tables do not compare
AT_ONCE = 64  # kernels timed in one call of the ranks

Times = tuple[dict[str, KernelTime], dict[str, str]]
"""Kernels timed, and why others could not be, by key."""


def gpus_of(ranks: RankPool) -> str:
    """The GPUs of the ranks in words, the same for each; as in the name of their calibration."""
    names = sorted(set(ranks(gpu_name, ranks.devices.kind)))
    if len(names) > 1:
        raise InvalidInput(f"the ranks are on different GPUs, {' and '.join(names)}; use GPUs of one kind")
    return f"{min(ranks.devices.gpus, ranks.count)} {names[0]}"


def calibrated_gpus(ranks: LocalRanks | TorchrunRanks) -> Cluster:
    """The GPUs as they were calibrated with so many ranks; else measured for a second, with links that are assumed. Refuses a
    calibration that is damaged."""
    path = calibration_file(ranks.count, gpus_of(ranks))

    def stored() -> Cluster | Damaged | None:
        try:
            return load_calibration(path, ranks.count) if path.is_file() else None
        except Damaged as error:
            return error

    found = share(ranks, stored)
    if isinstance(found, Damaged):  # on all ranks
        raise found
    return found or described_gpus(ranks, "local")


def described_gpus(ranks: RankPool, name: str) -> Cluster:
    """The ranks as a cluster with its table of kernels, and links that are assumed."""
    kind, hosts = ranks.devices.kind, ranks(host_of_this_process)
    cluster = gpu_cluster(name, hosts, ranks(_measured_alone, kind, gpu_users(ranks, hosts)[:1])[0], ranks.devices)
    return replace(cluster, measured=replace(cluster.measured, kernels=own_table(ranks)))


def own_table(ranks: RankPool) -> str:
    """The name of the table of kernels of the ranks' GPUs."""
    return f"{ranks(gpu_kernels_name, ranks.devices.kind)[0]} {METHOD}"


def gpu_users(ranks: RankPool, hosts: Sequence[str]) -> list[int]:
    """A rank for each GPU of the first host."""
    return [k for k, host in enumerate(hosts) if host == hosts[0]][: max(ranks.devices.gpus, 1)]


def _measured_alone(kind: str, timers: Sequence[int]) -> object:
    """The facts of the device on the ranks named; all ranks must call."""
    facts = measure_gpu(kind) if dist.get_rank() in timers else None
    release(own_device(kind))
    dist.all_reduce(torch.zeros(1))  # by gloo: others leave the devices alone meanwhile
    return facts


def gpu_prices(
    plans: Iterable[LoweredPlan], cluster: Cluster, ranks: LocalRanks | TorchrunRanks, *, precision: Precision
) -> Prices:
    """Prices on the GPUs that the ranks run on, every kernel of the lowered plans timed where that is possible."""
    name = table_name(cluster, precision)
    known = share(ranks, lambda: load_kernels(name))
    plans = list(plans)
    missing = list(samples_of(plans, computed_as(precision), known).values())
    sums = [kernel for kernel in gradient_kernels(plans, computed_as(precision)) if kernel.key not in known]
    for part in parts(missing, sums):
        found = timed_on_gpus(ranks, *part, precision)
        known = {**known, **found}
        if is_leader():
            add_kernels(name, found)
    return Prices(cluster=cluster, precision=precision, kernels=known)


def gradient_kernels(plans: Iterable[LoweredPlan], dtypes: Mapping[str, str]) -> list[Kernel]:
    """The distinct sums of gradients in lowered plans."""
    found: dict[str, Kernel] = {}
    for lowered in plans:
        for program in (program for part in lowered.parts for program in part.programs.values()):
            for members in rank_classes(program.mesh, [program]):
                sums = gradient_sums(program, program.mesh.coords(members[0]), lowered.cut.live, dtypes)
                found |= {kernel.key: kernel for _, kernel in sums}
    return list(found.values())


def parts(samples: Sequence[Sample], sums: Sequence[Kernel]) -> Iterator[tuple[Sequence[Sample], Sequence[Kernel]]]:
    """Kernels, some at once."""
    yield from ((samples[k : k + AT_ONCE], ()) for k in range(0, len(samples), AT_ONCE))
    yield from (((), sums[k : k + AT_ONCE]) for k in range(0, len(sums), AT_ONCE))


def timed_on_gpus(ranks: RankPool, some: Sequence[Sample], sums: Sequence[Kernel], precision: str) -> dict[str, KernelTime]:
    """Kernels timed on the ranks' GPUs; those that cannot be are named in a `Notice`."""
    timers = gpu_users(ranks, ranks(host_of_this_process))
    times: dict[str, KernelTime] = {}
    for found, failed in ranks(time_on_gpu, some, sums, precision, ranks.devices.kind, timers):
        times |= found
        for key, why in failed.items():
            op = key.partition("|")[0]
            warnings.warn(f"{op} cannot be timed by itself, it is priced by formulas: {why}", Notice, stacklevel=2)
    return times


def time_on_gpu(some: Sequence[Sample], sums: Sequence[Kernel], precision: str, kind: str, timers: Sequence[int]) -> Times:
    """This rank's share of some kernels, timed on its device; all ranks must call."""
    times: dict[str, KernelTime] = {}
    failed: dict[str, str] = {}
    if dist.get_rank() in timers:
        turn = timers.index(dist.get_rank())
        wanted: list[Sample | Kernel] = [*some, *sums]
        times, failed = time_all(wanted[turn :: len(timers)], precision, own_device(kind))
        release(own_device(kind))
    dist.all_reduce(torch.zeros(1))  # by gloo: others leave the devices alone meanwhile
    return times, failed


def time_all(wanted: Sequence[Sample | Kernel], precision: str, device: torch.device) -> Times:
    """Kernels, and sums of gradients, timed on a device by their keys."""
    times: dict[str, KernelTime] = {}
    failed: dict[str, str] = {}
    with matrix_mode(precision):
        engine = engine_seconds(device)
        for one in wanted:
            key = one.key if isinstance(one, Kernel) else one.kernel.key
            try:
                times[key] = _kernel_time(_timed(one, precision, device), engine)
            except RuntimeError as error:  # out of memory, or no such kernel for these dtypes
                failed[key] = str(error).partition("\n")[0][:200]
    return times, failed


def _timed(one: Sample | Kernel, precision: str, device: torch.device) -> DeviceTime:
    if isinstance(one, Kernel):
        return sum_seconds(one, device)
    return DeviceKernel(one, device, dtypes=PRECISIONS[precision]).device_time()


def _kernel_time(found: DeviceTime, engine: float) -> KernelTime:
    """As prices take it. A backward's host seconds are without those of the engine, which a step enters once."""
    return KernelTime(
        forward=rounded(found.forward),
        backward=rounded(found.backward),
        spread=rounded(found.spread),
        host_seconds=(
            rounded(found.forward_host),
            rounded(max(found.backward_host - engine, LEAST_HOST)) if found.backward_host else 0.0,
        ),
    )
