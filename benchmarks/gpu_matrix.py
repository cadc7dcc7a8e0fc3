"""The op matrix on GPUs: every op by every split on two NCCL ranks that share a GPU, against eager PyTorch.

`python benchmarks/gpu_matrix.py [--mode fp64|channels_last|bf16] [--every N] [--out FILE]`. fp64 holds outputs, gradients and
buffers to 1e-9 of one process on the processor, as the suite does; channels_last gives inputs in that memory format; in bf16
(autocast) an error may be four times that of eager autocast on the GPU. Cells that FILE has already are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import matrix
import op_matrix_page
from fourfold.runs.compare import worst_error
from ranks import close_pools, use_devices

FLOOR = 2.0**-7  # a bf16 error below one unit in the last place is no error


class HalfPrepared(matrix.Prepared):
    """A case in bf16 beside its float64 reference: the module's weights are float32."""

    def job(self, column: str, ranks: int) -> object:
        return replace(super().job(column, ranks), precision="bf16")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exact = {"output": self.outputs, "gradient": self.gradients}
        self.module = self.module.float()
        self.inputs = [x.float() if x.is_floating_point() else x for x in self.inputs]
        self.targets = [t.float() for t in self.targets]

    def _judge_values(self, cell: matrix.Cell, outcome: matrix.Outcome) -> None:
        names = self.graph.outputs
        eager_outputs, eager_gradients = self._autocast()
        pairs = (
            (
                outcome.outputs,
                dict(zip(names, self.exact["output"], strict=True)),
                dict(zip(names, eager_outputs, strict=True)),
            ),
            (outcome.gradients, self.exact["gradient"], eager_gradients),
        )
        for got, wanted, eager in pairs:
            wanted = {k: v for k, v in wanted.items() if k in got}
            worst = worst_error(got, wanted)
            limit = max(4 * worst_error({k: eager[k] for k in wanted}, wanted).error, FLOOR)
            cell.error = max(cell.error, worst.error)
            if worst.error > limit:
                cell.status, cell.detail = "wrong", f"{worst.tensor} is off by {worst.error:.1e}, {limit:.1e} allowed"

    def _autocast(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        module = copy.deepcopy(self.module).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = pytree.tree_leaves(module(*[x.cuda() for x in self.inputs]))
            loss = matrix.weighted_sum(outputs, *[t.cuda() for t in self.targets])
        loss.backward()
        gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in module.named_parameters()}
        return [o.detach() for o in outputs], gradients


class LastPrepared(matrix.Prepared):
    def job(self, column: str, ranks: int) -> object:
        return replace(super().job(column, ranks), channels_last=True)


KINDS = {"fp64": matrix.Prepared, "bf16": HalfPrepared, "channels_last": LastPrepared}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=KINDS, default="fp64")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_matrix.json"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    use_devices(options.device)
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    cases = [case for case in op_matrix_page.CASES if 2 in case.ranks]
    if options.mode != "fp64":
        cases = [case for case in cases if not case.random]
    cases = cases[:: options.every]
    matrix.Prepared = KINDS[options.mode]
    begun, expected = time.monotonic(), json.loads(op_matrix_page.RESULTS.read_text())
    for family in op_matrix_page.TITLES:
        todo = [replace(c, ranks=(2,)) for c in cases if c.family == family]
        todo = [c for c in todo if any(f"{options.mode} {c.name} | {column} | 2" not in known for column in c.columns)]
        for cell in matrix.judged(todo) if todo else ():
            known[f"{options.mode} {cell.key}"] = [
                cell.status,
                cell.error,
                cell.detail[-300:],
                expected.get(cell.key, ["?"])[0],
            ]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(known, indent=0))
        print(f"{family}: {len(known)} cells, {time.monotonic() - begun:.0f} s", flush=True)
    close_pools()
    mine = {key: value for key, value in known.items() if key.startswith(f"{options.mode} ")}
    other = {key: value for key, value in mine.items() if value[0] != value[3]}
    for key, (status, error, detail, was) in other.items():
        print(f"{key}: {status} ({was} on processors) {error:.1e} {detail.strip().splitlines()[-1] if detail.strip() else ''}")
    print(f"{options.mode}: {dict(Counter(value[0] for value in mine.values()))}, {len(other)} otherwise than on processors")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
