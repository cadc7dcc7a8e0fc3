"""Kernels of the built-in networks on one GPU: raw times from which the efficiency of a device is fitted.

Every distinct local kernel of several networks at several sizes runs by itself, forward and backward, in fp32, tf32 and bf16
(autocast's dtypes). Seconds of the device and of the host are measured apart (`fourfold.calibrate.gpu_kernels`);
`cudnn.benchmark` is on. Kernels come in a shuffled order, so that a run cut short by its time limit has some of every kind.
`device_fit.py` makes the shipped file of the rows; sizes are others than those of `device_steps.py`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from records import kernel_table, write_record

from fourfold.calibrate.gpu_kernels import DeviceKernel, queued
from fourfold.calibrate.kernels import Sample, samples
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.plans import lower_plan, named

CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("alexnet", {}, (16, 384)),
    ("vgg16", {}, (2, 8, 32, 96)),
    ("resnet50", {}, (2, 8, 64, 256)),
    ("cosmoflow", {"size": 128}, (1, 8)),
    ("cosmoflow", {"size": 64}, (8,)),
    ("unet3d", {"size": 64, "width": 32}, (1, 8)),
    ("unet3d", {"size": 96, "width": 32}, (4,)),
    ("unet3d", {"size": 96, "width": 16}, (2,)),
    ("gpt2", {"layers": 1, "width": 1024, "heads": 16, "length": 1024}, (1, 6)),
    ("gpt2", {"layers": 1, "width": 512, "heads": 8, "length": 1024}, (8, 24)),
    ("gpt2", {"layers": 1, "width": 256, "heads": 4, "length": 256}, (16,)),
    ("gnmt", {}, (8, 64)),
]
PRECISIONS = ("fp32", "tf32", "bf16")
DEVICE = torch.device("cuda")


def kernels_to_time() -> dict[tuple[str, str], Sample]:
    """The kernels to time by precision and key; in fp32 only those that tf32 changes."""
    out: dict[tuple[str, str], Sample] = {}
    for name, arguments, batches in CASES:
        with torch.device("meta"):
            plain = capture(*MODELS[name](**arguments, batch=2))
        cast = under_autocast(plain)
        for precision in PRECISIONS:
            graph = cast if precision == "bf16" else plain
            for batch in batches:
                found = samples(lower_plan(graph, named("data", graph, ranks=1, batch=batch)), {})
                out |= {(precision, k): s for k, s in found.items() if precision != "fp32" or s.kernel.matrix}
    order = list(out.items())
    random.Random(0).shuffle(order)
    return dict(order)


def row(precision: str, sample: Sample) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    kernel = sample.kernel
    found = DeviceKernel(sample, DEVICE, autocast=precision == "bf16").device_time()
    return {
        "precision": precision,
        "target": kernel.target,
        "way": kernel.way,
        "arguments": kernel.arguments,
        "operands": [[s.shape, s.dtype] for s in kernel.operands],
        "results": [[s.shape, s.dtype] for s in kernel.results],
        "gradients": kernel.gradients,
        "flops": kernel.flops,
        **asdict(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    sys.setrecursionlimit(20000)
    end, rows, failed = time.monotonic() + 60 * options.minutes, [], {}
    todo = kernels_to_time()
    print(f"{len(todo)} kernels on {torch.cuda.get_device_name()}", flush=True)
    for (precision, _), sample in todo.items():
        if time.monotonic() > end:
            print("out of time", flush=True)
            break
        try:
            rows.append(row(precision, sample))
        except Exception as error:
            failed[f"{precision} {sample.kernel.key}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    about |= {"updates": updates(), "copy": copy_rate(), "failed": failed}
    write_record(Path(options.output), {**about, **kernel_table(rows)})
    print(len(rows), "rows,", len(failed), "failed", list(failed.items())[:5], flush=True)


def updates() -> dict[str, float]:
    """Bytes of parameters per second that each optimizer updates."""
    parameter = torch.zeros(64 * 2**20, device=DEVICE, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizers = {
        "sgd": torch.optim.SGD([parameter], lr=0.01),
        "momentum": torch.optim.SGD([parameter], lr=0.01, momentum=0.9),
        "adamw": torch.optim.AdamW([parameter], lr=1e-3),
    }
    out = {}
    for name, optimizer in optimizers.items():
        optimizer.step()
        out[name] = 4 * parameter.numel() / min(queued(lambda _, o=optimizer: o.step())[0] for _ in range(5))
    return out


def copy_rate() -> float:
    source, target = (torch.zeros(256 * 2**20, device=DEVICE) for _ in range(2))
    return 2 * 4 * source.numel() / min(queued(lambda _: target.copy_(source))[0] for _ in range(5))


if __name__ == "__main__":
    main()
