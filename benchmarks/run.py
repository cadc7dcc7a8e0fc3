"""The comparisons with other libraries, their results written beside this file with the date: run on a machine that does
nothing else."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SECTIONS = ("against_ddp", "against_pipelining", "against_fsdp")


def main() -> None:
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    day = datetime.date.today().isoformat()
    for section in SECTIONS:
        output = results / f"{day}-{section.replace('_', '-')}.json"
        subprocess.run([sys.executable, str(HERE / f"{section}.py"), "--rounds", "25", "-o", str(output)], check=True)


if __name__ == "__main__":
    main()
