"""The command that measures this machine, or the cluster torchrun started it on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import Batch, Device, Json, Precision, RankCount, ShareGpu

KERNELS = "Time the kernels of this MODEL too, divided by data over the ranks; may be given several times."

ROUNDS = "How often everything is measured, 8 times (GPUs: 3) if nothing is said: what strays, up to three times as often."


def calibrate(
    ranks: RankCount = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cluster to this TOML file.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help=KERNELS, show_default=False)] = None,
    batch: Batch = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help=ROUNDS)] = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    share_gpu: ShareGpu = False,
    as_json: Json = False,
) -> None:
    """Measure this machine with N ranks, or the cluster under torchrun: collectives, rates, kernels.

    Without -o the result is what `local` means from then on with so many ranks. Interrupted, what was measured is kept.
    """
    console = Console(json=as_json)
    with console.counting("starting the ranks") as progress:
        from fourfold.api.calibration import calibrate as measure
        from fourfold.report.calibration import calibration_record, calibration_text

        result = measure(
            ranks,
            output=output,
            models=model or (),
            batch=batch,
            rounds=rounds,
            precision=precision,
            device=device,
            share_gpu=share_gpu,
            progress=progress,
        )
    cluster, file = result.cluster, str(result.path)
    console.answer(calibration_record(cluster, file=file), lambda: calibration_text(cluster, file=file))
