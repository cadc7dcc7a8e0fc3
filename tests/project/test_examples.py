"""The examples run as their page says, and stay short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
FOREIGN = {"monai_unet.py": "monai", "transformer.py": "transformers"}
SLOW = ("own_loop.py",)
NAMES = sorted(path.name for path in FOLDER.glob("*.py"))


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [mark for some, mark in ((FOREIGN, pytest.mark.foreign), (SLOW, pytest.mark.slow)) if name in some]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_an_example_runs(name: str) -> None:
    if name in FOREIGN:
        pytest.importorskip(FOREIGN[name])
    alone = name == "plan_only.py"
    ranks = [] if alone else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *ranks, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_examples_are_short_and_on_their_page() -> None:
    page = (FOLDER / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\w+\.py)\)", page)) == NAMES
    for name in NAMES:
        assert len((FOLDER / name).read_text().splitlines()) < 60, name
