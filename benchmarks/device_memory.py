"""Predicted peaks of memory on one GPU against those of training steps measured there: no GPU is needed, only the raw rows.

python benchmarks/device_memory.py                          # all rows
python benchmarks/device_memory.py --page docs/memory.md    # and its table written anew
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from records import RESULTS

from fourfold.files import write_file
from fourfold.graph import Graph
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.oracle.memory.peak import CUDA, memory
from fourfold.plans import lower_plan, named
from fourfold.plans.spec.placement import Placement

MEASURED = RESULTS / "2026-11-15-h200-memory.json"
GPU = Placement(hosts=(0,), devices=("gpu",))
MEAN = 0.04
BEGIN, END = "<!-- benchmarks/device_memory.py writes this -->", "<!-- until here -->"
Row = dict[str, Any]


def rows(measured: Path = MEASURED) -> Iterator[Row]:
    """One per network, batch and precision: predicted, measured, error, and where the peak is."""
    graphs: dict[str, Mapping[str, Graph]] = {}
    for row in json.loads(measured.read_text())["rows"]:
        known = json.dumps([row["model"], row["arguments"]])
        if known not in graphs:
            graphs[known] = _graphs_of(row["model"], row["arguments"])
        graph = graphs[known][row["precision"]]
        lowered = lower_plan(graph, named("data", graph, ranks=1, batch=row["batch"]))
        found = memory(lowered, GPU, optimizer="momentum", machine=CUDA)
        peak, real = found.heaviest, row["bytes"]["peak"]
        yield {
            "model": row["model"],
            "batch": row["batch"],
            "precision": row["precision"],
            "predicted": peak.bytes,
            "measured": real,
            "error": peak.bytes / real - 1,
            "at": f"{peak.action}: {peak.op}",
        }


def _graphs_of(model: str, arguments: dict[str, Any]) -> Mapping[str, Graph]:
    with torch.device("meta"):
        plain = capture(*MODELS[model](**arguments, batch=2))
    return {"tf32": plain, "bf16": under_autocast(plain)}


def table(found: Sequence[Row]) -> str:
    lines = ["| | batch | tf32 | bf16 | batch | tf32 | bf16 |", "|---" * 7 + "|"]
    for model in dict.fromkeys(row["model"] for row in found):
        mine = [row for row in found if row["model"] == model]
        cells = []
        for batch in dict.fromkeys(row["batch"] for row in mine):
            errors = {row["precision"]: row["error"] for row in mine if row["batch"] == batch}
            cells += [str(batch), *(f"{100 * errors[name]:+.1f} %" if name in errors else "-" for name in ("tf32", "bf16"))]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(found: Sequence[Row]) -> str:
    errors = [row["error"] for row in found]
    mean, low, high = statistics.mean(map(abs, errors)), min(errors), max(errors)
    allowed = f"(allowed {MEAN:.0%})"
    return f"{len(errors)} rows: mean error without sign {mean:.1%} {allowed}, lowest {low:+.1%}, highest {high:+.1%}."


def show(row: Row) -> None:
    sizes = " ".join(f"{row[key] / 2**20:9.1f}" for key in ("predicted", "measured"))
    print(f"{row['model']:10} {row['batch']:4} {row['precision']} {sizes} MiB {row['error']:+6.2%}  {row['at']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED, help="raw rows of device_steps.py")
    parser.add_argument("--page", type=Path, help="a page whose table is to be written anew")
    options = parser.parse_args()
    sys.setrecursionlimit(20000)  # lowering goes from the loss to the first op by calls
    found = []
    for row in rows(options.measured):
        show(row)
        found.append(row)
    print(table(found), "", summary(found), sep="\n")
    if options.page is not None:
        before, _, rest = options.page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        write_file(options.page, f"{before}{BEGIN}\n{table(found)}\n\n{summary(found)}\n{END}{after}")


if __name__ == "__main__":
    main()
