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

from records import RESULTS, write_record

from fourfold.cli.reproduce import PAPERS
from fourfold.files import write_file
from fourfold.report.page.reproduction import summary

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "reproduce"
RECORDS = RESULTS / "reproduce"
MARKS = "<!-- reproduced -->", "<!-- end of reproduced -->"


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


def paper_records() -> list[dict[str, object]]:
    return [json.loads((RECORDS / f"{paper}.json").read_text()) for paper in PAPERS if (RECORDS / f"{paper}.json").is_file()]


def with_summary(text: str) -> str:
    """The README with its summary made of the records."""
    between = "\n".join((MARKS[0], summary(paper_records()), MARKS[1]))
    return re.sub(f"{MARKS[0]}.*?{MARKS[1]}", lambda _: between, text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
