"""This machine, or the cluster torchrun started us on, measured for the predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold.calibrate.calibration import calibrated
from fourfold.calibrate.collectives import FULL
from fourfold.calibrate.kernel_table import add_kernels
from fourfold.calibrate.measured_prices import here, kernels_of
from fourfold.cluster import Cluster, save_calibration, save_cluster
from fourfold.cluster.cache import calibration_file
from fourfold.cluster.local import usable_cores
from fourfold.errors import InvalidInput
from fourfold.runtime.rank_pool import is_leader, rank_pool, under_torchrun

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
    progress: Progress = lambda words, done, total: None,
) -> CalibrationResult:
    """Measure collectives, rates and the kernels of `models` on local ranks, by default one per core, or on torchrun's.

    Without `output` the result is what ``local`` means from then on with so many ranks. Interrupted, what was measured is
    kept.
    """
    if output is None and under_torchrun():
        raise InvalidInput("a cluster measured under torchrun needs a file; give -o FILE.toml")
    with rank_pool(ranks if ranks is not None or under_torchrun() else usable_cores()) as pool:
        if pool.count == 1:
            raise InvalidInput("--ranks 1 has nothing to exchange; calibrate with 2 or more")
        path = Path(output) if output is not None else calibration_file(pool.count)
        samples = kernels_of(models, pool, batch=batch)
        so_far = None
        try:
            name = path.stem if output is not None else "local"
            effort = replace(FULL, rounds=rounds or FULL.rounds)
            for so_far in calibrated(pool, name=name, effort=effort, kernels=samples):
                progress(so_far.next, so_far.done, so_far.of)
        finally:  # interrupted, too
            if is_leader() and so_far is not None and so_far.done:
                cluster = here(so_far.cluster)
                (save_calibration if output is None else save_cluster)(cluster, path)
                if so_far.kernels:
                    add_kernels(cluster.measured.kernels, so_far.kernels)
        assert so_far is not None
        return CalibrationResult(cluster=here(so_far.cluster), path=path)
