"""Predicted before, then measured: peak bytes of a training step on every rank, for every strategy on 2 and 4 local ranks.

The prediction needs no run. What is measured is the peak of allocator events of a profiled step (`runs.measured_memory`):
bytes, so other work on the machine does no harm. An error is a part of what was measured, less common memory of a fixed size
(ring, slices), which is many times what a small model needs and would hide it.

    python benchmarks/memory_accuracy.py                                 # all, about a quarter of an hour
    python benchmarks/memory_accuracy.py --only gpt2/filter --only gnmt
    python benchmarks/memory_accuracy.py --page docs/memory.md           # and its table written anew
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from contest import write

from fourfold.errors import Infeasible
from fourfold.files import write_file
from fourfold.oracle.memory.peak import memory
from fourfold.plans import Options, lower_plan
from fourfold.plans.spec.placement import Placement
from fourfold.runs.comparison_run import ComparisonRun, save_data
from fourfold.runs.train import afterwards, begin
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.workload import Workload, load_workload

METHOD = "momentum SGD, float32, local gloo ranks of one thread; predicted, then the peak of allocator events of one step"
OPTIMIZER = "momentum"
MODELS = {
    "vgg16-cifar": ("vgg16-cifar", 16),
    "resnet50": ("resnet50,image=64,width=32", 8),
    "unet3d": ("unet3d,size=32,width=8,depth=3", 8),
    "cosmoflow": ("cosmoflow,size=32,width=16", 8),
    "gnmt": ("gnmt,layers=4,width=128,length=20,vocabulary=1000", 16),
    "gpt2": ("gpt2,layers=4,width=128,heads=8,length=64,vocabulary=1000", 8),
}
MANY = {"microbatches": 4}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data", {}),
    "filter": ("filter", {}),
    "channel": ("channel", {}),
    "spatial": ("spatial", {}),
    "splitbrain": ("splitbrain", {}),
    "grid": ("grid", {}),
    "gpipe": ("pipeline", {**MANY, "schedule": "gpipe"}),
    "1f1b-sno": ("pipeline", {**MANY, "schedule": "1f1b-sno"}),
    "1f1b-so": ("pipeline", {**MANY, "schedule": "1f1b-so"}),
    "fsdp": ("fsdp", {}),
    "zero 1": ("data", {"zero": 1}),
    "recompute": ("data", {"recompute": 2}),
    "data+filter": ("data+filter", {}),
    "data+spatial": ("data+spatial", {}),
    "data+pipeline": ("data+pipeline", {"microbatches": 2}),
    "filter+pipeline": ("filter+pipeline", MANY),
    "spatial+pipeline": ("spatial+pipeline", MANY),
}
RANKS = (2, 4)
MEAN, UNDER = 0.05, 0.03
Row = dict[str, Any]


def rows(only: Sequence[str] = ()) -> Iterator[Row]:
    """One per rank: model, strategy, ranks, rank, predicted, measured, error; `refused` where there is no such plan."""
    for count in RANKS:
        with LocalRanks(count, timeout=3600) as ranks:
            for model, (text, batch) in MODELS.items():
                chosen = [way for way in WAYS if _wanted(model, way, count, only)]
                if chosen:
                    yield from _of_model(model, load_workload(text, batch=batch), chosen, ranks)


def _wanted(model: str, way: str, count: int, only: Sequence[str]) -> bool:
    if "+" in way and count < 4:
        return False
    return not only or any(set(text.split("/")) <= {model, way, str(count)} for text in only)


def _of_model(model: str, workload: Workload, ways: Sequence[str], ranks: LocalRanks) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        data = Path(folder, "data.pt")
        save_data(workload.example, data)
        for way in ways:
            about: Row = {"model": model, "strategy": way, "ranks": ranks.count}
            try:
                found = list(_peaks(workload, way, str(data), ranks))
            except Infeasible as reason:
                yield {**about, "refused": str(reason)}
                continue
            yield from ({**about, **row} for row in found)


def _peaks(workload: Workload, way: str, data: str, ranks: LocalRanks) -> Iterator[Row]:
    strategy, options = WAYS[way]
    plan = workload.plan(strategy, ranks=ranks.count, options=Options(**options))
    found = memory(lower_plan(workload.graph, plan), Placement.one_host(ranks.count), optimizer=OPTIMIZER)
    task = ComparisonRun(graph=workload.graph, plan=plan, data=data, precision="fp32", optimizer=OPTIMIZER)
    ranks(begin, task, 0)
    for rank, real in enumerate(measured.peak_bytes for measured in ranks(afterwards)):
        peak = found.of(rank)
        fixed = peak.parts.get("ring", 0) + peak.parts.get("slices", 0)
        yield {
            "rank": rank,
            "predicted": peak.bytes,
            "measured": real,
            "fixed": fixed,
            "error": (peak.bytes - real) / (real - fixed),
            "at": f"{peak.action}: {peak.op}",
        }


def table(found: Sequence[Row]) -> str:
    """The larger error of a plan's ranks, 2 and 4 ranks in one cell; Markdown."""
    lines = [f"| 2 / 4 ranks | {' | '.join(MODELS)} |", "|---" * (1 + len(MODELS)) + "|"]
    for way in WAYS:
        cells = []
        for model in MODELS:
            by_count = [[r for r in found if (r["model"], r["strategy"], r["ranks"]) == (model, way, n)] for n in RANKS]
            cells.append(" / ".join(_cell(some) for some in by_count if some))
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(some: Sequence[Row]) -> str:
    if "refused" in some[0]:
        return "-"
    worst = max((row["error"] for row in some), key=abs)
    return f"{100 * worst:+.1f} %" if abs(worst) >= 5e-4 else "0"


def summary(found: Sequence[Row]) -> str:
    errors = [row["error"] for row in found if "error" in row]
    plans = len({(row["model"], row["strategy"], row["ranks"]) for row in found if "error" in row})
    mean, low, high = statistics.mean(map(abs, errors)), min(errors), max(errors)
    return (
        f"{len(errors)} ranks of {plans} plans: mean error without sign {mean:.1%} (allowed {MEAN:.0%}), "
        f"lowest {low:+.1%} (allowed {-UNDER:.0%}), highest {high:+.1%}."
    )


def show(row: Row) -> None:
    name = f"{row['model']:12} {row['strategy']:16} {row['ranks']}"
    if "refused" in row:
        print(f"{name} refused: {row['refused']}", file=sys.stderr, flush=True)
        return
    sizes = " ".join(f"{row[key] / 2**20:8.2f}" for key in ("predicted", "measured"))
    print(f"{name} rank {row['rank']} {sizes} MiB {row['error']:+7.2%}  {row['at']}", file=sys.stderr, flush=True)


BEGIN, END = "<!-- benchmarks/memory_accuracy.py writes this -->", "<!-- until here -->"


def rewrite(page: Path, found: Sequence[Row]) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    write_file(page, f"{before}{BEGIN}\n{table(found)}\n\n{summary(found)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a model, a strategy, a number of ranks; some joined by /")
    parser.add_argument("--page", type=Path, help="a page whose table is to be written anew")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    found = []
    for row in rows(options.only):
        show(row)
        found.append(row)
    print(table(found), "", summary(found), sep="\n")
    day = datetime.date.today().isoformat()
    whole = str(Path(__file__).parent / "results" / f"{day}-memory-accuracy.json")
    rows_to_keep = [{key: value for key, value in row.items() if key != "at"} for row in found]
    write(options.output or (None if options.only else whole), METHOD, rows_to_keep)
    if options.page is not None:
        rewrite(options.page, found)


if __name__ == "__main__":
    main()
