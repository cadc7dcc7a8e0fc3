"""The examples run on two ranks, and stay short. The ranks are pooled ones with the variables of torchrun, which takes long to
start; under torchrun itself run the README's script, and the examples in the tests marked slow.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ranks import pool

FOLDER = Path(__file__).parents[2] / "examples"
FOREIGN = {"monai_unet.py": "monai", "transformer.py": "transformers"}
ALONE = "plan_only.py"
NAMES = sorted(path.name for path in FOLDER.glob("*.py"))


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.foreign] if name in FOREIGN else []


def printed_by(name: str) -> str:
    """On a rank: what an example prints there."""
    rank = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with patch.dict(os.environ, rank), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES if name != ALONE])
def test_an_example_runs_on_two_ranks(name: str) -> None:
    if name in FOREIGN:
        pytest.importorskip(FOREIGN[name])
    first, second = pool(2)(printed_by, name)
    assert first.strip() and not second, "the first rank prints"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == ALONE else marks(name) or [pytest.mark.slow]) for name in NAMES]
)
def test_an_example_runs_as_its_page_says(name: str) -> None:
    if name in FOREIGN:
        pytest.importorskip(FOREIGN[name])
    ranks = [] if name == ALONE else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *ranks, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_examples_are_short_and_on_their_page() -> None:
    page = (FOLDER / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\w+\.py)\)", page)) == NAMES
    for name in NAMES:
        assert len((FOLDER / name).read_text().splitlines()) < 60, name
