"""All benchmarks, their raw results written beside this file with the date: run on a machine that does nothing else."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    day = datetime.date.today().isoformat()
    command = [sys.executable, str(HERE / "against_ddp.py"), "--rounds", "25", "-o", str(results / f"{day}-against-ddp.json")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
