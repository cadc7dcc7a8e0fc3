"""This machine, or the cluster torchrun started us on, measured for the predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold.api.settings import one_of
from fourfold.calibrate.calibration import Progress as Measurements
from fourfold.calibrate.calibration import calibrated
from fourfold.calibrate.collectives import FULL
from fourfold.calibrate.gpu_calibration import GPU_EFFORT, calibrated_on_gpus
from fourfold.calibrate.gpu_prices import gpus_of, gradient_kernels
from fourfold.calibrate.kernel_table import add_kernels, table_name
from fourfold.calibrate.kernels import samples_of
from fourfold.calibrate.measured_prices import here, plans_of
from fourfold.cluster import PRECISIONS, Cluster, Precision, save_calibration, save_cluster
from fourfold.cluster.cache import calibration_file
from fourfold.cluster.local import usable_cores
from fourfold.errors import InvalidInput
from fourfold.graph.spec import check_precision, computed_as
from fourfold.plans import LoweredPlan
from fourfold.runtime.host.devices import gpu_count
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import TorchrunRanks, is_leader, rank_pool, under_torchrun

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The measured cluster and the file it was written to."""

    cluster: Cluster
    path: Path


def calibrate(
    ranks: int | None = None,
    *,
    output: Path | str | None = None,
    models: Sequence[str] = (),
    batch: int | None = None,
    rounds: int | None = None,
    precision: str = "fp32",
    device: str = "auto",
    share_gpu: bool = False,
    progress: Progress = lambda words, done, total: None,
) -> CalibrationResult:
    """Measure collectives, rates and the kernels of `models`, in a precision, on local ranks, by default one per core or GPU,
    or on torchrun's.

    Without `output` the result is what ``local`` means from then on with so many ranks. Interrupted, what was measured is
    kept.
    """
    if output is None and under_torchrun():
        raise InvalidInput("a cluster measured under torchrun needs a file; give -o FILE.toml")
    exact = one_of("precision", precision, PRECISIONS)
    count = ranks if ranks is not None or under_torchrun() else default_ranks(device)
    with rank_pool(count, device=device, share_gpu=share_gpu) as pool:
        gpus = pool.devices.kind != "cpu"
        if pool.count == 1:
            raise InvalidInput(f"--ranks 1 has nothing to exchange; calibrate with 2 or more{', or --share-gpu' * gpus}")
        check_precision(precision, pool.devices.kind)
        path = Path(output) if output is not None else calibration_file(pool.count, gpus_of(pool) if gpus else "")
        plans = plans_of(models, pool, batch=batch, precision=precision)
        name = path.stem if output is not None else "local"
        measure = _on_gpus if gpus else _on_processors
        so_far = None
        try:
            for so_far in measure(pool, plans, name=name, precision=exact, rounds=rounds):
                progress(so_far.next, so_far.done, so_far.of)
        finally:  # interrupted, too
            if is_leader() and so_far is not None and so_far.done:
                (save_calibration if output is None else save_cluster)(so_far.cluster, path)
                if so_far.kernels:
                    add_kernels(table_name(so_far.cluster, exact), so_far.kernels)
        assert so_far is not None
        return CalibrationResult(cluster=so_far.cluster, path=path)


def default_ranks(device: str) -> int:
    """A rank for each GPU, if there are two or more or GPUs are asked for; else for each core."""
    gpus = gpu_count() if device != "cpu" else 0
    return max(gpus, 1) if gpus > 1 or device == "cuda" else usable_cores()


def _on_processors(
    pool: LocalRanks | TorchrunRanks, plans: Sequence[LoweredPlan], *, name: str, precision: Precision, rounds: int | None
) -> Iterator[Measurements]:
    samples = list(samples_of(plans, computed_as(precision)).values())
    effort = replace(FULL, rounds=rounds or FULL.rounds)
    for so_far in calibrated(pool, name=name, effort=effort, kernels=samples, precision=precision):
        yield replace(so_far, cluster=here(so_far.cluster))


def _on_gpus(
    pool: LocalRanks | TorchrunRanks, plans: Sequence[LoweredPlan], *, name: str, precision: Precision, rounds: int | None
) -> Iterator[Measurements]:
    dtypes = computed_as(precision)
    return calibrated_on_gpus(
        pool,
        name=name,
        effort=replace(GPU_EFFORT, rounds=rounds or GPU_EFFORT.rounds),
        kernels=list(samples_of(plans, dtypes).values()),
        sums=gradient_kernels(plans, dtypes),
        precision=precision,
    )
