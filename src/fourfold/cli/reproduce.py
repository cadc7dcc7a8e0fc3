"""The command that reruns a paper's experiment."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import Json, one_of
from fourfold.cli.output import check_place
from fourfold.files import json_text, write_file

PAPERS = ("splitbrain", "integrated", "bapipe", "paradl")
RUNS = "Whether to run what needs ranks: some minutes, and root for slow links."


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=f"One of: {', '.join(PAPERS)}.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page; beside it a .json file.")] = None,
    runs: Annotated[bool, typer.Option("--runs/--no-runs", help=RUNS)] = True,
    as_json: Json = False,
) -> int:
    """Reruns a paper's experiment, beside the paper's figures. Exit code 1 if an expectation fails."""
    voice = Console(json=as_json)
    with voice.counting(paper) as told:
        from fourfold.report.page.reproduction import reproduction_page, reproduction_text
        from fourfold.reproduce.study import Reproduction

        name = one_of("paper", paper, PAPERS)
        page = output or Path(f"{name}.html")
        check_place(page)
        found: Reproduction = import_module(f"fourfold.reproduce.{name}").reproduced(told, runs=runs)
        write_file(page, reproduction_page(found))
        record = {**found.record(), "file": str(page)}
        write_file(page.with_suffix(".json"), json_text(record, indent=1))
    voice.answer(record, lambda: reproduction_text(found, file=str(page)))
    return 0 if found.holds else 1
