"""Measured peak bytes per rank of ways to use less memory, against plain data parallelism: a table.

Each row is one `fourfold train` on local ranks; the peak is that of the allocator's events of one profiled step (docs/cli.md),
weights, gradients, optimizer state and activations included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from contest import write

METHOD = "one `fourfold train --steps 2 --optimizer momentum` per row on local gloo ranks; peak of allocator events of one step"
RANKS = 4
MODELS = {"vgg16-cifar,batch=64": 64, "gpt2,layers=8,width=256,heads=8,vocabulary=2000,length=128,batch=32": 32}
ROWS = {
    "data": ["--strategy", "data"],
    "data, recompute 4": ["--strategy", "data", "--recompute", "4"],
    "ZeRO-1": ["--strategy", "data", "--zero", "1"],
    "ZeRO-3 (fsdp)": ["--strategy", "fsdp"],
    "ZeRO-3, recompute 4": ["--strategy", "fsdp", "--recompute", "4"],
    "4 stages, gpipe": ["--strategy", "pipeline", "--microbatches", "8", "--schedule", "gpipe"],
    "4 stages, 1f1b-sno": ["--strategy", "pipeline", "--microbatches", "8", "--schedule", "1f1b-sno"],
    "4 stages, 1f1b-so": ["--strategy", "pipeline", "--microbatches", "8", "--schedule", "1f1b-so"],
    "4 stages, 1f1b-sno, recompute 1": [
        "--strategy",
        "pipeline",
        "--microbatches",
        "8",
        "--schedule",
        "1f1b-sno",
        "--recompute",
        "1",
    ],
    "2 x 2 stages, ZeRO-3": ["--strategy", "data+pipeline", "--stages", "2", "--microbatches", "8", "--zero", "3"],
}


def run_train(model: str, options: list[str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "fourfold",
        "train",
        model,
        *options,
        "--ranks",
        str(RANKS),
        "--steps",
        "2",
        "--optimizer",
        "momentum",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model} {' '.join(options)}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all")
    parser.add_argument("--rounds", type=int, default=1, help="not used: a peak needs no repetition")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    rows = []
    for model in MODELS if options.models == "all" else [options.models]:
        plain = None
        for name, flags in ROWS.items():
            result = run_train(model, flags)
            peaks = result["peak_bytes"]
            plain = plain or max(peaks)
            rows.append(
                {
                    "model": model,
                    "way": name,
                    "ranks": RANKS,
                    "peak_bytes": peaks,
                    "heaviest": max(peaks),
                    "mean": sum(peaks) / len(peaks),
                    "reduction": plain / max(peaks),
                }
            )
            shown = " ".join(f"{peak / 2**20:7.1f}" for peak in peaks)
            print(
                f"{model.partition(',')[0]:12} {name:34} {shown} MiB  heaviest {plain / max(peaks):.2f} x less than data, "
                f"mean {plain * RANKS / sum(peaks):.2f} x",
                flush=True,
            )
    write(options.output, METHOD, rows)


if __name__ == "__main__":
    main()
