"""The command that reruns a paper's experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.console import Console
from fourfold.cli.options import Json
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
    console = Console(json=as_json)
    with console.counting(paper) as progress:
        from fourfold.api.output import check_place
        from fourfold.api.reproduction import rerun
        from fourfold.api.settings import one_of
        from fourfold.report.page.reproduction import reproduction_page, reproduction_text

        name = one_of("paper", paper, PAPERS)
        page = output or Path(f"{name}.html")
        check_place(page)
        result = rerun(name, runs=runs, progress=progress)
        write_file(page, reproduction_page(result))
        record = {**result.record(), "file": str(page)}
        write_file(page.with_suffix(".json"), json_text(record, indent=1))
    console.answer(record, lambda: reproduction_text(result, file=str(page)))
    return 0 if result.holds else 1
