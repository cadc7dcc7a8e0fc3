"""The commands. Each parses its arguments, calls one room, and prints what comes back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.calibrate import calibrate
from fourfold.cli.console import Console
from fourfold.cli.explain import explain
from fourfold.cli.options import (
    Batch,
    Calibrated,
    Json,
    Microbatches,
    Model,
    Optimizer,
    PlanFile,
    Predict,
    RankCount,
    Recompute,
    Record,
    Schedule,
    Seed,
    Stages,
    Strategy,
    Trace,
    Zero,
    load_chosen_plan,
    one_of,
    options_from_args,
)
from fourfold.cli.output import check_place, write_record, write_timelines
from fourfold.cli.plan import plan
from fourfold.cli.report import report
from fourfold.cli.reproduce import reproduce
from fourfold.cli.simulate import simulate
from fourfold.errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from fourfold.oracle.predict import Prediction
    from fourfold.plans import Options, Plan
    from fourfold.runtime.host.launch import Ranks
    from fourfold.runtime.rank_pool import TorchrunRanks
    from fourfold.workload.workload import Workload

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


def _like(name: str) -> str:
    """What stands under a command's help."""
    return f"Example: {EXAMPLES[name]}"


app = typer.Typer(
    help="Predicts, plans and runs hybrid-parallel training of any PyTorch model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def models(as_json: Json = False) -> None:
    """The built-in models and their arguments."""
    voice = Console(json=as_json)
    with voice.working("loading"):
        import inspect as signatures

        from fourfold.models import MODELS, describe
        from fourfold.report.text import models_text

    rows = {name: (describe(name), _defaults(signatures.signature(factory))) for name, factory in MODELS.items()}
    records = [{"name": name, "about": what, "arguments": given} for name, (what, given) in rows.items()]
    texts = {name: (what, [f"{k}={v}" for k, v in given.items()]) for name, (what, given) in rows.items()}
    voice.answer({"models": records}, lambda: models_text(texts))


def _defaults(signature: object) -> dict[str, object]:
    return {name: parameter.default for name, parameter in signature.parameters.items()}  # type: ignore[attr-defined]


@app.command()
def clusters(
    name: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="A preset, a TOML file or `local`.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """The built-in clusters, or every number of one with its source."""
    voice = Console(json=as_json)
    with voice.working("loading"):
        from fourfold.cluster import LOCAL, cluster_named, preset_names
        from fourfold.report.clusters import cluster_record, cluster_text, clusters_text

        found = [cluster_named(text) for text in ((*preset_names(), LOCAL) if name is None else (name,))]
    record = {"clusters": [cluster_record(cluster) for cluster in found]}
    voice.answer(record, lambda: clusters_text(found) if name is None else cluster_text(found[0]))


app.command(epilog=_like("calibrate"))(calibrate)


@app.command(epilog=_like("inspect"))
def inspect(
    model: Model,
    batch: Batch = None,
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="Parts of a module path that make a group.")] = None,
    as_json: Json = False,
) -> None:
    """Ops, parameters, FLOPs, activations, and how far each split can go."""
    voice = Console(json=as_json)
    with voice.working(f"capturing {model}"):
        from fourfold.report.record import survey_record
        from fourfold.report.survey import survey
        from fourfold.report.text import survey_text
        from fourfold.workload.workload import load_workload

        seen = load_workload(model, batch=batch, data=False)
        found = survey(seen.graph, seen.batch, depth=depth)
    voice.answer(survey_record(found, model=model), lambda: survey_text(found, model=model))


app.command(epilog=_like("plan"))(plan)
app.command(epilog=_like("explain"))(explain)
app.command(epilog=_like("simulate"))(simulate)
app.command(epilog=_like("report"))(report)
app.command(epilog=_like("reproduce"))(reproduce)


@app.command(epilog=_like("verify"))
def verify(
    model: Model,
    plan_file: PlanFile = None,
    strategy: Strategy = None,
    ranks: RankCount = None,
    steps: Annotated[int, typer.Option("--steps", help="Training steps to compare.")] = 3,
    batch: Batch = None,
    precision: Annotated[str, typer.Option("--precision", help="fp64 or fp32.")] = "fp64",
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
    voice = Console(json=as_json)
    with voice.working(f"capturing {model}") as say:
        from fourfold.report.record import verify_record
        from fourfold.report.text import verdict_text
        from fourfold.runs.reference import Reference
        from fourfold.runs.verify import check_request
        from fourfold.runs.verify import verify as compare
        from fourfold.runtime.rank_pool import rank_pool

        options = options_from_args(stages, microbatches, schedule, recompute, zero)
        loaded = load_chosen_plan(plan_file, strategy, batch, options)
        check_request(precision=precision, optimizer=optimizer, steps=steps)
        check_place(record_file)
        with rank_pool(ranks if loaded is None or ranks is not None else loaded.size) as team:
            seen, made = _prepared(team, model, loaded, strategy, options, batch, seed, voice)
            _check_capture(team, seen, voice, say, noted=False)
            said = _foretold(voice, team, seen, made, cluster, precision, optimizer, say) if predict else None
            reference = Reference(workload=seen, optimizer=optimizer, steps=steps)
            verdict = compare(seen, made, team, reference=reference, precision=precision, measured=True, say=say)
    if verdict is None:
        return 0
    record = verify_record(verdict, made, model=model, precision=precision, optimizer=optimizer, steps=steps, prediction=said)
    write_record(record, record_file)
    voice.answer(record, lambda: verdict_text(verdict, made, model=model, precision=precision, prediction=said))
    return 0 if verdict.equal else 1


@app.command(epilog=_like("train"))
def train(
    model: Model,
    plan_file: PlanFile = None,
    strategy: Strategy = None,
    ranks: RankCount = None,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = 10,
    data: Annotated[str, typer.Option("--data", help="synthetic, or digits: scikit-learn's images.")] = "synthetic",
    batch: Batch = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32 or fp64.")] = "fp32",
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
    voice = Console(json=as_json)
    with voice.working(f"capturing {model}") as say:
        from fourfold.report.record import train_record
        from fourfold.report.text import history_text, step_text
        from fourfold.runs.train import train as run
        from fourfold.runs.verify import check_request
        from fourfold.runtime.rank_pool import rank_pool

        options = options_from_args(stages, microbatches, schedule, recompute, zero)
        loaded = load_chosen_plan(plan_file, strategy, batch, options)
        check_request(precision=precision, optimizer=optimizer, steps=steps)
        check_place(trace)
        check_place(record_file)
        with rank_pool(ranks if loaded is None or ranks is not None else loaded.size) as team:
            seen, made = _prepared(team, model, loaded, strategy, options, batch, seed, voice)
            _check_capture(team, seen, voice, say)
            said = _foretold(voice, team, seen, made, cluster, precision, optimizer, say) if predict else None
            say(f"starting {made.size} ranks")

            def told(step: int, loss: float, seconds: float) -> None:
                say(f"step {step} of {steps}")
                voice.line(step_text(step, steps, loss, seconds))

            history = run(
                seen,
                made,
                team,
                steps=steps,
                precision=precision,
                optimizer=optimizer,
                seed=seed,
                data=data,
                allow_nan=allow_nan,
                told=told,
            )
    file = write_timelines(said, history.timeline, made, trace) if trace is not None else None
    record = train_record(history, made, model=model, precision=precision, optimizer=optimizer, prediction=said, trace=file)
    write_record(record, record_file)
    voice.answer(record, lambda: history_text(history, said))
    if history.bad_step is None or allow_nan:
        return 0
    voice.note(f"the loss of step {history.bad_step} is {history.losses[-1]}, so the run stopped there; --allow-nan goes on")
    return 1


def _check_capture(
    team: Ranks | TorchrunRanks, seen: Workload, voice: Console, say: Callable[[str], None], *, noted: bool = True
) -> None:
    """Two steps of the captured graph against eager PyTorch, on one process for all. `noted`: say so where it was not done."""
    from fourfold.runs.capture_check import refuse_together
    from fourfold.runtime.rank_pool import share

    say("comparing what was captured with eager PyTorch")
    reason = refuse_together(lambda: seen, partial(share, team))
    if reason is not None and noted:
        voice.note(reason)


def _foretold(
    voice: Console,
    team: Ranks | TorchrunRanks,
    seen: Workload,
    made: Plan,
    cluster: str | None,
    precision: str,
    optimizer: str,
    say: Callable[[str], None],
) -> Prediction | None:
    """What the step will take, said before it is run."""
    from fourfold.calibrate.measured_prices import predict_on_ranks
    from fourfold.cluster import PRECISIONS, cluster_named
    from fourfold.plans import lower_plan
    from fourfold.plans.lists.lowered_plan import check_runnable
    from fourfold.runtime.comm.world import here

    lowered = lower_plan(seen.graph, made)
    check_runnable(made)
    where = cluster_named(cluster, devices=team.count) if cluster is not None else None
    say("timing kernels")
    exact = one_of("precision", precision, PRECISIONS)
    try:
        found = predict_on_ranks(lowered, team, cluster=where, precision=exact, optimizer=optimizer)
    except Damaged as error:  # this machine's own calibration, which only the prediction needs
        voice.note(f"no prediction is made: {error}")
        return None
    running = team(here, team.count)[0]
    for difference in found.prices.placement.differences(running) if found is not None else ():
        voice.note(f"{difference}; --cluster says what the prediction is for")
    return found


def _prepared(
    team: Ranks | TorchrunRanks,
    model: str,
    loaded: Plan | None,
    strategy: str | None,
    options: Options,
    batch: int | None,
    seed: int,
    voice: Console,
) -> tuple[Workload, Plan]:
    """The model on this process and the plan to run it by; under torchrun the first rank captures for all."""
    from fourfold.runs.parallel import IN_EVAL_MODE
    from fourfold.runtime.rank_pool import check_count, is_leader, share
    from fourfold.workload.workload import load_workload

    size = loaded.batch if loaded is not None else batch
    own = load_workload(model, batch=size, seed=seed) if is_leader() else None
    graph = share(team, lambda: own.graph if own is not None else None)
    seen = own or load_workload(model, batch=size, seed=seed, graph=graph)
    made = loaded if loaded is not None else seen.plan(str(strategy), ranks=team.count, options=options)
    if not seen.case.module.training:
        voice.note(IN_EVAL_MODE.format(type(seen.case.module).__name__))
    made.check(seen.graph)
    check_count(made, team.count)
    return seen, made
