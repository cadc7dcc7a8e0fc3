"""One-rank program against the eager step, and `data` on two ranks against DDP: same processes, interleaved steps, medians."""

from __future__ import annotations

from typing import Any

import torch
from contest import Step, Times, comparison, example, interleaved, line, parser, plain_losses, sgd, write
from torch.nn.parallel import DistributedDataParallel

from fourfold.graph.capture import capture
from fourfold.plans import named
from fourfold.runs.parallel import parallelize
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.plan_inputs import with_signature

METHOD = (
    "steps of both alternate in the same processes (one thread each, gloo), barrier before and after; medians, and the median "
    "of paired ratios; momentum SGD; losses checked against one process (with batch norm, of the first step and not DDP's)"
)
CASES: dict[str, dict[str, Any]] = {
    "vgg16-cifar": {"batch": 32},
    "resnet50": {"batch": 32, "image": 64},
}
NORMALISING = ("resnet50",)
"""DDP takes batch norm's statistics from each part of the batch, not the whole. With a few values per channel they turn the
rounding of the inputs' last digit into a percent of the second loss, so that only the first is comparison.
"""


def contenders(name: str, ranks: int) -> dict[str, Step]:
    """A step of the peer and a step of ours, on equal models and data."""
    model, inputs, targets, loss = example(name, CASES[name])
    graph = capture(model, inputs, targets, loss)
    plan = with_signature(named("data", graph, ranks=ranks, batch=CASES[name]["batch"]), inputs, targets)
    run = parallelize(model, plan, loss=loss, optimizer=lambda n: sgd([p for _, p in n]), graph=graph)
    peer, *_ = example(name, CASES[name])
    x, *y = run.local(*inputs, *targets)
    wrapped = DistributedDataParallel(peer) if ranks > 1 else peer
    optimizer = sgd(wrapped.parameters())

    def peer_step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(wrapped(x), *y)
        value.backward()
        optimizer.step()
        return value

    return {"peer": peer_step, "ours": lambda: run.step(x, *y)}


def measure(name: str, ranks: int, rounds: int) -> Times:
    plain = plain_losses(name, CASES[name])
    expected = {"peer": plain, "ours": plain}
    if name in NORMALISING:
        expected = {"ours": plain[:1]} if ranks > 1 else {"peer": plain, "ours": plain[:1]}
    return interleaved(contenders(name, ranks), rounds, expected)


def main() -> None:
    options = parser(ranks="1,2", models=CASES).parse_args()
    rows = []
    for name in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            with LocalRanks(ranks) as pool:
                times = pool(measure, name, ranks, options.rounds)[0]
            row = {"model": name, "ranks": ranks, "peer": "DDP" if ranks > 1 else "eager"}
            rows.append({**row, **comparison(times, peer="peer", ours="ours"), "times": times})
            print(line(rows[-1]), flush=True)
    write(options.output, METHOD, rows)


if __name__ == "__main__":
    main()
