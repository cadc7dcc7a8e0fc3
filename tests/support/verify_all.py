"""Every model by every named strategy on 2, 3 and 4 ranks against one process: `make verify-all`.

Pipelines have a grid of their own, every schedule by every model they are meant for; options stand behind the strategy, as
on a command line. The table, verify_all.json, says for each cell `equal` or `refused: <why>`; a cell that comes out otherwise
fails the run, and so does a convolutional model (or gpt2 by filter) of whose FLOPs less than 95 % ran split: equality is not to
be won by gathering. `--record` writes the table anew, for a change to be read in its diff; `--only TEXT` runs the cells whose
name contains it. One capture and one reference per model, one pool of ranks per count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from fourfold.errors import Error, WorkerFailed
from fourfold.plans import Options
from fourfold.runs.reference import Reference
from fourfold.runs.verify import verify
from fourfold.runtime.host.devices import own_device, rank_devices
from fourfold.runtime.host.launch import LocalRanks
from fourfold.workload.workload import Workload, load_workload

TABLE = Path(__file__).with_suffix(".json")
EQUAL = "equal"
SPLIT = 0.95
CONVOLUTIONAL = ("vgg16-cifar", "resnet50", "unet3d", "cosmoflow")
SPLITS = ("data", "filter", "channel", "spatial", "data+filter", "data+channel", "data+spatial", "splitbrain", "grid")
MODELS = (
    "vgg16-cifar,batch=4,width=256,channels=16",
    "resnet50,batch=4,image=64,width=16,classes=10",
    "unet3d,batch=2,size=32,width=2",
    "cosmoflow,batch=4,size=32,width=8",
    "gnmt,batch=4,width=32,vocabulary=101,length=9",
    "gpt2,batch=4,layers=4,width=96,heads=6,vocabulary=500,length=32",
)
MORE = {  # beside the grid: thin and uneven batches, batch norm, uneven shapes, passes, groups of other sizes, dropout
    "vgg16-cifar,batch=1,width=256,channels=16": [(s, 4) for s in ("data", "spatial", "filter", "data+filter", "splitbrain")],
    "resnet50,batch=1,image=64,width=16,classes=10": [(s, 4) for s in ("data", "spatial", "data+spatial", "grid")],
    "vgg16-cifar,batch=5,width=256,channels=16,norm=True": [(s, n) for s in SPLITS for n in (2, 4)],
    "vgg16-cifar,batch=3,image=45,width=250,channels=6,norm=True": [(s, n) for s in SPLITS for n in (2, 3)],
    "unet3d,batch=1,size=24,width=2": [(s, n) for s in ("data", "spatial", "filter", "grid") for n in (3, 4)],
    "vgg16-cifar,batch=8,width=256,channels=16": [
        ("splitbrain:k=2", 2), ("splitbrain:k=2", 4), ("splitbrain:k=4", 4), ("grid:pr=1", 4), ("grid:pr=4", 4),
        ("grid:pr=2,pc=2", 4), ("spatial:d0=2,d1=2", 4), ("spatial:d1=3", 3), ("data+filter:model=4", 4),
    ],
    "vgg16-cifar,batch=4,width=256,channels=16,dropout=0.5": [(s, 2) for s in ("data", "filter", "spatial", "splitbrain")],
    "vgg16-cifar,batch=4,width=32,channels=2": [  # too thin: refused, or the classifier takes another way
        ("filter", 2), ("filter", 3), ("channel", 4), ("data+filter:model=4", 4), ("grid:pr=3", 4), ("spatial:d0=2", 4),
    ],
    "gpt2,batch=3,layers=2,width=60,heads=5,vocabulary=101,length=17,dropout=0.1": [
        ("data", 3), ("filter", 3), ("spatial", 3),
    ],
}  # fmt: skip

STAGED = (  # of batches that make enough micro-batches, some of them uneven
    "vgg16-cifar,batch=6,width=64,channels=8",
    "unet3d,batch=4,size=16,width=2",
    "resnet50,batch=4,image=64,width=16,classes=10",
    "gpt2,batch=6,layers=4,width=48,heads=6,vocabulary=101,length=16",
    "gnmt,batch=4,width=32,vocabulary=101,length=9",
)
SCHEDULES = ("gpipe", "1f1b-sno", "1f1b-so", "interleaved")
COMPOSED = ("data+pipeline", "filter+pipeline", "spatial+pipeline")
SAVING = {  # the memory options, by the number of ranks
    2: ("fsdp", "pipeline --recompute 2"),
    3: ("data --zero 1", "fsdp --recompute 2", "data+pipeline --zero 3"),
    4: ("fsdp", "data+pipeline --zero 1", "data+pipeline --zero 3 --recompute 2", "filter+pipeline --zero 1"),
}
ODD = {  # uneven micro-batches, masks, more stages than the strategy would choose, one stage in micro-batches
    "vgg16-cifar,batch=7,width=256,channels=16": [
        ("pipeline --microbatches 3", 2), ("pipeline --microbatches 3 --schedule gpipe", 4),
        ("pipeline --microbatches 6 --schedule interleaved", 3), ("data+pipeline --microbatches 3", 4),
        ("data --microbatches 3", 2), ("data+pipeline --stages 3 --microbatches 3", 4),
        ("splitbrain --stages 2 --microbatches 2", 4), ("grid --stages 2 --microbatches 3", 4),
    ],
    "vgg16-cifar,batch=7,width=64,channels=8,norm=True,dropout=0.5": [
        ("pipeline --microbatches 3", 3), ("data+pipeline --microbatches 3", 3), ("filter+pipeline --microbatches 2", 4),
        ("pipeline --schedule interleaved --microbatches 4", 2),
    ],
    "gpt2,batch=5,layers=2,width=60,heads=5,vocabulary=101,length=17,dropout=0.1": [
        ("pipeline --microbatches 2", 2), ("filter+pipeline --microbatches 2", 3), ("spatial+pipeline --microbatches 3", 4),
        ("data+pipeline --microbatches 2 --schedule interleaved", 4),
    ],
    "vgg16-cifar,batch=4,width=256,channels=16": [  # what cannot be is refused
        ("pipeline --schedule 1f1b-as", 2), ("pipeline --microbatches 5", 2), ("pipeline --stages 5", 4),
        ("pipeline --schedule interleaved --microbatches 3", 2),
    ],
    "vgg16-cifar,batch=5,width=64,channels=8,norm=True,dropout=0.5": [  # memory options on every split
        ("filter --zero 1", 2), ("filter --zero 3", 2), ("spatial --zero 3", 2), ("data --zero 1 --microbatches 2", 2),
        ("pipeline --zero 3", 2), ("spatial --zero 1 --recompute 2", 3), ("fsdp --microbatches 2", 3), ("channel --zero 3", 3),
        ("data+filter --zero 1", 4), ("data+filter --zero 3", 4), ("data+spatial --zero 3 --recompute 3", 4),
        ("grid --zero 3", 4), ("splitbrain --zero 1", 4), ("splitbrain --zero 3", 4), ("filter --recompute 2", 4),
        ("pipeline --recompute 1 --schedule interleaved --microbatches 4", 4), ("spatial+pipeline --zero 3", 4),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run: its name is its key in the table."""

    model: str
    strategy: str
    ranks: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.model} | {self.strategy} | {self.ranks} | {self.precision}"

    @property
    def must_split(self) -> bool:
        name = self.model.partition(",")[0]
        in_grid = self.model in MODELS
        whole_layers = self.strategy in ("spatial", "filter", "channel") and name in CONVOLUTIONAL
        return in_grid and (whole_layers or (name, self.strategy) == ("gpt2", "filter"))


def cells() -> Iterator[Cell]:
    """All of them, those with the same model and number of ranks together."""
    for ranks in (2, 3, 4):
        for model in MODELS:
            for strategy in SPLITS:
                yield Cell(model, strategy, ranks, "fp64")
                if ranks == 2:
                    yield Cell(model, strategy, ranks, "fp32")
        for model, rows in MORE.items():
            yield from (Cell(model, strategy, n, "fp64") for strategy, n in rows if n == ranks)
        yield from _staged(ranks)


def _staged(ranks: int) -> Iterator[Cell]:
    """The pipelines. On three ranks a composed one has stages of two ranks and of one."""
    for model in STAGED:
        yield from (Cell(model, f"pipeline --schedule {name}", ranks, "fp64") for name in SCHEDULES)
        if ranks == 2:
            yield Cell(model, "pipeline", ranks, "fp32")
        else:
            yield from (Cell(model, name, ranks, "fp64") for name in COMPOSED)
        yield from (Cell(model, name, ranks, "fp64") for name in SAVING[ranks])
    for model, rows in ODD.items():
        yield from (Cell(model, strategy, n, "fp64") for strategy, n in rows if n == ranks)


def parsed(strategy: str) -> tuple[str, Options]:
    """A strategy and the options behind it."""
    name, *rest = strategy.split()
    given = {key.removeprefix("--"): value for key, value in zip(rest[::2], rest[1::2], strict=True)}
    return name, Options(**{k: v if k == "schedule" else int(v) for k, v in given.items()})  # type: ignore[arg-type]


@cache
def prepared(model: str, device: torch.device) -> tuple[Workload, Reference]:
    seen = load_workload(model)
    return seen, Reference(workload=seen, device=device)


plainly: list[bool] = []  # of every float32 cell: within twice the distance of the one undisturbed run


def outcome(cell: Cell, ranks: LocalRanks, device: torch.device) -> tuple[str, float | None]:
    """What a cell comes to, and the fraction of FLOPs split."""
    seen, reference = prepared(cell.model, device)
    try:
        strategy, options = parsed(cell.strategy)
        plan = seen.plan(strategy, ranks=cell.ranks, options=options)
        verdict = verify(seen, plan, ranks, reference=reference, precision=cell.precision)
    except WorkerFailed as error:
        return f"failed: {str(error).strip().splitlines()[-1]}", None
    except Error as error:
        return f"refused: {error}", None
    assert verdict is not None
    if cell.precision == "fp32":
        plainly.append(verdict.plain)
    worst = verdict.worst
    word = EQUAL if verdict.equal else f"unequal: {worst.what} {worst.tensor} {worst.error:.1e} > {worst.limit:.1e}"
    return word, verdict.program.split_flops_fraction


def fault(cell: Cell, word: str, split: float | None, table: dict[str, str]) -> str:
    """What is wrong with an outcome, if anything."""
    if table.get(cell.name) != word:
        return f"the table says '{table.get(cell.name, 'nothing')}'"
    if cell.must_split and split is not None and split < SPLIT:
        return f"only {split:.1%} of the FLOPs ran split"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the table from what came out")
    parser.add_argument("--only", default="", help="run the cells whose name contains this text")
    parser.add_argument("--device", default="cpu", help="cuda: ranks share what GPUs there are")
    parser.add_argument(
        "--precision", default="", help="run the float64 cells in this one; nothing is then said against the table"
    )
    parser.add_argument("--every", type=int, default=1, help="run every so-manieth cell")
    options = parser.parse_args()
    table: dict[str, str] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    chosen = [cell for cell in cells() if options.only in cell.name][:: options.every]
    where = own_device(options.device)
    if options.precision:
        chosen = [replace(cell, precision=options.precision) for cell in chosen if cell.precision == "fp64"]
        table = {cell.name: table[replace(cell, precision="fp64").name] for cell in chosen}
    found: dict[str, str] = {}
    faults: list[str] = []
    begun = time.monotonic()
    for count in sorted({cell.ranks for cell in chosen}):
        with LocalRanks(
            count, timeout=300, devices=rank_devices(options.device, count, share_gpu=options.device != "cpu")
        ) as ranks:
            for cell in (c for c in chosen if c.ranks == count):
                since = time.monotonic()
                word, split = outcome(cell, ranks, where)
                found[cell.name] = word
                wrong = fault(cell, word, split, table)
                faults += [f"{cell.name}: {word}; {wrong}"] if wrong else []
                shown = "" if split is None else f", {split:.1%} split"
                print(f"[{len(found)}/{len(chosen)}] {cell.name}: {word}{shown} ({time.monotonic() - since:.1f} s)"
                      f"{'  <-- ' + wrong if wrong else ''}", flush=True)  # fmt: skip
    if options.record:
        kept = {name: word for name, word in table.items() if name in {c.name for c in cells()}}
        TABLE.write_text(json.dumps({**kept, **found}, indent=1) + "\n")
    gone = sorted(set(table) - {c.name for c in cells()}) if not options.precision else []
    faults += [f"{name}: in the table, but no such cell" for name in gone]
    equal = sum(word == EQUAL for word in found.values())
    refused = sum(word.startswith("refused") for word in found.values())
    minutes = (time.monotonic() - begun) / 60
    print(f"{sum(plainly)} of {len(plainly)} float32 cells within twice the undisturbed run, floor and further runs aside")
    print(f"{len(found)} cells in {minutes:.1f} min: {equal} equal, {refused} refused, {len(found) - equal - refused} neither; "
          f"{len(faults)} against the table")  # fmt: skip
    for line in faults:
        print(f"  {line}")
    return 1 if faults and not options.record else 0


if __name__ == "__main__":
    sys.exit(main())
