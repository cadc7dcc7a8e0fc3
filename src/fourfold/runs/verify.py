"""Does a plan give the numbers of one device? The meaning of "equal", check by check.

float64: loss, outputs and gradients of the first step, and parameters and buffers after it, within 1e-9; after the last
step within ``max(1e-9, 10 x floor)``. The floor is how far one process drifts when its inputs move by one unit in the
last place. Some networks carry rounding further than that tells: where a check fails, the floor is raised to what a few
runs of one process show in which every op rounds otherwise (`rounding.py`). float32: the distance to the float64 reference
is at most twice that of one-process float32. That distance is a matter of luck (one ReLU that rounds to the other side of
zero moves a small gradient by a part in a thousand), so where the plain run does not vouch for a result, a few more are
made with inputs moved by one unit in the last place. tf32 likewise. bf16 (autocast): the gradients taken together at most 1.5
times as far as one process in bf16, any tensor at most four times.

Parameters and buffers are compared by their change since the start, in units of that change, but of no less than the
root mean square of all changes: what stands before a batch norm has a gradient of zero, its change is rounding alone, and
so is its relative error. Trainable parameters and float buffers have each a mean of their own; integers must be the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import InvalidInput
from fourfold.graph.spec import check_precision
from fourfold.plans import LoweredPlan, Plan
from fourfold.plans.spec.plan import check_runnable
from fourfold.runs.compare import Distances, Worst, first_bad
from fourfold.runs.comparison_run import ComparisonRun, RunResult, execute_run, load_result, save_data
from fourfold.runs.measure import waiting
from fourfold.runs.reference import Reference
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import check_precision_name, lower_for_precision
from fourfold.runtime.host.scratch import temporary_paths
from fourfold.runtime.rank_pool import RankPool, check_count
from fourfold.workload.workload import Workload

TIGHT = 1e-9
DRIFT = 10.0  # times the floor, after the last step
TWICE = 2.0  # times the distance of one-process float32 or tf32
FOUR_TIMES, TOGETHER = 4.0, 1.5  # times that of one process in bf16: of any tensor, and of the gradients together
WHOLE = "whole gradient"
ULPS = 4 * 2.0**-23  # a float32 distance below a few units in the last place is no distance
NOISE = 1e-6  # relative change of the first loss beyond which no rounding is to blame
DRAWS = 8  # one-process runs tried before a check is called failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: what (loss, output, gradient, parameter, buffer), after which step, how far, and how far is allowed."""

    what: str
    step: int
    error: float
    limit: float
    tensor: str

    @property
    def holds(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found."""

    checks: tuple[Check, ...]
    reference: str
    noise_floor: float
    bad_step: int | None  # the first whose loss is NaN or infinite, on one process or by the plan
    plain: bool  # float32: within twice the distance of the one undisturbed run, floor and further runs left aside
    seconds: float
    program: LoweredPlan
    peaks: tuple[int, ...] = ()  # bytes per rank, where measured
    waiting: tuple[float, ...] = ()  # share of a step per rank, where measured and there are stages

    @property
    def equal(self) -> bool:
        return self.bad_step is None and all(check.holds for check in self.checks)

    @property
    def worst(self) -> Check:
        """The check nearest to its limit, or farthest past it."""
        return max(self.checks, key=lambda c: (not c.holds, c.error / c.limit if math.isfinite(c.error) else math.inf))

    def error(self, *kinds: str) -> float:
        return max((c.error for c in self.checks if c.what in kinds), default=0.0)


def verify(
    workload: Workload,
    plan: Plan,
    ranks: RankPool,
    *,
    reference: Reference,
    precision: str = "fp64",
    folder: Path | None = None,
    measured: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict | None:
    """Run the plan on the ranks and compare. `reference` holds optimizer and steps and may be reused for other plans.

    `measured`: whether a few more steps shall show memory and waiting. Under torchrun the result is None on every rank but
    the first.
    """
    check_request(precision=precision, optimizer=reference.optimizer, steps=reference.steps)
    check_count(plan, ranks.count)
    device = ranks.devices.kind
    check_precision(precision, device)
    program = lower_for_precision(workload.graph, plan, precision=precision, device=device)
    check_runnable(plan)
    reference = reference.matching(plan)
    with temporary_paths(2, folder) as (data, result):
        save_data(workload.example, data)
        task = ComparisonRun(
            graph=workload.graph,
            plan=plan,
            data=str(data),
            precision=precision,
            optimizer=reference.optimizer,
            device=device,
            steps=reference.steps,
            result=str(result),
            measured=measured,
        )
        say(f"running {reference.steps} steps on {ranks.count} ranks")
        facts = ranks(execute_run, task)
        if not result.stat().st_size:
            return None
        got = load_result(str(result))
    say("running the reference on one process")
    checks, floor, plain = _checks(got, reference, precision, {p.key for p in workload.graph.parameters if p.trainable})
    seconds = statistics.median(max(step) for step in zip(*(f["seconds"] for f in facts), strict=True))
    extra = [f["measured"] for f in facts] if measured else []
    return Verdict(
        checks=tuple(checks),
        reference=reference.kind,
        bad_step=first_bad([a + b for a, b in zip(got.losses, reference.exact.losses, strict=True)]),
        noise_floor=floor,
        plain=plain,
        seconds=seconds,
        program=program,
        peaks=tuple(m.peak_bytes for m in extra),
        waiting=waiting(extra),
    )


def check_request(*, precision: str, optimizer: str, steps: int) -> None:
    """Refuse what cannot run anywhere before anything is captured or started."""
    check_precision_name(precision)
    optimizer_named(optimizer)
    if steps < 1:
        raise InvalidInput(f"--steps {steps}; use at least 1")


def _checks(got: RunResult, reference: Reference, precision: str, trainable: set[str]) -> tuple[list[Check], float, bool]:
    exact = Distances(reference.exact, reference.start, trainable)
    mine = exact.of(got)
    if precision == "fp64":
        return checks64(mine, exact, reference)
    mine = {**mine, **_whole_gradient(exact, got, precision)}
    own: dict[tuple[str, int], float] = dict.fromkeys(mine, 0.0)
    for draw in range(DRAWS):
        single = reference.single(precision, draw)
        distances = {**exact.of(single), **_whole_gradient(exact, single, precision)}
        own = {key: max(own[key], w.error) for key, w in distances.items()}
        checks = _against(mine, {key: max(_times(key, precision) * distance, ULPS) for key, distance in own.items()})
        if draw == 0:
            plain = all(w.error <= _times(key, precision) * own[key] for key, w in mine.items())
        if all(check.holds for check in checks):
            break
    return checks, max(own.values()), plain


def _whole_gradient(exact: Distances, trial: RunResult, precision: str) -> dict[tuple[str, int], Worst]:
    """In bf16, where one tensor may stray by luck: how far the gradients are off taken together."""
    return {(WHOLE, 1): exact.whole_gradient(trial)} if precision == "bf16" else {}


def _times(key: tuple[str, int], precision: str) -> float:
    """How many times as far as one process a result may be from the float64 reference."""
    if precision != "bf16":
        return TWICE
    return TOGETHER if key[0] == WHOLE else FOUR_TIMES


def checks64(mine: Mapping[tuple[str, int], Worst], exact: Distances, reference: Reference) -> tuple[list[Check], float, bool]:
    """Held to the drift of moved inputs and, where that does not do, of other rounding."""
    drift = {key: w.error for key, w in exact.of(reference.perturbed).items()}
    limits = {key: _limit64(key, error, reference) for key, error in drift.items()}
    checks = _against(mine, limits)
    plain = all(check.holds for check in checks)
    for draw in range(DRAWS):
        if all(check.holds for check in checks) or not all(map(math.isfinite, reference.exact.losses)):
            break
        rounded = {key: w.error for key, w in exact.of(reference.rounded(draw)).items()}
        if rounded["loss", 1] > NOISE:  # not rounding: forward itself changes from call to call
            break
        drift = {key: max(drift[key], error) for key, error in rounded.items()}
        checks = _against(mine, {key: max(limits[key], DRIFT * error) for key, error in drift.items()})
    return checks, max(drift.values()), plain


def _against(found: Mapping[tuple[str, int], Worst], limits: Mapping[tuple[str, int], float]) -> list[Check]:
    return [
        Check(what=what, step=step, error=w.error, limit=limits[what, step], tensor=w.tensor)
        for (what, step), w in found.items()
    ]


def _limit64(key: tuple[str, int], drift: float, reference: Reference) -> float:
    """The first step is held to 1e-9. AdamW divides by the gradient's own size, so a gradient of pure rounding moves its
    parameter visibly: under it parameters may drift in the first step already."""
    what, step = key
    normalised = reference.optimizer == "adamw" and what == "parameter"
    return max(TIGHT, DRIFT * drift) if step > 1 or normalised else TIGHT
