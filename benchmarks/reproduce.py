"""All four papers rerun (`fourfold reproduce`): pages under build/reproduce, records under results/reproduce, and the
summary in the README written anew. About ten minutes on two cores; root for slow links."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from records import RESULTS, write_record

from fourfold.cli.reproduce import PAPERS
from fourfold.files import write_file

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "reproduce"
RECORDS = RESULTS / "reproduce"
MARKERS = "<!-- reproduced -->", "<!-- end of reproduced -->"
NOT_PRINTED = {"recomputed": " (recomputed)", "remembered": " (from memory)"}
SOURCES = (
    "The papers' figures are those printed in their text and tables; one marked *recomputed* follows from the paper's "
    "formulas, one marked *from memory* was not compared with the paper again, and where a paper gives none, the bar is ours."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"some of {', '.join(PAPERS)}; all if none is named")
    parser.add_argument("--summary-only", action="store_true", help="write the README's summary from the records there are")
    options = parser.parse_args()
    PAGES.mkdir(parents=True, exist_ok=True)
    RECORDS.mkdir(parents=True, exist_ok=True)
    codes = [] if options.summary_only else [rerun(paper) for paper in options.papers or PAPERS]
    readme = ROOT / "README.md"
    write_file(readme, with_summary(readme.read_text()))
    sys.exit(max(codes, default=0))


def rerun(paper: str) -> int:
    """One paper, in a process of its own; the exit code."""
    begun, page = time.monotonic(), PAGES / f"{paper}.html"
    code = subprocess.run([sys.executable, "-m", "fourfold", "reproduce", paper, "-o", str(page)], check=False).returncode
    if code in (0, 1):
        record = json.loads(page.with_suffix(".json").read_text())
        kept = {**record, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - begun)}
        kept.pop("file")
        write_record(RECORDS / f"{paper}.json", kept)
    return code


def load_records() -> list[dict[str, Any]]:
    return [json.loads((RECORDS / f"{paper}.json").read_text()) for paper in PAPERS if (RECORDS / f"{paper}.json").is_file()]


def with_summary(readme: str) -> str:
    """The README's text with the summary of the stored records between its markers."""
    block = "\n".join((MARKERS[0], summary(load_records()), MARKERS[1]))
    return re.sub(f"{MARKERS[0]}.*?{MARKERS[1]}", lambda _: block, readme, flags=re.DOTALL)


def summary(records: list[dict[str, Any]]) -> str:
    """A sentence on sources, and a table in Markdown: how many expectations of each paper hold, and the chief ones."""
    lines = [SOURCES, "", "| paper | what | Fourfold | the paper |", "|---|---|---|---|"]
    for record in records:
        expectations = record["expectations"]
        holding = sum(e["holds"] for e in expectations)
        title = f"{record['title']}: {holding} of {len(expectations)} expectations hold ({record['date']})"
        for e in (e for e in expectations if e["chief"]):
            fails = "" if e["holds"] else " (does not hold)"
            lines.append(f"| {title} | {e['what']} | {e['ours']}{fails} | {paper_figure(e)} |")
            title = ""
    return "\n".join(lines)


def paper_figure(expectation: dict[str, Any]) -> str:
    """A paper's figure with its source where it is not printed there."""
    figure, mark = expectation["paper"], expectation["mark"]
    if mark == "unknown":
        return f"none; our bar: {figure}" if figure else "none"
    return figure + NOT_PRINTED.get(mark, "")


if __name__ == "__main__":
    main()
