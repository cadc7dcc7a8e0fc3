"""The commands. Each parses its arguments, calls `fourfold.api`, and prints what comes back."""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.calibrate import calibrate
from fourfold.cli.console import Console
from fourfold.cli.explain import explain
from fourfold.cli.options import (
    Batch,
    Calibrated,
    Device,
    Json,
    Microbatches,
    Model,
    Optimizer,
    PlanFile,
    Precision,
    Predict,
    RankCount,
    Recompute,
    Record,
    Schedule,
    Seed,
    ShareGpu,
    Stages,
    Strategy,
    Trace,
    Zero,
    options_from_args,
)
from fourfold.cli.output import write_record, write_timelines
from fourfold.cli.plan import plan
from fourfold.cli.report import report
from fourfold.cli.reproduce import reproduce
from fourfold.cli.simulate import simulate

EXAMPLES = {
    "inspect": "fourfold inspect resnet50,image=64 --batch 32",
    "calibrate": "fourfold calibrate --ranks 2 -o here.toml",
    "plan": "fourfold plan vgg16 --cluster ethernet-1g --devices 8 --batch 256 -o best.json --report best.html",
    "explain": "fourfold explain best.json",
    "simulate": "fourfold simulate resnet50 --cluster abci --devices 1,4,16,64 --plot scaling.png",
    "report": "fourfold report best.json run.json -o best.html",
    "reproduce": "fourfold reproduce integrated -o integrated.html",
    "verify": "fourfold verify vgg16-cifar --strategy data+filter --ranks 4",
    "train": "fourfold train vgg16-cifar --plan best.json --ranks 2 --steps 20 --data digits --record run.json",
}


def _example(name: str) -> str:
    """The line below a command's help."""
    return f"Example: {EXAMPLES[name]}"


app = typer.Typer(
    help="Predicts, plans and runs hybrid-parallel training of any PyTorch model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def models(as_json: Json = False) -> None:
    """The built-in models and their arguments."""
    console = Console(json=as_json)
    with console.working("loading"):
        from fourfold.api.catalog import models as built_in_models
        from fourfold.report.text import models_text

        rows = built_in_models()
    records = [{"name": row.name, "about": row.about, "arguments": row.arguments} for row in rows]
    texts = {row.name: (row.about, [f"{k}={v}" for k, v in row.arguments.items()]) for row in rows}
    console.answer({"models": records}, lambda: models_text(texts))


@app.command()
def clusters(
    name: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="A preset, a TOML file or `local`.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """The built-in clusters, or every number of one with its source."""
    console = Console(json=as_json)
    with console.working("loading"):
        from fourfold.api.catalog import cluster
        from fourfold.api.catalog import clusters as built_in_clusters
        from fourfold.report.clusters import cluster_record, cluster_text, clusters_text

        rows = built_in_clusters() if name is None else (cluster(name),)
    record = {"clusters": [cluster_record(row) for row in rows]}
    console.answer(record, lambda: clusters_text(rows) if name is None else cluster_text(rows[0]))


app.command(epilog=_example("calibrate"))(calibrate)


@app.command(epilog=_example("inspect"))
def inspect(
    model: Model,
    batch: Batch = None,
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="Parts of a module path that make a group.")] = None,
    as_json: Json = False,
) -> None:
    """Ops, parameters, FLOPs, activations, and how far each split can go."""
    console = Console(json=as_json)
    with console.working(f"capturing {model}"):
        from fourfold.api.catalog import inspect as inspect_model
        from fourfold.report.record import survey_record
        from fourfold.report.text import survey_text

        result = inspect_model(model, batch=batch, depth=depth)
    console.answer(survey_record(result, model=model), lambda: survey_text(result, model=model))


app.command(epilog=_example("plan"))(plan)
app.command(epilog=_example("explain"))(explain)
app.command(epilog=_example("simulate"))(simulate)
app.command(epilog=_example("report"))(report)
app.command(epilog=_example("reproduce"))(reproduce)


@app.command(epilog=_example("verify"))
def verify(
    model: Model,
    plan_file: PlanFile = None,
    strategy: Strategy = None,
    ranks: RankCount = None,
    steps: Annotated[int, typer.Option("--steps", help="Training steps to compare.")] = 3,
    batch: Batch = None,
    device: Device = "auto",
    share_gpu: ShareGpu = False,
    precision: Precision = "fp64",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    recompute: Recompute = None,
    zero: Zero = None,
    optimizer: Optimizer = "sgd",
    seed: Seed = 0,
    cluster: Calibrated = None,
    predict: Predict = True,
    record_file: Record = None,
    as_json: Json = False,
) -> int:
    """Whether a plan gives the numbers of one process: exit code 1 if not."""
    console = Console(json=as_json)
    with console.working(f"capturing {model}") as say:
        from fourfold.api.output import check_place
        from fourfold.api.running import verify as verify_plan
        from fourfold.report.record import verify_record
        from fourfold.report.text import verdict_text

        options = options_from_args(stages, microbatches, schedule, recompute, zero)
        check_place(record_file)
        result = verify_plan(
            model,
            plan=plan_file,
            strategy=strategy,
            options=options,
            ranks=ranks,
            batch=batch,
            steps=steps,
            precision=precision,
            optimizer=optimizer,
            device=device,
            share_gpu=share_gpu,
            seed=seed,
            cluster=cluster,
            predict=predict,
            say=say,
            note=console.note,
        )
    if result is None:
        return 0
    verdict, made, prediction = result.verdict, result.plan, result.prediction
    record = verify_record(
        verdict, made, model=model, precision=precision, optimizer=optimizer, steps=steps, prediction=prediction
    )
    write_record(record, record_file)
    console.answer(record, lambda: verdict_text(verdict, made, model=model, precision=precision, prediction=prediction))
    return 0 if verdict.equal else 1


@app.command(epilog=_example("train"))
def train(
    model: Model,
    plan_file: PlanFile = None,
    strategy: Strategy = None,
    ranks: RankCount = None,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = 10,
    data: Annotated[str, typer.Option("--data", help="synthetic, or digits: scikit-learn's images.")] = "synthetic",
    batch: Batch = None,
    device: Device = "auto",
    share_gpu: ShareGpu = False,
    precision: Precision = "fp32",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    recompute: Recompute = None,
    zero: Zero = None,
    optimizer: Optimizer = "sgd",
    seed: Seed = 0,
    cluster: Calibrated = None,
    predict: Predict = True,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Go on after a loss that is NaN or infinite.")] = False,
    trace: Trace = None,
    record_file: Record = None,
    as_json: Json = False,
) -> int:
    """Train under a plan, on made-up data or a set of examples: exit code 1 if the loss becomes NaN or infinite."""
    console = Console(json=as_json)
    with console.working(f"capturing {model}") as say:
        from fourfold.api.output import check_place
        from fourfold.api.running import train as train_plan
        from fourfold.report.record import train_record
        from fourfold.report.text import history_text, step_text

        def show_step(step: int, loss: float, seconds: float) -> None:
            say(f"step {step} of {steps}")
            console.line(step_text(step, steps, loss, seconds))

        options = options_from_args(stages, microbatches, schedule, recompute, zero)
        check_place(trace)
        check_place(record_file)
        result = train_plan(
            model,
            plan=plan_file,
            strategy=strategy,
            options=options,
            ranks=ranks,
            batch=batch,
            steps=steps,
            data=data,
            precision=precision,
            optimizer=optimizer,
            device=device,
            share_gpu=share_gpu,
            seed=seed,
            cluster=cluster,
            predict=predict,
            allow_nan=allow_nan,
            on_step=show_step,
            say=say,
            note=console.note,
        )
    made, history, prediction = result.plan, result.history, result.prediction
    if not console.silent:
        file = write_timelines(prediction, history.timeline, made, trace) if trace is not None else None
        record = train_record(
            history, made, model=model, precision=precision, optimizer=optimizer, prediction=prediction, trace=file
        )
        write_record(record, record_file)
        console.answer(record, lambda: history_text(history, prediction))
    if history.bad_step is None or allow_nan:
        return 0
    console.note(f"the loss of step {history.bad_step} is {history.losses[-1]}, so the run stopped there; --allow-nan goes on")
    return 1
