"""`fsdp` against FSDP2 (`fully_shard`): parameters, gradients and momentum divided over ranks, gathered when used.

FSDP2 keeps its default `reshard_after_forward=True` on what it wraps (parameters are dropped after forward and gathered
again for backward, as ZeRO-3 does). It is wrap in two ways, every layer with parameters alone and every run of layers
between poolings together, and the faster one is the peer; the times of both are recorded.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from contest import Step, Times, comparison, example, interleaved, line, parser, plain_losses, sgd, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fourfold.graph import Graph
from fourfold.graph.capture import capture
from fourfold.plans import named
from fourfold.runs.parallel import parallelize
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.plan_inputs import with_signature

METHOD = (
    "steps of all contenders alternate in the same processes (one thread each, gloo), barrier before and after; medians, and "
    "the median of paired ratios against the faster wrapping of FSDP2; momentum SGD; losses checked against one process"
)
CASES: dict[str, dict[str, Any]] = {"vgg16-cifar": {"batch": 32}}
WRAPPINGS = ("layer", "block")


def wrap(model: nn.Module, wrapping: str, ranks: int) -> nn.Module:
    """The model under FSDP2: what is wrap together is gathered together."""
    mesh = init_device_mesh("cpu", (ranks,))
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for group in [[m] for m in layers] if wrapping == "layer" else blocks(model):
        fully_shard(group if len(group) > 1 else group[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Layers with parameters between poolings; the classifier is one block."""
    out: list[list[nn.Module]] = [[]]
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            out[-1].append(layer)
        elif isinstance(layer, nn.MaxPool2d):
            out.append([])
    return [block for block in out if block]


def contenders(name: str, ranks: int) -> dict[str, Step]:
    model, inputs, targets, loss = example(name, CASES[name])
    graph = capture(model, inputs, targets, loss)
    plan = with_signature(named("fsdp", graph, ranks=ranks, batch=CASES[name]["batch"]), inputs, targets)
    run = parallelize(model, plan, loss=loss, optimizer=lambda n: sgd([p for _, p in n]), graph=graph)
    check_divided([p for group in run.optimizer.param_groups for p in group["params"]], graph, ranks)
    x, *y = run.local(*inputs, *targets)
    return {**{f"FSDP2 by {w}": fsdp2_step(name, ranks, w, x, y) for w in WRAPPINGS}, "ours": lambda: run.step(x, *y)}


def check_divided(parameters: list[torch.Tensor], graph: Graph, ranks: int) -> None:
    """Ours may not keep more than its share, give or take what does not divide evenly."""
    mine = sum(p.numel() for p in parameters)
    whole = sum(math.prod(graph.values[p.name].shape) for p in graph.parameters)
    if mine > 1.01 * whole / ranks:
        raise RuntimeError(f"a rank keeps {mine} of {whole} parameters on {ranks} ranks; unequal work is not comparison")


def fsdp2_step(name: str, ranks: int, wrapping: str, x: torch.Tensor, y: list[torch.Tensor]) -> Step:
    peer, _, _, loss = example(name, CASES[name])
    wrap(peer, wrapping, ranks)
    optimizer = sgd(peer.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(peer(x), *y)
        value.backward()
        optimizer.step()
        return value

    return step


def measure(name: str, ranks: int, rounds: int) -> Times:
    steps = contenders(name, ranks)
    return interleaved(steps, rounds, dict.fromkeys(steps, plain_losses(name, CASES[name])))


def main() -> None:
    options = parser(ranks="2", models=CASES).parse_args()
    rows = []
    for name in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            with LocalRanks(ranks) as pool:
                times = pool(measure, name, ranks, options.rounds)[0]
            peer = min((key for key in times if key != "ours"), key=lambda key: statistics.median(times[key]))
            row = {"model": name, "ranks": ranks, "peer": peer}
            rows.append({**row, **comparison(times, peer=peer, ours="ours"), "times": times})
            print(line(rows[-1]), flush=True)
    write(options.output, METHOD, rows)


if __name__ == "__main__":
    main()
