"""The command that reruns a paper's experiment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.options import Json, one_of, setting, settle
from fourfold.cli.output import check_place, written
from fourfold.cli.voice import Voice

if TYPE_CHECKING:
    from fourfold.reproduce.study import Reproduction

PAPERS = ("integrated",)
Told = Callable[[str, int, int], None]


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=f"One of: {', '.join(PAPERS)}.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page; beside it a .json file.")] = None,
    as_json: Json = False,
) -> int:
    """Reruns a paper's experiment, beside the paper's figures. Exit code 1 if an expectation fails."""
    voice = Voice(json=as_json)
    with voice.counting(paper) as told:
        from fourfold.report.reproduction import reproduction_page, reproduction_text

        name = one_of("paper", paper, PAPERS)
        page = output or Path(f"{name}.html")
        check_place(page)
        found = RERUN[name](told)
        written(lambda: page.write_text(reproduction_page(found), "utf-8"), page)
        record = {**found.record(), "file": str(page)}
        beside = page.with_suffix(".json")
        written(lambda: beside.write_text(json.dumps(record, indent=1) + "\n", "utf-8"), beside)
    voice.answer(record, lambda: reproduction_text(found, file=str(page)))
    return 0 if found.holds else 1


def _integrated(told: Told) -> Reproduction:
    from fourfold.planner import Task, search
    from fourfold.reproduce.integrated import BATCH, DEVICES, reproduced
    from fourfold.runtime.subject import subject

    seen = subject("alexnet", batch=BATCH, data=False)
    settle()

    def planned(devices: int) -> tuple[str, str, float, float]:
        told(f"planning for {devices}", DEVICES.index(devices), len(DEVICES))
        asked = setting("cori-knl", devices, "fp32", "sgd", "fourfold")
        found = search(Task(graph=seen.graph, batch=BATCH, setting=asked))
        best = found.best or found.candidates[0]
        data = next(c for c in found.candidates if c.plan.strategy == "data")
        splits = {path: by for path, by in best.plan.splits if path.startswith("classifier")}
        words = sorted({split for by in splits.values() for split in by.values()})
        shape = f"{len(best.plan.stages)} stages" if best.plan.stages else str(best.plan.mesh)
        return f"{best.plan.strategy} on {shape}", ", ".join(words) or "as the rest", best.seconds, data.seconds

    return reproduced(planned)


RERUN: dict[str, Callable[[Told], Reproduction]] = {"integrated": _integrated}
