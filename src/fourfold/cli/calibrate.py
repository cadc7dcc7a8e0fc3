"""The command that measures this machine, or the cluster torchrun started it on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import Batch, Json, RankCount
from fourfold.errors import InvalidInput

KERNELS = "Time the kernels of this MODEL too, divided by data over the ranks; may be given several times."

ROUNDS = "How often everything is measured, 8 times if nothing is said: what strays, up to three times as often."


def calibrate(
    ranks: RankCount = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cluster to this TOML file.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help=KERNELS, show_default=False)] = None,
    batch: Batch = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help=ROUNDS)] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine with N ranks, or the cluster under torchrun: collectives, rates, kernels.

    Without -o the result is what `local` means from then on with so many ranks. Interrupted, what was measured is kept.
    """
    voice = Console(json=as_json)
    with voice.counting("starting the ranks") as told:
        from fourfold.calibrate.calibration import calibrated
        from fourfold.calibrate.collectives import FULL
        from fourfold.calibrate.kernel_table import add_kernels
        from fourfold.calibrate.measured_prices import here, kernels_of
        from fourfold.cluster import save_calibration, save_cluster
        from fourfold.cluster.cache import calibration_file
        from fourfold.cluster.local import usable_cores
        from fourfold.report.calibration import calibration_record, calibration_text
        from fourfold.runtime.rank_pool import is_leader, rank_pool, under_torchrun

        if output is None and under_torchrun():
            raise InvalidInput("a cluster measured under torchrun needs a file; give -o FILE.toml")
        with rank_pool(ranks if ranks is not None or under_torchrun() else usable_cores()) as team:
            if team.count == 1:
                raise InvalidInput("--ranks 1 has nothing to exchange; calibrate with 2 or more")
            path = output or calibration_file(team.count)
            wanted = kernels_of(model or (), team, batch=batch)
            so_far = None
            try:
                name = output.stem if output is not None else "local"
                effort = replace(FULL, rounds=rounds or FULL.rounds)
                for so_far in calibrated(team, name=name, effort=effort, kernels=wanted):
                    told(so_far.next, so_far.done, so_far.of)
            finally:  # interrupted, too
                if is_leader() and so_far is not None and so_far.done:
                    cluster = here(so_far.cluster)
                    (save_calibration if output is None else save_cluster)(cluster, path)
                    if so_far.kernels:
                        add_kernels(cluster.measured.kernels, so_far.kernels)
            assert so_far is not None
            cluster = here(so_far.cluster)
    record = calibration_record(cluster, file=str(path))
    voice.answer(record, lambda: calibration_text(cluster, file=str(path)))
