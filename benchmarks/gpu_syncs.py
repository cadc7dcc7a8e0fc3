"""How often the host waits for the GPU within a training step: synchronising calls in a profile of one step on each rank.

`python benchmarks/gpu_syncs.py`: two NCCL ranks share a GPU; inputs are on the device already, and nobody reads the loss.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from fourfold.plans import Options
from fourfold.runs import train
from fourfold.runtime.host.devices import rank_devices
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.workload import load_workload

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
CASES = (
    ("resnet50,image=64,width=16,classes=10", "data", Options()),
    ("resnet50,image=64,width=16,classes=10", "spatial", Options()),
    ("resnet50,image=64,width=16,classes=10", "fsdp", Options()),
    ("vgg16-cifar,width=64,dropout=0.5", "filter", Options()),
    ("vgg16-cifar,width=64", "pipeline", Options()),
    ("gpt2,layers=2,width=96,heads=6,vocabulary=500,length=64", "filter", Options()),
    ("gnmt,width=64,vocabulary=101,length=9", "data", Options()),
)


def waits() -> tuple[Counter[str], list[str]]:
    """Of one step of the task begun on this rank: how many calls of each kind, and where from."""
    trainer = train._running[train.NOW]
    feeds = [tensor.to(trainer.run.device) for tensor in trainer.drawn(0).values()]
    for _ in range(3):
        trainer.run.step(*feeds)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=True) as profiler:
        trainer.run.step(*feeds)
    found, places = Counter[str](), []
    for event in profiler.events():
        if event.name in WAITS:
            found[event.name] += 1
            parent = event.cpu_parent
            chain = []
            while parent is not None and len(chain) < 3:
                chain.append(parent.name)
                parent = parent.cpu_parent
            places.append(" < ".join(chain))
    return found, places


def main() -> int:
    devices = rank_devices("cuda", 2, share_gpu=True)
    total = 0
    with LocalRanks(2, timeout=200, devices=devices) as ranks:
        for model, strategy, options in CASES:
            workload = load_workload(model)
            plan = workload.plan(strategy, ranks=2, options=options)
            train.start(workload, plan, ranks)
            for rank, (found, places) in enumerate(ranks(waits)):
                # the profile itself ends with one wait for the device
                total += max(sum(found.values()) - found["cudaDeviceSynchronize"], 0)
                print(f"{model.partition(',')[0]} {strategy}, rank {rank}: {dict(found) or 'none'}")
                for place, count in Counter(places).most_common(4):
                    print(f"    {count} x {place}")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
