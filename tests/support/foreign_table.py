"""The table of `docs/foreign-models.md`: what each foreign model, split on two ranks, shows against one device.

`python tests/support/foreign_table.py` prints it; `test_foreign.py` holds the page to it, row by row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fourfold.errors import Infeasible
from fourfold.plans import Program, lower
from fourfold.runs.reference import Reference
from fourfold.runs.verify import Verdict, verify
from fourfold.workload.workload import Workload, load_workload
from ranks import close_pools, pool

PAGE = Path(__file__).parents[2] / "docs" / "foreign-models.md"
RANKS = 2
STRATEGIES = ("data", "filter", "spatial")
PLAIN = (
    "monai_unet", "monai_basic_unet", "monai_segresnet", "resnet", "convnext", "vit", "bert", "bert,padded=1", "gpt2",
    "gpt2,eager=1", "llama", "llama,eager=1", "swin", "segformer",
)  # fmt: skip
RANDOM = (
    "bert,dropout=0.1,padded=1", "bert,dropout=0.1,eager=1", "gpt2,dropout=0.1", "gpt2,dropout=0.1,eager=1",
    "vit,dropout=0.1", "convnext,drop_path=0.3", "swin,drop_path=0.3", "monai_unet,dropout=0.2", "monai_segresnet,dropout=0.2",
)  # fmt: skip
HEAD = "| model | strategy | equal | FLOPs split | of products, along its own dim | ops replicated for lack of a rule |"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One cell: a verdict, or why there is none."""

    text: str
    strategy: str
    verdict: Verdict | None = None
    refusal: str = ""

    @property
    def row(self) -> str:
        if self.verdict is None:
            return f"| {self.text} | {self.strategy} | refused: {self.refusal} | | | |"
        program = self.verdict.program
        replicated = ", ".join(sorted({c.op.target for c in program.replicated})) or "none"
        shares = f"{_percent(program.split_flops_fraction)} | {_percent(own_share(program, self.strategy))}"
        return f"| {self.text} | {self.strategy} | {'yes' if self.verdict.equal else 'NO'} | {shares} | {replicated} |"


def _percent(share: float) -> str:
    """Rounded down: 100 % means all of it."""
    return f"{int(share * 1000 + 1e-9) / 10:.1f} %"


def own_share(program: Program, strategy: str) -> float:
    """Of the FLOPs of products (convolutions, matrix products, attention, look-ups) the share divided the strategy's way.

    Spatial counts every division that began at the domain: windows of a picture become the batch of an attention.
    """
    features, total, own = ("filter", "channel"), 0, 0
    for step in program.computes():
        if step.nest.anchor:
            (label,) = step.labels().values()
            kind = "whole" if label == "replicate" else "filter" if label in features else "map"
            total += step.nest.flops
            own += step.nest.flops * (kind == ("filter" if strategy == "filter" else "map"))
    return own / total


@cache
def foreign(text: str) -> Workload:
    torch.set_num_threads(1)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    return load_workload(f"{Path(__file__).parent / 'foreign.py'}:{text}")


@cache
def reference(text: str) -> Reference:
    return Reference(workload=foreign(text))


@cache
def found(text: str, strategy: str) -> Found:
    """Three float64 steps on two ranks against one device."""
    try:
        plan = foreign(text).plan(strategy, ranks=RANKS)
        lower(foreign(text).graph, plan)
    except Infeasible as reason:
        return Found(text=text, strategy=strategy, refusal=str(reason))
    return Found(text=text, strategy=strategy, verdict=verify(foreign(text), plan, pool(RANKS), reference=reference(text)))


def main() -> None:
    print(HEAD)
    print("|---|---|---|---|---|---|")
    for text in (*PLAIN, *RANDOM):
        for strategy in STRATEGIES:
            print(found(text, strategy).row, flush=True)
    close_pools()


if __name__ == "__main__":
    main()
