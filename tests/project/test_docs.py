"""The documentation works as printed, from nothing to an own 3-D model by domain on two ranks; links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.plans.spec.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]


@pytest.mark.slow
def test_five_minutes_go_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text()
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", text, re.S)
    (tmp_path / "mine.py").write_text(code)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines() if line]
    assert len(commands) >= 10
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_new_schedule_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "pipelines.md").read_text().partition("## A new schedule")[2]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", page, re.S)
    try:
        exec(compile(code, "pipelines.md", "exec", dont_inherit=True), {})
    finally:
        SCHEDULES.pop("eager", None)
    assert capsys.readouterr().out == printed


def named_in(file: Path) -> set[str]:
    """Functions, classes and values at the top of a file, and what its classes define."""
    tree = ast.parse(file.read_text())
    inner = [node for top in tree.body if isinstance(top, ast.ClassDef) for node in top.body]
    out: set[str] = set()
    for node in (*tree.body, *inner):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            out.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            out.update(target.id for target in targets if isinstance(target, ast.Name))
    return out


def test_whoever_the_architecture_says_decides_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Who decides what")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for decision, place, names in rows:
        file = ROOT / "src" / "fourfold" / re.findall(r"`([^`]+)`", place)[0]
        assert file.exists(), decision
        if file.is_file():
            asked = set(re.findall(r"`([^`]+)`", names))
            assert asked and asked <= named_in(file), decision
