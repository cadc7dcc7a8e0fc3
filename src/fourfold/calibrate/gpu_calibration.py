"""The GPUs of this machine, or of the cluster torchrun started us on, measured: a `Cluster` with curves of every collective.

As `calibration` does with processors: the same kinds of collectives, in the same groups and at the same sizes. GPUs keep
their clocks, so that times are not normalised to a reference speed, and each kernel is timed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fourfold.calibrate.calibration import LEAST, Progress, linked, requests
from fourfold.calibrate.collective_calls import CurveRequest
from fourfold.calibrate.collectives import Effort
from fourfold.calibrate.gpu_collectives import time_gpu_collective
from fourfold.calibrate.gpu_machine import NETWORK, NODE
from fourfold.calibrate.gpu_prices import described_gpus, parts, timed_on_gpus
from fourfold.calibrate.kernel_table import rounded
from fourfold.calibrate.kernels import Sample
from fourfold.calibrate.robust_stats import interquartile_mean, interquartile_range, strays
from fourfold.cluster import Cluster, Curve, Measured
from fourfold.oracle.prices.kernels import Kernel
from fourfold.oracle.prices.prices import KernelTime
from fourfold.runtime.comm.shared.memory import host_of_this_process
from fourfold.runtime.rank_pool import RankPool

GPU_EFFORT = Effort(rounds=3)

Points = dict[CurveRequest, dict[float, list[float]]]
"""By collective and size, its times."""


def calibrated_on_gpus(
    ranks: RankPool,
    *,
    name: str = "calibrated",
    effort: Effort = GPU_EFFORT,
    kernels: Sequence[Sample] = (),
    sums: Sequence[Kernel] = (),
    precision: str = "fp32",
) -> Iterator[Progress]:
    """Clusters of ever more measurements, the last complete; an interrupted calibration leaves the one before."""
    kind, base = ranks.devices.kind, described_gpus(ranks, name)
    wanted = requests(ranks(host_of_this_process), within=NODE, across=NETWORK, shared=False) if ranks.count > 1 else []
    points: Points = {request: {} for request in wanted}
    times: dict[str, KernelTime] = {}
    todo = list(parts(kernels, sums))
    done, of = 0, len(todo) + effort.rounds * len(wanted)

    def progress(words: str) -> Progress:
        return Progress(cluster=_cluster(base, points), kernels=times, done=done, of=max(of, done), next=words)

    for some, added in todo:
        yield progress(f"{len(some) + len(added)} kernels of {len(kernels) + len(sums)}")
        times |= timed_on_gpus(ranks, some, added, precision)
        done += 1
    for number in range(effort.most):
        again = [request for request in wanted if number < effort.rounds or any(map(strays, points[request].values()))]
        of = max(of, done + len(again))
        for request in again:
            count, size = len(request.groups), len(request.groups[0])
            yield progress(f"{request.collective} in {count} x {size} ranks over {request.level}")
            for bytes_sent, seconds in ranks(time_gpu_collective, request, effort.sizes, kind)[request.groups[0][0]]:
                points[request].setdefault(bytes_sent, []).append(seconds)
            done += 1
    of = done
    yield progress("")


def _cluster(base: Cluster, points: Points) -> Cluster:
    """The cluster as far as it is known."""
    curves = tuple(_curve(request, found) for request, found in points.items() if found)
    links = tuple(linked(link, [curve for curve in curves if curve.level == link.name]) for link in base.links)
    return replace(base, links=links, measured=Measured(curves=curves, kernels=base.measured.kernels))


def _curve(request: CurveRequest, found: dict[float, list[float]]) -> Curve:
    return Curve(
        collective=request.collective,
        level=request.level,
        ranks=len(request.groups[0]),
        groups=len(request.groups),
        sizes=tuple(found),
        seconds=tuple(rounded(max(interquartile_mean(times), LEAST)) for times in found.values()),
        spreads=tuple(rounded(interquartile_range(times)) for times in found.values()),
        source=f"calibration, middle of {max(map(len, found.values()))} rounds, torch {torch.__version__}",
    )
