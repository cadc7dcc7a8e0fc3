"""One-rank program against the eager step, and `data` on two ranks against DDP: same processes, interleaved steps, medians."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.plans import named
from fourfold.runtime.launch import Ranks
from fourfold.runtime.parallel import parallelize, signed

CASES: dict[str, dict[str, Any]] = {
    "vgg16-cifar": {"batch": 32},
    "resnet50": {"batch": 32, "image": 64},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def contenders(name: str, ranks: int) -> dict[str, Callable[[], None]]:
    """A step of the peer and a step of ours, on equal models and data."""
    torch.manual_seed(0)
    model, inputs, targets, loss = MODELS[name](**CASES[name])
    graph = capture(model, inputs, targets, loss)
    plan = signed(named("data", graph, ranks=ranks, batch=CASES[name]["batch"]), inputs, targets)
    run = parallelize(model, plan, loss=loss, optimizer=lambda n: sgd([p for _, p in n]), graph=graph)
    torch.manual_seed(0)
    peer, *_ = MODELS[name](**CASES[name])
    x, *y = run.local(*inputs, *targets)
    wrapped = DistributedDataParallel(peer) if ranks > 1 else peer
    optimizer = sgd(wrapped.parameters())

    def peer_step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), *y).backward()
        optimizer.step()

    return {"peer": peer_step, "ours": lambda: run.step(x, *y) and None}


def measure(name: str, ranks: int, rounds: int) -> dict[str, list[float]]:
    steps = contenders(name, ranks)
    times: dict[str, list[float]] = {key: [] for key in steps}
    for k in range(rounds + 2):
        for key in steps if k % 2 else reversed(steps):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            steps[key]()
            if dist.is_initialized():
                dist.barrier()
            if k >= 2:
                times[key].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            with Ranks(ranks) as pool:
                times = pool(measure, name, ranks, options.rounds)[0]
            peer, ours = (statistics.median(times[key]) for key in ("peer", "ours"))
            ratios = sorted(a / b for a, b in zip(times["peer"], times["ours"], strict=True))
            row = {
                "model": name, "ranks": ranks, "peer": "DDP" if ranks > 1 else "eager", "peer_seconds": peer,
                "ours_seconds": ours, "throughput_ratio": peer / ours, "paired_median_ratio": statistics.median(ratios),
                "times": times,
            }  # fmt: skip
            rows.append(row)
            print(f"{name} on {ranks}: {row['peer']} {peer * 1e3:.0f} ms, ours {ours * 1e3:.0f} ms, throughput "
                  f"{row['throughput_ratio']:.3f} x (paired median {row['paired_median_ratio']:.3f})", flush=True)  # fmt: skip
    if options.output:
        with open(options.output, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
