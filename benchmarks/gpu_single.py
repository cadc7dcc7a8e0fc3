"""One rank of Fourfold against eager PyTorch on a GPU: time and peak memory of a training step, interleaved, medians.

`python benchmarks/gpu_single.py [NAME ...] [--out FILE]`. Both take the same module, data, precision (bf16 is
autocast) and SGD. Peaks are measured one at a time, with nothing else on the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.models import Example
from fourfold.runs.parallel import Parallel, parallelize
from fourfold.workload.model_text import build
from fourfold.workload.workload import Workload

CUDA = torch.device("cuda")
ROUNDS, STEPS = 9, 3


def vit(batch: int) -> Example:
    from torchvision.models import vit_b_16

    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Example(vit_b_16(), (images,), (labels,), torch.nn.functional.cross_entropy)


CASES: dict[str, Callable[[], Example]] = {
    "resnet50 b8": lambda: build("resnet50,batch=8"),
    "resnet50 b64": lambda: build("resnet50,batch=64"),
    "resnet50 b256": lambda: build("resnet50,batch=256"),
    "vit b64": lambda: vit(64),
    "gpt2 8x1024": lambda: build("gpt2,batch=8"),
    "unet3d 128^3 b2": lambda: build("unet3d,size=128,width=16,batch=2"),
}


def on_gpu(example: Example) -> Example:
    inputs = (
        {k: t.to(CUDA) for k, t in example.inputs.items()}
        if isinstance(example.inputs, dict)
        else tuple(t.to(CUDA) for t in example.inputs)
    )
    return Example(example.module.to(CUDA), inputs, tuple(t.to(CUDA) for t in example.targets), example.loss)


def eager(example: Example, precision: str) -> Callable[[], Tensor]:
    module, loss = example.module, example.loss
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else nullcontext():
            value = loss(module(*example.inputs), *example.targets)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def ours(example: Example, precision: str) -> tuple[Callable[[], Tensor], Parallel]:
    workload = Workload.of(example.module, example.inputs, targets=example.targets, loss=example.loss)
    plan = workload.plan("data", ranks=1)
    run = parallelize(
        example.module,
        plan,
        loss=example.loss,
        graph=workload.graph,
        precision=precision,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
    )
    return lambda: run.step(*example.inputs, *example.targets), run


def seconds(step: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / STEPS


def peak(step: Callable[[], Tensor]) -> int:
    for _ in range(2):
        step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def emptied() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compared(make: Callable[[], Example], precision: str) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.manual_seed(0)
    first = on_gpu(make())
    plain = eager(first, precision)
    plain_peak = peak(plain)
    del plain, first
    emptied()
    second = on_gpu(make())
    begun = time.perf_counter()
    own, run = ours(second, precision)
    ready = time.perf_counter() - begun
    own_peak = peak(own)
    static = run.graph.batch
    first = on_gpu(make())
    plain = eager(first, precision)
    for _ in range(3):
        plain(), own()
    times = [(seconds(plain), seconds(own)) for _ in range(ROUNDS)]
    ratios = sorted(b / a for a, b in times)
    del own, run, second, plain, first
    emptied()
    return {
        "eager_ms": statistics.median(a for a, _ in times) * 1e3,
        "ours_ms": statistics.median(b for _, b in times) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_spread": [ratios[0], ratios[-1]],
        "eager_peak_MB": plain_peak / 1e6,
        "ours_peak_MB": own_peak / 1e6,
        "peak_ratio": own_peak / plain_peak,
        "ready_s": ready,
        "fixed_batch": static,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_single.json"))
    parser.add_argument("--precision", action="append")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.names or CASES:
        for precision in options.precision or ("bf16", "tf32"):
            key = f"{name} {precision}"
            if key in found:
                continue
            found[key] = one = compared(CASES[name], precision)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1))
            times = f"eager {one['eager_ms']:7.2f} ms, ours {one['ours_ms']:7.2f} ms: {one['ratio']:.3f} x"
            spread = "({:.3f}-{:.3f})".format(*one["ratio_spread"])
            peaks = f"peak {one['eager_peak_MB']:.0f} / {one['ours_peak_MB']:.0f} MB: {one['peak_ratio']:.3f} x"
            print(f"{key:24} {times} {spread}; {peaks}", flush=True)


if __name__ == "__main__":
    main()
