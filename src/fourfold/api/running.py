"""Plans run on ranks: compared with one process, or trained. `prepared_run` makes the ranks ready."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fourfold.api.plan_choice import PlanChoice
from fourfold.api.prepared_run import RunSetting, Say, prepared_run
from fourfold.cluster import Cluster
from fourfold.errors import Notice
from fourfold.oracle.predict import Prediction
from fourfold.plans import Options, Plan
from fourfold.runs.reference import Reference
from fourfold.runs.train import History
from fourfold.runs.train import train as run_training
from fourfold.runs.verify import Verdict
from fourfold.runs.verify import verify as compare
from fourfold.runtime.host.devices import own_device
from fourfold.workload.workload import Workload

__all__ = ["Plan", "Prediction", "TrainResult", "VerifyResult", "train", "verify"]


def _silent(text: str) -> None:
    """Show no progress."""


def _warn(text: str) -> None:
    """What the user should know, as a `Notice`."""
    warnings.warn(text, Notice, stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What `verify` found of a plan. `prediction`: its step as predicted before the run, None where nothing was predicted."""

    plan: Plan
    verdict: Verdict
    prediction: Prediction | None

    @property
    def equal(self) -> bool:
        """Whether the plan gives the numbers of one process."""
        return self.verdict.equal


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A training run. `prediction`: its step as predicted before the run, None where nothing was predicted."""

    plan: Plan
    history: History
    prediction: Prediction | None


def verify(
    model: str | Workload,
    *,
    plan: Plan | Path | str | None = None,
    strategy: str | None = None,
    options: Options | None = None,
    ranks: int | None = None,
    batch: int | None = None,
    steps: int = 3,
    precision: str = "fp64",
    optimizer: str = "sgd",
    device: str = "auto",
    share_gpu: bool = False,
    seed: int = 0,
    cluster: str | Cluster | None = None,
    predict: bool = True,
    say: Say = _silent,
    note: Say = _warn,
) -> VerifyResult | None:
    """Whether a plan (or a strategy) on local ranks, or torchrun's, gives the numbers of one process. Under torchrun the result
    is None on every rank but the first."""
    choice = PlanChoice(model=model, plan=plan, strategy=strategy, options=options, ranks=ranks, batch=batch, seed=seed)
    setting = RunSetting(steps=steps, precision=precision, optimizer=optimizer, device=device, share_gpu=share_gpu)
    with prepared_run(choice, setting, cluster=cluster, predict=predict, note_unchecked=False, say=say, note=note) as run:
        where = own_device(run.ranks.devices.kind)
        reference = Reference(workload=run.workload, optimizer=optimizer, steps=steps, device=where)
        verdict = compare(run.workload, run.plan, run.ranks, reference=reference, precision=precision, measured=True, say=say)
    return VerifyResult(plan=run.plan, verdict=verdict, prediction=run.prediction) if verdict is not None else None


def train(
    model: str | Workload,
    *,
    plan: Plan | Path | str | None = None,
    strategy: str | None = None,
    options: Options | None = None,
    ranks: int | None = None,
    batch: int | None = None,
    steps: int = 10,
    data: str = "synthetic",
    precision: str = "fp32",
    optimizer: str = "sgd",
    device: str = "auto",
    share_gpu: bool = False,
    seed: int = 0,
    cluster: str | Cluster | None = None,
    predict: bool = True,
    allow_nan: bool = False,
    on_step: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
    say: Say = _silent,
    note: Say = _warn,
) -> TrainResult:
    """Train a model by a plan (or a strategy) on local ranks, or torchrun's, with made-up data or a set of examples. `on_step`
    is called with each step's number, loss and seconds; a loss that is NaN or infinite ends the run, unless `allow_nan`."""
    choice = PlanChoice(model=model, plan=plan, strategy=strategy, options=options, ranks=ranks, batch=batch, seed=seed)
    setting = RunSetting(steps=steps, precision=precision, optimizer=optimizer, device=device, share_gpu=share_gpu)
    with prepared_run(choice, setting, cluster=cluster, predict=predict, note_unchecked=True, say=say, note=note) as run:
        say(f"starting {run.plan.size} ranks")
        history = run_training(
            run.workload,
            run.plan,
            run.ranks,
            steps=steps,
            precision=precision,
            optimizer=optimizer,
            seed=seed,
            data=data,
            allow_nan=allow_nan,
            on_step=on_step,
        )
    return TrainResult(plan=run.plan, history=history, prediction=run.prediction)
