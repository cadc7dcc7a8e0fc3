"""`1f1b-so` against `1f1b-sno` on a slow link between two hosts, beside what the replay of the two schedules says.

Two network namespaces joined at `--rate`, one stage each. In the same run each stage's forward and backward of a
micro-batch is timed (from recorded steps, waiting left out) and the boundary tensor is sent to and fro; with those numbers
`plans.spec.schedule_timing.makespan` gives both schedules' times. Needs root and iproute2 (see slow_link.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import Times, comparison, example, interleaved, write

from fourfold.graph.capture import capture
from fourfold.plans import Options, Plan, named
from fourfold.plans.spec.schedule import schedule_named
from fourfold.plans.spec.schedule_timing import makespan
from fourfold.reproduce.hosts import hosts
from fourfold.runs.parallel import Parallel, parallelize
from fourfold.workload.plan_inputs import with_signature

METHOD = (
    "two network namespaces joined by tc tbf at the rate batch, one rank and one stage each, one thread; steps of both "
    "schedules (forward and backward, no update) alternate, barrier before and after; medians. The replay takes the median "
    "forward and backward of a stage and micro-batch from recorded steps, and the time a receiver waits for the boundary "
    "tensor while its sender computes on (also batch: with an idle sender)"
)
MODEL, ARGUMENTS = "vgg16-cifar", {"batch": 64}
MICROBATCHES = 8
SCHEDULES = {"1f1b-sno": "blocking", "1f1b-so": "overlapped"}
RECORDED = 3  # steps


def build_plan() -> Plan:
    model, inputs, targets, loss = example(MODEL, ARGUMENTS)
    options = Options(microbatches=MICROBATCHES, stages=2)
    plan = named("pipeline", capture(model, inputs, targets, loss), ranks=2, batch=ARGUMENTS["batch"], options=options)
    return with_signature(plan, inputs, targets)


def bind(plan: Plan, schedule: str) -> tuple[Parallel, tuple[Any, ...]]:
    model, inputs, targets, loss = example(MODEL, ARGUMENTS)
    return parallelize(model, replace(plan, schedule=schedule), loss=loss), (*inputs, *targets)


def stage_seconds(run: Parallel, batch: tuple[Any, ...]) -> dict[str, list[float]]:
    """The median forward and backward of a micro-batch on each stage."""
    events = [e for _ in range(RECORDED) for e in run.timeline(*batch).events]
    return {
        kind: [statistics.median(e.seconds for e in events if e.kind == kind and e.rank == rank) for rank in (0, 1)]
        for kind in ("F", "B")
    }


def transfer_seconds(run: Parallel, *, busy: bool) -> float:
    """How long a receiver waits for the boundary tensor, sent before; with `busy`, while the sender computes on."""
    crossing, size = run.lowered.crossings[0], run.plan.sizes[0]
    part = run.lowered.parts[crossing.target]
    shape = part.slot_layout(crossing.value, size).shape
    tensor, me, times = torch.zeros(math.prod(shape)), dist.get_rank(), []
    picture, weight = torch.rand(8, 128, 16, 16), torch.rand(128, 128, 3, 3)
    for turn in range(16):
        sender = turn % 2
        dist.barrier()
        if me == sender:
            work = dist.isend(tensor, 1 - me)
            until = time.perf_counter() + (0.25 if busy else 0.0)
            while time.perf_counter() < until:
                torch.conv2d(picture, weight, padding=1)
            work.wait()
        else:
            time.sleep(0.02)  # so that it was sent, and the sender is at work
            start = time.perf_counter()
            dist.recv(tensor, sender)
            times.append(time.perf_counter() - start)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, times)
    return statistics.median([t for some in every for t in some])


def work(rounds: int) -> None:
    """One host's part; rank 0 prints the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = build_plan()
    runs = {schedule: bind(plan, schedule) for schedule in SCHEDULES}
    steps = {key: (lambda run=run, batch=batch: run.forward_backward(*batch)) for key, (run, batch) in runs.items()}
    times: Times = interleaved(steps, rounds, {})
    seconds = stage_seconds(*runs["1f1b-so"])
    transfer, idle = (transfer_seconds(runs["1f1b-so"][0], busy=busy) for busy in (True, False))
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "stages": seconds, "transfer": transfer, "transfer_idle": idle}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads need not be waited for


def row(rate: str, found: dict[str, Any]) -> dict[str, Any]:
    replayed = {
        schedule: makespan(
            schedule_named(schedule, 2, MICROBATCHES), found["stages"]["F"], found["stages"]["B"], found["transfer"], transfers
        )
        for schedule, transfers in SCHEDULES.items()
    }
    result = comparison(found["times"], peer="1f1b-sno", ours="1f1b-so")
    return {
        "rate": rate,
        "model": MODEL,
        **ARGUMENTS,
        "microbatches": MICROBATCHES,
        **result,
        "replayed_seconds": replayed,
        "replayed_ratio": replayed["1f1b-sno"] / replayed["1f1b-so"],
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,200mbit,1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    if options.worker:
        work(options.rounds)
    rows = []
    for rate in options.rates.split(","):
        with hosts(count=2, rate=rate) as run:
            outputs = run([sys.executable, str(Path(__file__)), "--worker", "--rounds", str(options.rounds)], timeout=900)
        rows.append(row(rate, json.loads(outputs[0].strip().splitlines()[-1])))
        last, sr = rows[-1], rows[-1]["transfer"]
        print(
            f"{rate}: 1f1b-sno {last['peer_seconds'] * 1e3:.0f} ms, 1f1b-so {last['ours_seconds'] * 1e3:.0f} ms, "
            f"{last['throughput_ratio']:.3f} x; replay {last['replayed_seconds']['1f1b-sno'] * 1e3:.0f} and "
            f"{last['replayed_seconds']['1f1b-so'] * 1e3:.0f} ms, {last['replayed_ratio']:.3f} x "
            f"(a transfer takes {sr * 1e3:.1f} ms)",
            flush=True,
        )
    write(options.output, METHOD, rows)


if __name__ == "__main__":
    main()
