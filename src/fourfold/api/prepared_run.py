"""Ranks made ready to run a plan: what was captured is compared with eager PyTorch, and the step is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from fourfold.api.plan_choice import PlanChoice
from fourfold.api.settings import cluster_of, one_of
from fourfold.calibrate.measured_prices import predict_on_ranks
from fourfold.cluster import LOCAL, PRECISIONS, Cluster
from fourfold.errors import Damaged, InvalidInput, OutOfMemory
from fourfold.graph.spec import check_precision
from fourfold.oracle.predict import Prediction
from fourfold.plans import Plan
from fourfold.plans.spec.plan import check_runnable
from fourfold.runs.capture_check import refuse_together
from fourfold.runs.parallel import IN_EVAL_MODE
from fourfold.runs.verify import check_request
from fourfold.runtime.comm.world import placement_of_run
from fourfold.runtime.execution.precision import lower_for_precision
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.rank_pool import TorchrunRanks, check_count, is_leader, rank_pool, share
from fourfold.units import bytes_text
from fourfold.workload.materialise import materialise
from fourfold.workload.workload import Workload, load_workload

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """How many steps are run, in which precision, with which optimizer, and on which devices."""

    steps: int
    precision: str
    optimizer: str
    device: str
    share_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A workload and a plan on ranks. `prediction`: of a step, None where nothing was predicted."""

    workload: Workload
    plan: Plan
    ranks: LocalRanks | TorchrunRanks
    prediction: Prediction | None


@contextmanager
def prepared_run(
    choice: PlanChoice,
    setting: RunSetting,
    *,
    cluster: str | Cluster | None,
    predict: bool,
    note_unchecked: bool,
    say: Say,
    note: Say,
) -> Iterator[PreparedRun]:
    """The ranks with the workload and the plan they run. `note_unchecked`: add a note where the comparison with eager PyTorch
    was not possible."""
    plan = choice.load_plan()
    check_request(precision=setting.precision, optimizer=setting.optimizer, steps=setting.steps)
    count = choice.ranks if plan is None or choice.ranks is not None else plan.size
    with rank_pool(count, device=setting.device, share_gpu=setting.share_gpu) as pool:
        check_precision(setting.precision, pool.devices.kind)
        workload = _workload_on(pool, choice.model, batch=plan.batch if plan is not None else choice.batch, seed=choice.seed)
        if plan is None:
            plan = workload.plan(str(choice.strategy), ranks=pool.count, options=choice.options)
        module = workload.example.module
        if not module.training:
            note(IN_EVAL_MODE.format(type(module).__name__))
        plan.check(workload.graph)
        check_count(plan, pool.count)
        say("comparing what was captured with eager PyTorch")
        reason = refuse_together(lambda: workload, partial(share, pool))
        if reason is not None and note_unchecked:
            note(reason)
        prediction = _prediction(pool, workload, plan, setting, cluster, say, note) if predict else None
        try:
            yield PreparedRun(workload=workload, plan=plan, ranks=pool, prediction=prediction)
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
    setting: RunSetting,
    cluster: str | Cluster | None,
    say: Say,
    note: Say,
) -> Prediction | None:
    """The step predicted before it is run; None, and a note, where this machine's own calibration is damaged."""
    lowered = lower_for_precision(workload.graph, plan, precision=setting.precision, device=pool.devices.kind)
    check_runnable(plan)
    own = cluster is None or (cluster == LOCAL and pool.devices.kind != "cpu")  # `local` by name is for processors
    where = cluster_of(cluster, pool.count) if cluster is not None and not own else None
    say("timing kernels")
    exact = one_of("precision", setting.precision, PRECISIONS)
    try:
        prediction = predict_on_ranks(lowered, pool, cluster=where, precision=exact, optimizer=setting.optimizer)
    except Damaged as error:  # which only the prediction needs
        note(f"no prediction is made: {error}")
        return None
    running = pool(placement_of_run, pool.count, pool.devices.kind)[0]
    for difference in prediction.prices.placement.differences(running) if prediction is not None else ():
        note(f"{difference}; --cluster says what the prediction is for")
    return prediction
