"""Predicted steps on one GPU against those measured there: no GPU is needed, only the raw rows of `device_steps.py`.

Each row twice: with its own kernels as they were measured one by one on that GPU, and with nothing but what comes with
Fourfold for the device. Peaks of memory beside them. Rows that were not steady themselves are named and left out.

    python benchmarks/device_accuracy.py                              # all rows
    python benchmarks/device_accuracy.py --page docs/cost-model.md    # and its table written anew
    python benchmarks/device_accuracy.py --leave-one-out FILE         # each network left out of the fit in turn; written there
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device_kernels import CASES
from device_steps import ROWS
from records import RESULTS, kernel_rows, write_record

from fourfold.calibrate.kernels import samples
from fourfold.cluster import cluster_named
from fourfold.files import write_file
from fourfold.graph import Graph
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.models import MODELS
from fourfold.oracle.predict import predict
from fourfold.oracle.prices.efficiency import Efficiency, efficiency_of, name_of
from fourfold.oracle.prices.fitting import fit, kernel_of_row
from fourfold.oracle.prices.kernels import Kernel
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.plans import lower_plan, named

FILES = (RESULTS / "2026-11-18-h200-steps.json",)
KERNELS = RESULTS / "2026-11-15-h200-kernels.json"
STEADY = 0.05  # a row whose quartiles lie further apart than this part of its median is left out
VIEW = "transpose"  # computes nothing: stays in every fit, since its backward tells what the engine does around each call
ALLOWED = {"measured": 0.08, "shipped": 0.20, "memory": 0.04}
BEGIN, END = "<!-- benchmarks/device_accuracy.py writes this -->", "<!-- until here -->"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One network, batch and precision: seconds and bytes, measured and predicted."""

    model: str
    batch: int
    precision: str
    spread: float
    step: float
    with_kernels: float
    with_shipped: float
    peak: float
    predicted_peak: float

    @property
    def steady(self) -> bool:
        return self.spread <= STEADY

    @property
    def errors(self) -> dict[str, float]:
        return {
            "measured": self.with_kernels / self.step - 1,
            "shipped": self.with_shipped / self.step - 1,
            "memory": self.predicted_peak / self.peak - 1,
        }


def measured_rows(files: Iterable[Path], *, every: bool = False) -> list[dict[str, Any]]:
    """The rows of the list in device_steps.py, each from the last file that has it; or `every` row there is."""
    wanted = {(name, batch) for name, _, batches in ROWS for batch in batches}
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            if every or (row["model"], row["batch"]) in wanted:
                found[row["model"], row["batch"], row["precision"]] = row
    return [found[key] for key in sorted(found, key=lambda key: ([name for name, _, _ in ROWS].index(key[0]), key[2], key[1]))]


def scores(rows: Iterable[Mapping[str, Any]]) -> Iterator[Score]:
    graphs: dict[str, Mapping[str, Graph]] = {}
    for row in rows:
        known = json.dumps([row["model"], row["arguments"]])
        if known not in graphs:
            graphs[known] = graphs_of(row["model"], row["arguments"])
        yield score(row, graphs[known][row["precision"]])


def graphs_of(model: str, arguments: dict[str, Any]) -> Mapping[str, Graph]:
    with torch.device("meta"):
        plain = capture(*MODELS[model](**arguments, batch=2))
    return {"tf32": plain, "bf16": under_autocast(plain)}


def score(row: Mapping[str, Any], graph: Graph, efficiencies: Mapping[str, Efficiency] | None = None) -> Score:
    """`efficiencies`: instead of those shipped."""
    lowered = lower_plan(graph, named("data", graph, ranks=1, batch=row["batch"]))
    cluster = cluster_named("dgx-h200", devices=1)
    shipped = Prices(cluster=cluster, precision=row["precision"], efficiencies=efficiencies or {})
    kernels = {
        key: KernelTime(forward=found["forward"], backward=found["backward"], spread=found["spread"])
        for key, found in row["kernels"].items()
    }
    updated = sum(graph.values[p.name].bytes for p in graph.parameters if p.trainable)
    own = _with_update(replace(shipped, kernels=kernels), updated / row["host"]["update_device"])
    plain = predict(lowered, shipped, optimizer="momentum")
    times = sorted(row["steps"])
    quarter = len(times) // 4
    return Score(
        model=row["model"],
        batch=row["batch"],
        precision=row["precision"],
        spread=(times[-1 - quarter] - times[quarter]) / statistics.median(times),
        step=statistics.median(times),
        with_kernels=predict(lowered, own, optimizer="momentum").estimate.step_seconds,
        with_shipped=plain.estimate.step_seconds,
        peak=row["bytes"]["peak"],
        predicted_peak=plain.peak_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A step predicted with what is shipped, and with kernels fitted without those of its network."""

    model: str
    batch: int
    precision: str
    step: float
    with_shipped: float
    without_network: float
    kernels: int  # left out of the fit

    def row(self) -> dict[str, Any]:
        errors = {"error": self.with_shipped / self.step - 1, "error_left_out": self.without_network / self.step - 1}
        return {**asdict(self), **errors}


def leave_one_out(rows: Sequence[Mapping[str, Any]]) -> Iterator[LeftOut]:
    """Each network in turn left out of the fit: every kernel with the shapes of a layer of the network, whatever the batch,
    in any of the sizes in which its kernels or its steps were measured."""
    raw = kernel_rows(json.loads(KERNELS.read_text()))
    kind = cluster_named("dgx-h200").device(0)
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        graphs = graphs_of(model, mine[0]["arguments"])
        sizes = [graphs, *(graphs_of(name, arguments) for name, arguments, _ in CASES if name == model)]
        own = set[tuple[object, ...]]().union(*(_layers(graph) for each in sizes for graph in each.values()))
        others = [row for row in raw if name_of(kernel_of_row(row)) == VIEW or _layer(kernel_of_row(row)) not in own]
        fitted = efficiency_of(kind.name, {"source": "", **fit(others, rates=dict(kind.rates), bandwidth=kind.bandwidth)})
        for row in mine:
            graph = graphs[row["precision"]]
            yield LeftOut(
                model=model,
                batch=row["batch"],
                precision=row["precision"],
                step=statistics.median(row["steps"]),
                with_shipped=score(row, graph).with_shipped,
                without_network=score(row, graph, {kind.name: fitted}).with_shipped,
                kernels=len(raw) - len(others),
            )


def print_leave_one_out(found: Sequence[LeftOut]) -> None:
    for model in dict.fromkeys(each.model for each in found):
        mine = [each.row() for each in found if each.model == model]
        errors = " ".join(f"{row['error_left_out']:+.1%}" for row in mine)
        print(f"{model}, {mine[0]['kernels']} kernels left out: {errors}")
    shipped, without = (statistics.mean(abs(e.row()[key]) for e in found) for key in ("error", "error_left_out"))
    print(f"{len(found)} rows, mean error without sign: {shipped:.1%} with what is shipped, {without:.1%} left out")


def _layers(graph: Graph) -> set[tuple[object, ...]]:
    return {_layer(s.kernel) for s in samples(lower_plan(graph, named("data", graph, ranks=1, batch=2)), {}).values()}


def _layer(kernel: Kernel) -> tuple[object, ...]:
    """A kernel whatever its batch."""
    window = kernel.arguments if "conv" in kernel.target else ""
    return (kernel.target, window, *(spec.shape[1:] for spec in (*kernel.operands, *kernel.results)))


def _with_update(known: Prices, speed: float) -> Prices:
    """Prices with the measured speed of the update, bytes of parameters a second."""
    cluster = known.cluster
    kinds = tuple(replace(kind, updates=(("momentum", speed),)) for kind in cluster.kinds)
    return replace(known, cluster=replace(cluster, kinds=kinds))


def means(found: Sequence[Score]) -> dict[str, float]:
    return {name: statistics.mean(abs(row.errors[name]) for row in found) for name in ALLOWED}


def table(found: Sequence[Score]) -> str:
    lines = ["| | batch | | step, ms | own kernels | | shipped | | peak, GiB | predicted | |", "|---" * 11 + "|"]
    for row in found:
        errors = {name: f"{100 * error:+.1f} %" for name, error in row.errors.items()}
        cells = [
            row.model,
            row.batch,
            row.precision,
            f"{1e3 * row.step:.2f}",
            f"{1e3 * row.with_kernels:.2f}",
            errors["measured"],
            f"{1e3 * row.with_shipped:.2f}",
            errors["shipped"],
            f"{row.peak / 2**30:.2f}",
            f"{row.predicted_peak / 2**30:.2f}",
            errors["memory"],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(found: Sequence[Score], left_out: Sequence[Score]) -> str:
    mean = means(found)
    worst = {name: max((row.errors[name] for row in found), key=abs) for name in ALLOWED}
    words = {"measured": "steps with their own kernels", "shipped": "steps with what is shipped", "memory": "peaks"}
    said = "; ".join(
        f"{words[name]} {mean[name]:.1%} (allowed {ALLOWED[name]:.0%}, worst {worst[name]:+.1%})" for name in words
    )
    named_out = ", ".join(f"{row.model} {row.batch} {row.precision} ({row.spread:.0%})" for row in left_out)
    return f"{len(found)} rows, mean error without sign: {said}. Left out as unsteady: {named_out or 'none'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, nargs="*", default=FILES, help="raw rows of device_steps.py")
    parser.add_argument("--every", action="store_true", help="also rows of other batches than the list's")
    parser.add_argument("--leave-one-out", type=Path, metavar="FILE", help="leave each network out of the fit; write a record")
    parser.add_argument("--page", type=Path, help="a page whose table is to be written anew")
    options = parser.parse_args()
    sys.setrecursionlimit(20000)  # lowering goes from the loss to the first op by calls
    if options.leave_one_out is not None:
        left = list(leave_one_out(measured_rows(options.measured)))
        print_leave_one_out(left)
        return write_record(
            options.leave_one_out, {"kernels": KERNELS.name, "steps": FILES[0].name, "rows": [e.row() for e in left]}
        )
    every = list(scores(measured_rows(options.measured, every=options.every)))
    found, left_out = [row for row in every if row.steady], [row for row in every if not row.steady]
    print(table(found), "", table(left_out), "", summary(found, left_out), sep="\n")
    if options.page is not None:
        before, _, rest = options.page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        write_file(options.page, f"{before}{BEGIN}\n{table(found)}\n\n{summary(found, left_out)}\n{END}{after}")


if __name__ == "__main__":
    main()
