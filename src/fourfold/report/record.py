"""The figures as plain data under the keys that scripts rely on: what `--json` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fourfold.plans import Compute, LoweredPlan, Plan, Program
from fourfold.plans.spec.plan_file import plan_data
from fourfold.report.survey import Survey

if TYPE_CHECKING:
    from fourfold.oracle.predict import Prediction
    from fourfold.runs.train import History
    from fourfold.runs.verify import Check, Verdict


VERSION = 1  # of the records of runs; `runs` reads them


def survey_record(survey: Survey, *, model: str) -> dict[str, Any]:
    """`inspect --json`."""
    return {
        "model": model,
        "graph": survey.graph,
        "batch": survey.batch,
        "batch_fixed": survey.batch_fixed,
        "ops": survey.total("ops"),
        "parameters": survey.total("parameters"),
        "flops": survey.total("flops"),
        "saved_bytes": survey.total("saved_bytes"),
        "groups": [asdict(group) for group in survey.groups],
        "limits": [asdict(limit) for limit in survey.limits],
        "ops_without_rule": [{"op": path, "target": target} for path, target in survey.without_rule],
    }


def verify_record(
    verdict: Verdict,
    plan: Plan,
    *,
    model: str,
    precision: str,
    optimizer: str,
    steps: int,
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    """`verify --json`. Predictions are null where there are none."""
    worst = verdict.worst
    return {
        "version": VERSION,
        "model": model,
        "graph": plan.graph,
        "strategy": plan.strategy,
        "ranks": plan.size,
        "plan": plan_data(plan),
        "precision": precision,
        "optimizer": optimizer,
        "steps": steps,
        "equal": verdict.equal,
        "loss_error": finite(verdict.error("loss")),
        "gradient_error": finite(verdict.error("gradient")),
        "parameter_error": finite(verdict.error("parameter", "buffer")),
        "output_error": finite(verdict.error("output")),
        "noise_floor": finite(verdict.noise_floor),
        "worst": check_record(worst),
        "reference": verdict.reference,
        "nonfinite_step": verdict.bad_step,
        "plain_rule": verdict.plain,
        "checks": [check_record(check) for check in verdict.checks],
        **work_record(verdict.program),
        **prediction_record(prediction),
        "measured_seconds": verdict.seconds,
        "measured_peak_bytes": max(verdict.peaks, default=None),
        "waiting": list(verdict.waiting) or None,
    }


def check_record(check: Check) -> dict[str, Any]:
    return {
        "tensor": check.tensor,
        "what": check.what,
        "step": check.step,
        "error": finite(check.error),
        "limit": finite(check.limit),
        "holds": check.holds,
    }


def prediction_record(prediction: Prediction | None) -> dict[str, Any]:
    """The predicted step and peak; nulls without a prediction."""
    return {
        "predicted_seconds": prediction.estimate.step_seconds if prediction is not None else None,
        "predicted_interval_seconds": list(prediction.estimate.interval) if prediction is not None else None,
        "predicted_peak_bytes": prediction.peak_bytes if prediction is not None else None,
    }


def train_record(
    history: History,
    plan: Plan,
    *,
    model: str,
    precision: str,
    optimizer: str,
    prediction: Prediction | None = None,
    trace: str | None = None,
) -> dict[str, Any]:
    """`train --json`."""
    return {
        "version": VERSION,
        "model": model,
        "graph": plan.graph,
        "strategy": plan.strategy,
        "ranks": plan.size,
        "batch": plan.batch,
        "precision": precision,
        "optimizer": optimizer,
        "steps": len(history.losses),
        "losses": [finite(loss) for loss in history.losses],
        "accuracy": history.accuracy.fraction if history.accuracy is not None else None,
        "held_out": history.accuracy.examples if history.accuracy is not None else None,
        "nonfinite_step": history.bad_step,
        "step_seconds": history.step_seconds,
        "samples_per_second": history.samples_per_second,
        **prediction_record(prediction),
        "peak_bytes": list(history.peaks),
        "trace": trace,
        "waiting": list(history.waiting) or None,
    }


def finite(number: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return number if math.isfinite(number) else None


def whole_ops(lowered: LoweredPlan) -> list[Compute]:
    """Ops that every rank of their stage runs in full: those without a rule, and layers too thin for every axis."""
    return [compute for part in lowered.parts for compute in _whole_ops(part.program)]


def _whole_ops(program: Program) -> list[Compute]:
    wide = {axis for axis in program.mesh.names if program.mesh.extent(axis) > 1}
    thin = [c for c in program.computes() if c.nest.anchor and wide and not wide & set(c.split_axes)]
    return [*(program.replicated if wide else ()), *thin]


def work_record(program: LoweredPlan) -> dict[str, Any]:
    """How much of the work is split, and what is not."""
    values, whole = program.graph.at(program.plan.batch).values, whole_ops(program)
    return {
        "split_flops_fraction": program.split_flops_fraction,
        "ops_replicated": [compute.op.path for compute in whole],
        "replicated_bytes": sum(values[name].bytes for compute in whole for name in compute.op.operands),
    }
