"""`pipeline` against `torch.distributed.pipelining`: same cut, same micro-batches, GPipe and 1F1B.

The plan decides the cut; the peer's stages are the same layers in `nn.Sequential`s. It merges no outputs and infers shapes
before the first timed step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from contest import Step, Times, comparison, example, interleaved, line, parser, plain_losses, sgd, write
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fourfold.graph.capture import capture
from fourfold.plans import Options, Plan, named
from fourfold.runs.parallel import parallelize
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.plan_inputs import with_signature

METHOD = (
    "steps of all contenders alternate in the same processes (one rank per stage, one thread each, gloo), barrier before and "
    "after; medians, and the median of paired ratios; momentum SGD; losses checked against one process"
)
CASES: dict[str, dict[str, Any]] = {"vgg16-cifar": {"batch": 32}}
MICROBATCHES = {2: 4, 4: 8}  # by ranks
PEERS = {"gpipe": ScheduleGPipe, "1f1b-sno": Schedule1F1B, "1f1b-so": Schedule1F1B}


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """A VGG as a chain, by the paths that its ops have."""
    parts: dict[str, nn.Module] = {f"features.{name}": part for name, part in model.features.named_children()}
    parts["avgpool"], parts["flatten"] = model.avgpool, nn.Flatten(1)
    return parts | {f"classifier.{name}": part for name, part in model.classifier.named_children()}


def stage_module(model: nn.Module, plan: Plan, index: int) -> nn.Sequential:
    """The layers of one stage of the plan. None writes into the tensor it receives: a leading ReLU makes a new one."""
    chain = layers(model)
    paths = list(chain)
    begins = [0, *(paths.index(layer_of(stage.first, paths)) for stage in plan.stages[1:]), len(paths)]
    first, *rest = list(chain.values())[begins[index] : begins[index + 1]]
    return nn.Sequential(nn.ReLU() if isinstance(first, nn.ReLU) else first, *rest)


def layer_of(op: str, paths: list[str]) -> str:
    """The layer that an op belongs to: 'features.14.conv2d_6' is of 'features.14'."""
    return next(path for path in paths if op == path or op.startswith(path + "."))


def build_plan(name: str, ranks: int) -> Plan:
    """The cut and micro-batches that all contenders share."""
    model, inputs, targets, loss = example(name, CASES[name])
    graph = capture(model, inputs, targets, loss)
    options = Options(microbatches=MICROBATCHES[ranks])
    return with_signature(named("pipeline", graph, ranks=ranks, batch=CASES[name]["batch"], options=options), inputs, targets)


def contenders(name: str, plan: Plan) -> dict[str, Step]:
    peers = {kind.__name__: peer(name, plan, kind) for kind in dict.fromkeys(PEERS.values())}
    return {**peers, **{schedule: ours(name, replace(plan, schedule=schedule)) for schedule in PEERS}}


def ours(name: str, plan: Plan) -> Step:
    model, inputs, targets, loss = example(name, CASES[name])
    run = parallelize(model, plan, loss=loss, optimizer=lambda n: sgd([p for _, p in n]))
    return lambda: run.step(*inputs, *targets)


def peer(name: str, plan: Plan, kind: Any) -> Step:
    """A step of the peer's schedule over the plan's stages."""
    model, inputs, targets, loss = example(name, CASES[name])
    rank, count = dist.get_rank(), len(plan.stages)
    module = stage_module(model, plan, rank)
    stage = PipelineStage(module, rank, count, torch.device("cpu"))
    schedule = kind(stage, plan.microbatches, loss_fn=loss)
    optimizer = sgd(module.parameters())

    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(*inputs, return_outputs=False)
        elif rank == count - 1:
            schedule.step(target=targets[0], losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return step


def measure(name: str, plan: Plan, rounds: int) -> Times:
    steps = contenders(name, plan)
    return interleaved(steps, rounds, dict.fromkeys(steps, plain_losses(name, CASES[name])))


def main() -> None:
    options = parser(ranks="2,4", models=CASES).parse_args()
    rows = []
    for name in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            plan = build_plan(name, ranks)
            with LocalRanks(ranks) as pool:
                times = pool(measure, name, plan, options.rounds)[0]
            row = {"model": name, "ranks": ranks, "stages": [s.first for s in plan.stages], "microbatches": plan.microbatches}
            for schedule, kind in PEERS.items():
                result = comparison(times, peer=kind.__name__, ours=schedule)
                rows.append({**row, "peer": kind.__name__, "ours": schedule, **result, "times": times})
                print(line(rows[-1]), flush=True)
    write(options.output, METHOD, rows)


if __name__ == "__main__":
    main()
