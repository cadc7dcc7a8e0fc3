"""Plans run on ranks: compared with one process, or trained; before that, what was captured is compared with eager PyTorch and
the step is predicted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fourfold.api.settings import cluster_of, one_of
from fourfold.calibrate.measured_prices import predict_on_ranks
from fourfold.cluster import LOCAL, PRECISIONS, Cluster
from fourfold.errors import Damaged, InvalidInput, Notice, OutOfMemory
from fourfold.graph.spec import check_precision
from fourfold.oracle.predict import Prediction
from fourfold.plans import Options, Plan, load_plan
from fourfold.plans.spec.plan import check_runnable
from fourfold.plans.strategies.named import parse
from fourfold.runs.capture_check import refuse_together
from fourfold.runs.parallel import IN_EVAL_MODE
from fourfold.runs.reference import Reference
from fourfold.runs.train import History
from fourfold.runs.train import train as run_training
from fourfold.runs.verify import Verdict, check_request
from fourfold.runs.verify import verify as compare
from fourfold.runtime.comm.world import placement_of_run
from fourfold.runtime.execution.precision import lower_for_precision
from fourfold.runtime.host.devices import own_device
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import TorchrunRanks, check_count, is_leader, rank_pool, share
from fourfold.units import bytes_text
from fourfold.workload.materialise import materialise
from fourfold.workload.workload import Workload, load_workload

__all__ = ["Plan", "Prediction", "TrainResult", "VerifyResult", "train", "verify"]

Say = Callable[[str], None]


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


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A workload and a plan on ranks."""

    workload: Workload
    plan: Plan
    ranks: LocalRanks | TorchrunRanks
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
    chosen = load_chosen_plan(plan, strategy, batch, options)
    with _prepared_run(
        model,
        chosen,
        strategy,
        options=options,
        ranks=ranks,
        batch=batch,
        seed=seed,
        cluster=cluster,
        precision=precision,
        optimizer=optimizer,
        steps=steps,
        device=device,
        share_gpu=share_gpu,
        predict=predict,
        say=say,
        note=note,
        note_unchecked=False,
    ) as run:
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
    chosen = load_chosen_plan(plan, strategy, batch, options)
    with _prepared_run(
        model,
        chosen,
        strategy,
        options=options,
        ranks=ranks,
        batch=batch,
        seed=seed,
        cluster=cluster,
        precision=precision,
        optimizer=optimizer,
        steps=steps,
        device=device,
        share_gpu=share_gpu,
        predict=predict,
        say=say,
        note=note,
        note_unchecked=True,
    ) as run:
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
            told=on_step,
        )
    return TrainResult(plan=run.plan, history=history, prediction=run.prediction)


def load_chosen_plan(
    plan: Plan | Path | str | None, strategy: str | None, batch: int | None, options: Options | None
) -> Plan | None:
    """The plan, read if it is a file, or None where a strategy is named; never both."""
    if (plan is None) == (strategy is None):
        raise InvalidInput("give either --plan FILE or --strategy NAME" + (", not both" if plan else ""))
    if plan is None:
        parse(str(strategy))
        return None
    what = "the plan" if isinstance(plan, Plan) else f"plan {plan}"
    loaded = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    if batch is not None and batch != loaded.batch:
        raise InvalidInput(f"{what} is for a batch of {loaded.batch}, --batch is {batch}; leave it out or plan again")
    if options is not None:
        _refuse_options(what, loaded, options)
    return loaded


def _refuse_options(what: str, plan: Plan, options: Options) -> None:
    """A plan says everything: refuse an option beside it, even one that agrees."""
    says = {
        "stages": f"{len(plan.parts)} stages" if plan.stages else "no stages",
        "microbatches": f"{plan.microbatches} micro-batches",
        "schedule": f"schedule {plan.schedule}",
        "recompute": f"{len(plan.recompute)} segments to recompute",
        "zero": f"zero {plan.zero}",
    }
    for name, words in says.items():
        value = getattr(options, name)
        if value is not None:
            raise InvalidInput(f"{what} says {words}, --{name} is {value}; leave --{name} out or plan again")
    if options.policy is not None:
        raise InvalidInput(f"{what} has a policy of its own; leave options.policy out or plan again")


@contextmanager
def _prepared_run(
    model: str | Workload,
    plan: Plan | None,
    strategy: str | None,
    *,
    options: Options | None,
    ranks: int | None,
    batch: int | None,
    seed: int,
    cluster: str | Cluster | None,
    precision: str,
    optimizer: str,
    steps: int,
    device: str,
    share_gpu: bool,
    predict: bool,
    say: Say,
    note: Say,
    note_unchecked: bool,
) -> Iterator[_Run]:
    """The ranks with the workload and the plan they run, compared with eager PyTorch and predicted. `note_unchecked`: say so
    where the comparison was not possible."""
    check_request(precision=precision, optimizer=optimizer, steps=steps)
    count = ranks if plan is None or ranks is not None else plan.size
    with rank_pool(count, device=device, share_gpu=share_gpu) as pool:
        check_precision(precision, pool.devices.kind)
        workload = _workload_on(pool, model, batch=plan.batch if plan is not None else batch, seed=seed)
        chosen = plan if plan is not None else workload.plan(str(strategy), ranks=pool.count, options=options)
        module = workload.example.module
        if not module.training:
            note(IN_EVAL_MODE.format(type(module).__name__))
        chosen.check(workload.graph)
        check_count(chosen, pool.count)
        say("comparing what was captured with eager PyTorch")
        reason = refuse_together(lambda: workload, partial(share, pool))
        if reason is not None and note_unchecked:
            note(reason)
        prediction = _prediction(pool, workload, chosen, cluster, precision, optimizer, say, note) if predict else None
        try:
            yield _Run(workload=workload, plan=chosen, ranks=pool, prediction=prediction)
        except OutOfMemory as error:
            if prediction is None:
                raise
            raise OutOfMemory(f"{error}; the peak predicted was {bytes_text(prediction.peak_bytes)}") from error


def _workload_on(pool: LocalRanks | TorchrunRanks, model: str | Workload, *, batch: int | None, seed: int) -> Workload:
    """The model with its data on this process; under torchrun the first rank captures a MODEL text for all."""
    if isinstance(model, Workload):
        if batch is not None and batch != model.batch:
            raise InvalidInput(f"the workload has a batch of {model.batch}, {batch} is asked for; give it inputs of that batch")
        return replace(model, example=materialise(model.example, seed=seed))
    own = load_workload(model, batch=batch, seed=seed) if is_leader() else None
    graph = share(pool, lambda: own.graph if own is not None else None)
    return own or load_workload(model, batch=batch, seed=seed, graph=graph)


def _prediction(
    pool: LocalRanks | TorchrunRanks,
    workload: Workload,
    plan: Plan,
    cluster: str | Cluster | None,
    precision: str,
    optimizer: str,
    say: Say,
    note: Say,
) -> Prediction | None:
    """The step predicted before it is run; None, and a note, where this machine's own calibration is damaged."""
    lowered = lower_for_precision(workload.graph, plan, precision=precision, device=pool.devices.kind)
    check_runnable(plan)
    own = cluster is None or (cluster == LOCAL and pool.devices.kind != "cpu")  # `local` by name is for processors
    where = cluster_of(cluster, pool.count) if cluster is not None and not own else None
    say("timing kernels")
    exact = one_of("precision", precision, PRECISIONS)
    try:
        prediction = predict_on_ranks(lowered, pool, cluster=where, precision=exact, optimizer=optimizer)
    except Damaged as error:  # which only the prediction needs
        note(f"no prediction is made: {error}")
        return None
    running = pool(placement_of_run, pool.count, pool.devices.kind)[0]
    for difference in prediction.prices.placement.differences(running) if prediction is not None else ():
        note(f"{difference}; --cluster says what the prediction is for")
    return prediction
