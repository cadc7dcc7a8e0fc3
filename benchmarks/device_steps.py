"""Training steps of the built-in networks on one GPU, and their kernels one by one: the truth that predictions are held to.

For each network, batch and precision: momentum SGD, `cudnn.benchmark` on, 4 warm-up steps, then 12 steps that follow one
another without waiting, timed by events in the queue; the peak of the allocator in a step after warm-up, and in its parts;
then every distinct kernel of the one-rank program by itself (seconds of the device, seconds of the host, bytes it takes for
a while), sums of gradients and the update. Precision bf16 is autocast. `device_accuracy.py` scores predictions against it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from records import write_record

from fourfold.calibrate.gpu_kernels import DeviceKernel, queued, sum_seconds
from fourfold.calibrate.kernels import samples
from fourfold.graph import Graph
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.models import MODELS, Example
from fourfold.oracle.time.gradient_fan_in import gradient_sums
from fourfold.plans import lower_plan, named
from fourfold.plans.lists.lowered_plan import LoweredPlan

ROWS: tuple[tuple[str, dict[str, Any], tuple[int, int]], ...] = (
    ("alexnet", {}, (128, 512)),
    ("vgg16", {}, (16, 64)),
    ("resnet50", {}, (96, 192)),
    ("resnet152", {}, (96, 192)),
    ("cosmoflow", {"size": 128}, (4, 16)),
    ("unet3d", {"size": 128}, (2, 6)),
    ("gpt2", {}, (8, 16)),
)
PRECISIONS = ("tf32", "bf16")
WARM, STEPS = 4, 12
DEVICE = torch.device("cuda")
LIKE = {"lr": 1e-4, "momentum": 0.9}


class Training:
    """A network that trains eagerly on a GPU."""

    def __init__(self, example: Example, precision: str) -> None:
        self.module, self.inputs, self.targets, self.loss = example
        self.module.train()
        self.optimizer = torch.optim.SGD(self.module.parameters(), **LIKE)
        self.bf16 = precision == "bf16"

    def forward(self) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            return self.loss(self.module(*self.inputs), *self.targets)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward().backward()
        self.optimizer.step()

    def intervals(self, count: int) -> list[float]:
        """Seconds from the end of each step to the end of the next, while the host runs ahead."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        self.step()
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    def alone(self, count: int) -> list[float]:
        """Seconds of steps after each of which the host waits."""
        out = []
        for _ in range(count):
            begun = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            out.append(time.perf_counter() - begun)
        return out

    def bytes(self) -> dict[str, int]:
        """Bytes of the allocator in a step: peaks of its parts, and what is there between them."""
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        out = {"before": torch.cuda.memory_allocated()}
        for name, part in self._parts():
            torch.cuda.reset_peak_memory_stats()
            part()
            torch.cuda.synchronize()
            out[f"{name}_peak"], out[f"after_{name}"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        held = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        out["cublas"] = held - torch.cuda.memory_allocated()
        return {**out, "peak": max(out[f"{name}_peak"] for name in ("forward", "backward", "update"))}

    def _parts(self) -> Iterator[tuple[str, Any]]:
        losses: list[torch.Tensor] = []
        yield "forward", lambda: losses.append(self.forward())
        yield "backward", lambda: losses[0].backward()
        yield "update", self.optimizer.step

    def host(self) -> dict[str, float]:
        """Seconds of the host for each part, host for while the device sleeps (a queue that is full makes it wait)."""
        self.optimizer.zero_grad(set_to_none=True)
        out = {"forward": queued(lambda _: self.forward(), least=0.1)[1]}
        out["backward"] = queued(lambda loss: loss.backward(), self.forward, least=0.1)[1]
        self.forward().backward()
        update = [queued(lambda _: self.optimizer.step(), least=0.01) for _ in range(5)]
        seconds, host = (statistics.median(found[k] for found in update) for k in (0, 1))
        return {**out, "update_device": seconds, "update": host}

    def profile(self) -> dict[str, Any]:
        """The device's kernels in one step: seconds in all, and of the heaviest by name."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.step()
            torch.cuda.synchronize()
        events = [e for e in found.events() if "CUDA" in str(e.device_type)]
        names: dict[str, list[float]] = {}
        for event in events:
            names.setdefault(event.name[:90], []).append(event.device_time / 1e6)
        heaviest = sorted(names, key=lambda name: -sum(names[name]))[:25]
        return {
            "kernels": len(events),
            "seconds": sum(map(sum, names.values())),
            "heaviest": {name: [len(names[name]), sum(names[name])] for name in heaviest},
        }


def kernels(lowered: LoweredPlan, precision: str, end: float) -> dict[str, Any]:
    """Every distinct kernel of a one-rank plan, timed."""
    out: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for key, sample in samples(lowered, {}).items():
        if time.monotonic() > end:
            failed["time"] = "ran out"
            break
        try:
            out[key] = asdict(DeviceKernel(sample, DEVICE, autocast=precision == "bf16").device_time())
        except Exception as error:
            failed[key] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    (part,) = lowered.parts
    (program,) = part.programs.values()
    for _, kernel in gradient_sums(program, program.mesh.coords(0), lowered.cut.live, {}):
        if kernel.key not in out:
            out[kernel.key] = asdict(sum_seconds(kernel, DEVICE))
    return {"kernels": out, "failed": failed}


def row(name: str, arguments: dict[str, Any], batch: int, precision: str, graph: Graph, end: float) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with DEVICE:
        training = Training(MODELS[name](**arguments, batch=batch), precision)
    for _ in range(WARM):
        training.step()
    times = training.intervals(STEPS)
    out: dict[str, Any] = {"model": name, "arguments": arguments, "batch": batch, "precision": precision, "steps": times}
    out["alone"] = training.alone(STEPS // 2)
    out["bytes"], out["host"] = training.bytes(), training.host()
    try:
        out["profile"] = training.profile()
    except Exception as error:
        out["profile"] = str(error)[:200]
    del training
    clean()
    lowered = lower_plan(graph, named("data", graph, ranks=1, batch=batch))
    out.update(kernels(lowered, precision, end))
    clean()
    return out


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--models", nargs="*", default=[name for name, _, _ in ROWS])
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    sys.setrecursionlimit(20000)  # lowering goes from the loss to the first op by calls
    end, rows = time.monotonic() + 60 * options.minutes, []
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    for name, arguments, batches in ROWS:
        if name not in options.models:
            continue
        with torch.device("meta"):
            plain = capture(*MODELS[name](**arguments, batch=2))
        graphs = {"tf32": plain, "bf16": under_autocast(plain)}
        for precision in PRECISIONS:
            for batch in batches:
                begun = time.monotonic()
                try:
                    rows.append(row(name, arguments, batch, precision, graphs[precision], end))
                except torch.cuda.OutOfMemoryError as error:
                    print(name, batch, precision, str(error)[:200], flush=True)
                    clean()
                    continue
                last, middle = rows[-1], statistics.median(rows[-1]["steps"])
                print(
                    f"{name} {batch} {precision}: {1e3 * middle:.2f} ms, {last['bytes']['peak'] / 2**30:.2f} GiB, "
                    f"{len(last['kernels'])} kernels, failed {list(last['failed'].values())[:2]}, "
                    f"device {last['profile']['seconds'] if isinstance(last['profile'], dict) else last['profile']}, "
                    f"{time.monotonic() - begun:.1f} s",
                    flush=True,
                )
                write_record(Path(options.output), {**about, "rows": rows})


if __name__ == "__main__":
    main()
