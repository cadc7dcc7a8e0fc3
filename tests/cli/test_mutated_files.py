"""Some of the damaged files of `make fuzz`: valid or one clear line, and nothing slow or large."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_damaged_plans_clusters_and_records_are_valid_or_refused_in_one_line() -> None:
    counts = ["--plans", "400", "--clusters", "300", "--records", "100", "--seed", "1"]
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "mutate.py"), *counts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: [int(word) for word in line.split()[1:6]] for line in done.stdout.splitlines()[1:4]}
    assert [row[0] for row in rows.values()] == [400, 300, 100]
    for files, valid, refused, uncaught, slow in rows.values():
        assert valid + refused == files and not uncaught and not slow
        assert valid > files / 10 and refused > files / 2, "the mutator must damage much and leave something"
