"""What the comparisons share: contenders take turns step by step in the same processes, then medians and paired ratios.

A contender is a function that does one training step and returns its loss where it has one (a pipeline's last rank). The
first steps are not timed; their losses must be those of the plain model, so that only equal work is compared.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import write_record
from torch import Tensor

from fourfold.models import MODELS

Step = Callable[[], Tensor | None]
Times = dict[str, list[float]]

WARM_UP = 2
LOSS_TOLERANCE = 1e-4  # of float32 after two steps, summed in another order


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def example(name: str, arguments: Mapping[str, Any]) -> Any:
    """The same model, inputs, targets and loss at every call."""
    torch.manual_seed(0)
    return MODELS[name](**arguments)


def plain_losses(name: str, arguments: Mapping[str, Any]) -> list[float]:
    """What one process sees in the steps that are not timed."""
    model, inputs, targets, loss = example(name, arguments)
    optimizer, out = sgd(model.parameters()), []
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        value = loss(model(*inputs), *targets)
        value.backward()
        optimizer.step()
        out.append(float(value.detach()))
    return out


def interleaved(steps: Mapping[str, Step], rounds: int, expected: Mapping[str, Sequence[float]]) -> Times:
    """Seconds of each contender's steps, `rounds` of them after the warm-up; the order turns round every time.

    `expected` holds the plain model's losses for each contender that does the plain model's work.
    """
    times: Times = {key: [] for key in steps}
    losses: dict[str, list[float | None]] = {key: [] for key in steps}
    for k in range(WARM_UP + rounds):
        for key in steps if k % 2 else reversed(list(steps)):
            seconds, loss = _timed(steps[key])
            if k < WARM_UP:
                losses[key].append(None if loss is None else float(loss.detach()))
            else:
                times[key].append(seconds)
        if k == WARM_UP - 1:
            _check(losses, expected)
    return times


def _timed(step: Step) -> tuple[float, Tensor | None]:
    _barrier()
    start = time.perf_counter()
    loss = step()
    _barrier()
    return time.perf_counter() - start, loss


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _check(losses: Mapping[str, Sequence[float | None]], expected: Mapping[str, Sequence[float]]) -> None:
    """The mean over the ranks that have a loss is the plain one, in every step."""
    everyone: list[Any] = [losses]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, losses)
    for key, plain in expected.items():
        for k, want in enumerate(plain):
            got = statistics.fmean(rank[key][k] for rank in everyone if rank[key][k] is not None)
            if not math.isclose(got, want, rel_tol=LOSS_TOLERANCE):
                raise RuntimeError(f"{key}: loss {got} in step {k}, the plain model's is {want}; unequal work is not compared")


def comparison(times: Times, *, peer: str, ours: str) -> dict[str, Any]:
    """Medians, their ratio and the median of paired ratios: above 1, ours is faster."""
    medians = {key: statistics.median(times[key]) for key in (peer, ours)}
    paired = [a / b for a, b in zip(times[peer], times[ours], strict=True)]
    return {
        "peer_seconds": medians[peer],
        "ours_seconds": medians[ours],
        "throughput_ratio": medians[peer] / medians[ours],
        "paired_median_ratio": statistics.median(paired),
    }


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['model']} on {row['ranks']}: {row['peer']} {row['peer_seconds'] * 1e3:.0f} ms, "
        f"{row.get('ours', 'ours')} {row['ours_seconds'] * 1e3:.0f} ms, throughput {row['throughput_ratio']:.3f} x "
        f"(paired median {row['paired_median_ratio']:.3f})"
    )


def parser(*, ranks: str, models: Iterable[str]) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser()
    out.add_argument("--models", default=",".join(models))
    out.add_argument("--rounds", type=int, default=15)
    out.add_argument("--ranks", default=ranks)
    out.add_argument("-o", "--output")
    return out


def write(path: str | None, method: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raw results with how they were obtained."""
    if not path:
        return
    about = {
        "date": datetime.date.today().isoformat(),
        "method": method,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "sockets": bool(os.environ.get("FOURFOLD_SOCKETS")),
    }
    write_record(Path(path), {**about, "rows": list(rows)})
