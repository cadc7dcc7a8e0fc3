"""Kernels of the built-in networks on one GPU: raw times from which the efficiency curves of a device are fitted.

Every distinct local kernel of several networks at several batch sizes runs by itself, forward and backward, in fp32, tf32
and bf16. Launches follow one another without waiting, so that a kernel shorter than its launch shows the launch. Rows hold
the work (FLOPs, bytes) and the times; `fit` in fourfold.oracle.efficiency makes curves of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from fourfold.gauge.kernels import Alone, Sample, samples
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.oracle.efficiency import family_of
from fourfold.plans import named, pipeline
from fourfold.runtime.kernels import Local, Randomness, build

CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("vgg16", {}, (1, 8, 32)),
    ("resnet50", {}, (1, 8, 64)),
    ("cosmoflow", {"size": 128}, (1, 8)),
    ("unet3d", {"size": 64, "width": 32}, (1, 4)),
    ("gpt2", {"layers": 1, "width": 1024, "heads": 16, "length": 1024}, (1, 8)),
    ("gpt2", {"layers": 1, "width": 256, "heads": 4, "length": 256}, (1, 16)),
    ("gnmt", {}, (8, 64)),
]
PRECISIONS = {"fp32": ("float32", False), "tf32": ("float32", True), "bf16": ("bfloat16", True)}
LEAST_SECONDS = 0.01
CHAINED = 8
CHAINED_BYTES = 2e9  # larger kernels are chained twice only


class Bound:
    """A kernel on made-up tensors on a device."""

    def __init__(self, sample: Sample, device: torch.device, dtypes: dict[str, torch.dtype]) -> None:
        local = Local(Alone(sample.mesh, sample.member, device, None), Randomness(), dtypes)
        self.run = build(sample.step, local)
        self.tensors = []
        for spec, wanted in zip(sample.kernel.operands, sample.kernel.gradients, strict=True):
            dtype = getattr(torch, spec.dtype)
            made = torch.rand(spec.shape, device=device).add_(0.1).to(dtype) if dtype.is_floating_point else None
            self.tensors.append(
                made.requires_grad_(wanted) if made is not None else torch.zeros(spec.shape, dtype=dtype, device=device)
            )
        self.leaves = [t for t in self.tensors if t.requires_grad]
        self.chained = CHAINED if sample.kernel.moved < CHAINED_BYTES else 2
        self.links = [[t.detach().requires_grad_(t.requires_grad) for t in self.tensors] for _ in range(self.chained)]
        self.ends = [t for link in self.links for t in link if t.requires_grad]
        self.grads: list[torch.Tensor] = []

    def forward(self) -> None:
        with torch.no_grad():
            self.run(*self.tensors)

    def both(self) -> None:
        """Several forwards and one backward through all: in a step the engine is entered once, not for every op."""
        outs = []
        for link in self.links:
            result = self.run(*link)
            outs += [t for t in (result if isinstance(result, (tuple, list)) else [result]) if t.requires_grad]
        if outs:
            self.grads = self.grads or [torch.ones_like(t) for t in outs]
            torch.autograd.grad(outs, self.ends, self.grads, allow_unused=True)


def seconds(once: Any) -> float:
    """Seconds per call of many in a row, the median of three series."""
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    once()
    torch.cuda.synchronize()
    count = max(3, min(200, int(LEAST_SECONDS / max(time.perf_counter() - begun, 1e-6))))
    found = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            once()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    options = parser.parse_args()
    device, end, rows = torch.device("cuda"), time.monotonic() + 60 * options.minutes, []
    wanted: dict[tuple[str, str], Sample] = {}
    for name, arguments, batches in CASES:
        with torch.device("meta"):
            graph = capture(*MODELS[name](**arguments, batch=2))
        for batch in batches:
            lowered = pipeline(graph, named("data", graph, ranks=1, batch=batch))
            for precision, (dtype, _) in PRECISIONS.items():
                found = samples(lowered, {"float32": dtype})
                wanted.update({(precision, key): sample for key, sample in found.items()})
    print(f"{len(wanted)} kernels on {torch.cuda.get_device_name()}", flush=True)
    failed: dict[str, str] = {}
    for (precision, key), sample in wanted.items():
        if time.monotonic() > end:
            print("out of time", flush=True)
            break
        dtype, fast = PRECISIONS[precision]
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast and dtype == "float32"
        kernel = sample.kernel
        try:
            run = Bound(sample, device, {"float32": getattr(torch, dtype)})
            one = seconds(run.forward)
            two = seconds(run.both) / run.chained if run.leaves else one
        except Exception as error:
            failed[f"{precision} {kernel.target}"] = str(error).splitlines()[0][:200]
            continue
        rows.append({"precision": precision, "family": family_of(kernel), "target": kernel.target, "key": key,
                     "flops": kernel.flops, "bytes": kernel.moved, "backward_flops": kernel.backward_flops,
                     "backward_bytes": kernel.backward_moved, "forward": one, "backward": max(two - one, 0.0)})  # fmt: skip
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    with open(options.output, "w") as file:
        json.dump({**about, "updates": updates(device), "copy": copy_rate(device), "rows": rows, "failed": failed}, file)
    print(len(rows), "rows,", len(failed), "failed", list(failed.items())[:5], flush=True)


def updates(device: torch.device) -> dict[str, float]:
    """Bytes of parameters per second that each optimizer updates."""
    parameter = torch.zeros(64 * 2**20, device=device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    made = {"sgd": torch.optim.SGD([parameter], lr=0.01), "momentum": torch.optim.SGD([parameter], lr=0.01, momentum=0.9),
            "adamw": torch.optim.AdamW([parameter], lr=1e-3)}  # fmt: skip
    return {name: 4 * parameter.numel() / seconds(optimizer.step) for name, optimizer in made.items()}


def copy_rate(device: torch.device) -> float:
    source, target = (torch.zeros(256 * 2**20, device=device) for _ in range(2))
    return 2 * 4 * source.numel() / seconds(lambda: target.copy_(source))


if __name__ == "__main__":
    main()
