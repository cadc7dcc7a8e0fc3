"""Networks of torchvision and transformers split on GPUs: `data`, `filter` and `spatial` on two NCCL ranks that share a GPU.

`python benchmarks/gpu_foreign.py [--out FILE]`: three float64 steps against eager PyTorch on the GPU. Cells that FILE has
already are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

from fourfold.errors import Error, WorkerFailed
from fourfold.models.example import Example, class_loss, integers, normal
from fourfold.runs.reference import Reference
from fourfold.runs.verify import verify
from fourfold.runtime.host.devices import own_device, rank_devices
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.workload import load_workload

FOREIGN = Path(__file__).parents[1] / "tests" / "support" / "foreign.py"
NETS = (
    *(f"{__file__}:{name}" for name in ("resnet50", "densenet121", "mobilenet_v2", "vgg11_bn", "vit_b_16")),
    *(f"{FOREIGN}:{name}" for name in ("resnet", "convnext", "vit", "segformer", "bert", "gpt2", "llama")),
)
STRATEGIES = ("data", "filter", "spatial")


def _torchvision(name: str, image: int, **arguments: object) -> Example:
    import torchvision

    module = getattr(torchvision.models, name)(num_classes=10, **arguments)
    return Example(module, (normal(4, 3, image, image, seed=0),), (integers(4, below=10, seed=1),), class_loss)


def resnet50() -> Example:
    return _torchvision("resnet50", 64, width_per_group=16)


def densenet121() -> Example:
    return _torchvision("densenet121", 64)


def mobilenet_v2() -> Example:
    return _torchvision("mobilenet_v2", 64)


def vgg11_bn() -> Example:
    return _torchvision("vgg11_bn", 64)


def vit_b_16() -> Example:
    return _torchvision("vit_b_16", 224)


def outcome(text: str, strategy: str, ranks: LocalRanks, reference: Reference) -> tuple[str, float]:
    """What a cell comes to, and the fraction of FLOPs split."""
    try:
        plan = reference.workload.plan(strategy, ranks=ranks.count)
        verdict = verify(reference.workload, plan, ranks, reference=reference)
    except WorkerFailed as error:
        return f"failed: {str(error).strip().splitlines()[-1]}", 0.0
    except Error as error:
        return f"refused: {error}", 0.0
    assert verdict is not None
    worst = verdict.worst
    word = "equal" if verdict.equal else f"unequal: {worst.what} {worst.tensor} {worst.error:.1e} > {worst.limit:.1e}"
    return word, verdict.program.split_flops_fraction


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_foreign.json"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known: dict[str, list[object]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    devices = rank_devices(options.device, 2, share_gpu=options.device == "cuda")
    with LocalRanks(2, timeout=300, devices=devices) as ranks:
        for text in NETS:
            name = text.rpartition("/")[2].removesuffix(".py").replace(".py:", ": ")
            if all(f"{name} | {strategy}" in known for strategy in STRATEGIES):
                continue
            try:
                workload = load_workload(text)
            except (Error, ImportError) as error:
                known |= {f"{name} | {strategy}": [f"not captured: {error}", 0.0] for strategy in STRATEGIES}
                print(f"{name}: {error}", flush=True)
                continue
            reference = Reference(workload=workload, device=own_device(options.device))
            for strategy in STRATEGIES:
                begun = time.monotonic()
                word, split = outcome(text, strategy, ranks, reference)
                known[f"{name} | {strategy}"] = [word, split]
                print(f"{name} | {strategy}: {word}, {split:.1%} split ({time.monotonic() - begun:.1f} s)", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(known, indent=0))
            torch.cuda.empty_cache() if options.device == "cuda" else None
    bad = [cell for cell, (word, _) in known.items() if not str(word).startswith(("equal", "refused"))]
    print(
        f"{len(known)} cells, {sum(word == 'equal' for word, _ in known.values())} equal, {len(bad)} neither equal nor refused"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
