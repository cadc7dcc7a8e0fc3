"""Tables and lines for a terminal, at most 100 columns; without one they degrade to plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fourfold.plans import LoweredPlan, Plan
from fourfold.plans.strategies.named import LIGHT
from fourfold.report.record import whole_ops
from fourfold.report.stages import options_text
from fourfold.report.survey import Limit, Survey
from fourfold.units import bytes_text, count_text, flops_text, seconds_text

if TYPE_CHECKING:
    from fourfold.oracle.predict import Prediction
    from fourfold.runs.train import Accuracy, History
    from fourfold.runs.verify import Verdict

WIDTH = 100
MOST_NAMED = 8  # layers named in one line
MOST_NOISE = 1e-3  # drift of one process beyond which later steps cannot be compared


def console(file: object = None, *, stderr: bool = False) -> Console:
    """A console that never draws wider than a page."""
    plain = Console(file=file, stderr=stderr, highlight=False, soft_wrap=False)  # type: ignore[arg-type]
    return Console(file=file, stderr=stderr, highlight=False, width=min(plain.width, WIDTH) if plain.is_terminal else WIDTH)  # type: ignore[arg-type]


def models_text(models: Mapping[str, tuple[str, Sequence[str]]]) -> RenderableType:
    """Name -> what it is, its arguments."""
    table = _table("model", "network", "arguments")
    for name, (what, arguments) in models.items():
        table.add_row(name, what, ", ".join(arguments))
    return table


def survey_text(survey: Survey, *, model: str) -> RenderableType:
    """`inspect`: work per layer group, then the limits of each split."""
    table = _table("layers", "ops>", "parameters>", "FLOPs>", "output>", "saved>")
    for group in survey.groups:
        table.add_row(
            group.path,
            str(group.ops),
            _or_none(group.parameters, count_text),
            _or_none(group.flops, flops_text),
            _or_none(group.output_bytes, bytes_text),
            _or_none(group.saved_bytes, bytes_text),
        )
    table.add_section()
    table.add_row(
        "all",
        str(survey.total("ops")),
        count_text(survey.total("parameters")),
        flops_text(survey.total("flops")),
        "",
        bytes_text(survey.total("saved_bytes")),
    )
    batch = f"batch {survey.batch}" + (" (fixed by the model)" if survey.batch_fixed else "")
    return Group(
        Text(f"{model}: graph {survey.graph}, {batch}, one forward pass"),
        table,
        Text("The most ranks each split can use"),
        _limits(survey.limits),
        *_without_rule(survey.without_rule),
    )


def _limits(limits: Iterable[Limit]) -> Table:
    table = _table("split", "ranks>", "limited by", f"layers over {LIGHT:.0%} of FLOPs>", "limited by")
    for limit in limits:
        heavy = (str(limit.heavy_size), limit.heavy_op) if limit.heavy_size > limit.size else ("", "")
        table.add_row(limit.split, str(limit.size), limit.op, *heavy)
    return table


def _without_rule(ops: Sequence[tuple[str, str]]) -> Iterable[RenderableType]:
    if not ops:
        yield Text("Every op has a rule to split it; none has to run in full on every rank.")
        return
    yield Text(f"{len(ops)} ops have no rule: their inputs are gathered and they run in full on every rank:")
    table = _table("op", "target")
    for path, target in ops:
        table.add_row(path, target)
    yield table


def mesh_text(plan: Plan) -> str:
    """The mesh, or how many stages on which ranks."""
    if not plan.stages:
        return str(plan.mesh)
    meshes = [str(stage.mesh) if stage.mesh.size > 1 else "1 rank" for stage in plan.stages]
    text = f"{len(meshes)} stages of {meshes[0]}" if len(set(meshes)) == 1 else "stages " + " | ".join(meshes)
    return f"{text} on {plan.size} ranks" if len({stage.ranks for stage in plan.stages}) < len(meshes) else text


def _head(plan: Plan, model: str, *rest: str) -> RenderableType:
    """What is planned on what, and more about it: in one line or, where that is too long, in two."""
    first, second = f"{model}: {plan.strategy} on {mesh_text(plan)}", ", ".join(filter(None, rest))
    return Text(f"{first}, {second}" if len(first) + 2 + len(second) <= WIDTH else f"{first},\n{second}")


def _axes(program: LoweredPlan) -> list[str]:
    """The axes of more than one rank, of all stages."""
    return list(dict.fromkeys(axis for part in program.parts for axis, size in part.stage.mesh.axes if size > 1))


def verdict_text(
    verdict: Verdict, plan: Plan, *, model: str, precision: str, prediction: Prediction | None = None
) -> RenderableType:
    """`verify`: every comparison with its limit, then EQUAL or NOT EQUAL."""
    table = _table("compared", "after step>", "error>", "allowed>", "", "worst tensor")
    for check in verdict.checks:
        word = "ok" if check.holds else "TOO LARGE"
        table.add_row(check.what, str(check.step), f"{check.error:.1e}", f"{check.limit:.1e}", word, check.tensor)
    whole = whole_ops(verdict.program)
    named = ", ".join(c.op.path for c in whole[:MOST_NAMED]) + (", ..." if len(whole) > MOST_NAMED else "")
    split = f"{verdict.program.split_flops_fraction:.1%} of the FLOPs are split over every mesh axis"
    figures = [f"noise floor {verdict.noise_floor:.1e}", *([split] if _axes(verdict.program) else [])]
    head = _head(plan, model, options_text(plan), precision, _against(verdict.reference))
    lines = [
        "; ".join([*figures, f"{seconds_text(verdict.seconds)} a step"]),
        *_measured(verdict.peaks, verdict.waiting),
        *_predicted(prediction, verdict.seconds, verdict.peaks),
        *([f"run in full on every rank: {named}"] if whole else []),
        _verdict_line(verdict),
    ]
    return Group(head, table, *map(Text, lines))


def _against(reference: str) -> str:
    if reference == "eager":
        return "against eager PyTorch in one process"
    return f"against {reference}, since whose random numbers eager PyTorch cannot repeat"


def _verdict_line(verdict: Verdict) -> str:
    """The last line: EQUAL, or what is not."""
    if verdict.bad_step is not None:
        return f"NaN: the loss of step {verdict.bad_step} is NaN or infinite, so nothing can be compared"
    worst = verdict.worst
    unequal = f"NOT EQUAL: {worst.what} {worst.tensor} has error {worst.error:.1e}, {worst.limit:.1e} is allowed"
    if verdict.equal and verdict.noise_floor > MOST_NOISE:
        return (
            f"EQUAL in step 1; later steps cannot be compared: rounding alone changes one process by {verdict.noise_floor:.0e}"
        )
    return "EQUAL" if verdict.equal else unequal


def step_text(step: int, steps: int, loss: float, seconds: float) -> str:
    """One line of a training run."""
    return f"step {step:>{len(str(steps))}}/{steps}  loss {loss:.6g}  {seconds_text(seconds)}"


def history_text(history: History, prediction: Prediction | None = None) -> RenderableType:
    """The last lines of `train`: losses, speed, memory, and what was predicted of them."""
    speed = f"{seconds_text(history.step_seconds)} a step (median), {history.samples_per_second:.1f} samples/s"
    compared = _predicted(prediction, history.step_seconds, history.peaks)
    learned = [*_loss_lines(history.losses), *_accuracy_lines(history.accuracy)]
    return Group(*map(Text, [*learned, speed, *_measured(history.peaks, history.waiting), *compared]))


def _accuracy_lines(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return []
    return [f"accuracy: {accuracy.fraction:.1%} of {accuracy.examples} held-out examples classified right"]


def _loss_lines(losses: Sequence[float]) -> list[str]:
    """The first and the last loss; of many steps the means of the first and the last tenth, since batches differ."""
    if len(losses) < 2:
        return []
    tenth = len(losses) // 10
    if tenth < 2:
        return [f"loss: {losses[0]:.4g} in step 1, {losses[-1]:.4g} in step {len(losses)}"]
    first, last = (sum(some) / tenth for some in (losses[:tenth], losses[-tenth:]))
    return [f"loss: {first:.4g} in the first {tenth} steps, {last:.4g} in the last {tenth} (means)"]


def _predicted(prediction: Prediction | None, seconds: float, peaks: Sequence[int]) -> list[str]:
    """The predicted step and peak next to the measured ones."""
    if prediction is None:
        return []
    step, (low, high) = prediction.estimate.step_seconds, prediction.estimate.interval
    peak = max(peaks, default=0)
    time = f"step: predicted {seconds_text(step)} ({seconds_text(low)} to {seconds_text(high)})"
    memory = f"peak memory: predicted {bytes_text(prediction.peak_bytes)}"
    return [
        time + (f", measured {seconds_text(seconds)}: {step / seconds - 1:+.0%}" if seconds else ""),
        memory + (f", measured {bytes_text(peak)}: {prediction.peak_bytes / peak - 1:+.0%}" if peak else ""),
    ]


def _measured(peaks: Sequence[int], waiting: Sequence[float]) -> list[str]:
    """By rank, the peak of memory and the share of a step it waits."""
    rows = [
        ("peak memory", [bytes_text(peak) for peak in peaks]),
        ("waiting for other ranks", [f"{share:.0%}" for share in waiting]),
    ]
    return [f"{what}: " + ", ".join(f"rank {r} {text}" for r, text in enumerate(texts)) for what, texts in rows if texts]


def _or_none(number: int, form: object) -> str:
    return form(number) if number and callable(form) else ""


def _table(*headings: str) -> Table:
    """Columns; a heading that ends in > is of numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, safe_box=True)
    for heading in headings:
        number = heading.endswith(">")
        table.add_column(heading.rstrip(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table
