"""Ranks that share a GPU train vgg16-cifar with the losses of one process: data, spatial, 1f1b and fsdp on four NCCL ranks.

`python benchmarks/gpu_training.py [--steps N] [--out FILE]`. Data are digits where scikit-learn is there, else made up;
float64, so that losses must agree to 1e-9.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from pathlib import Path

from fourfold.api.running import train
from fourfold.plans import Options

MODEL = "vgg16-cifar,width=64,norm=True"
PLANS = {
    "data": ("data", Options()),
    "spatial": ("spatial", Options()),
    "1f1b": ("pipeline", Options(schedule="1f1b-sno")),
    "fsdp": ("fsdp", Options()),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_training.json"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    data = "digits" if importlib.util.find_spec("sklearn") else "synthetic"
    common = {"batch": options.batch, "steps": options.steps, "precision": "fp64", "data": data, "predict": False}
    common |= {"device": options.device, "share_gpu": options.device == "cuda"}
    found: dict[str, object] = {"data": data}
    worst = 0.0
    for name, (strategy, more) in PLANS.items():
        microbatches = 4 if strategy == "pipeline" else 1  # one process has the same: batch norm's statistics are of each
        split = Options(schedule=more.schedule, microbatches=microbatches if microbatches > 1 else None)
        alone = Options(microbatches=microbatches if microbatches > 1 else None)
        one = train(MODEL, strategy="data", ranks=1, options=alone, **common)  # type: ignore[arg-type]
        many = train(MODEL, strategy=strategy, ranks=options.ranks, options=split, **common)  # type: ignore[arg-type]
        assert one is not None and many is not None
        off = max(abs(a - b) / abs(b) for a, b in zip(many.history.losses, one.history.losses, strict=True))
        worst = max(worst, off)
        found[name] = {"off": off, "first": many.history.losses[0], "last": many.history.losses[-1]}
        accuracy = many.history.accuracy
        right = f", {accuracy.fraction:.1%} of {accuracy.examples} held-out digits right" if accuracy is not None else ""
        print(
            f"{name}: loss {many.history.losses[0]:.4f} to {many.history.losses[-1]:.4f}, off one process by {off:.1e}{right}"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    return 0 if worst < 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
