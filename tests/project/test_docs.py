"""The documentation works as printed: its commands parse, and run (slow); links and anchors lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from fourfold.cli.app import app
from fourfold.plans.spec.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]


COMMANDS = typer.main.get_command(app)
RUN_ELSEWHERE = {"reproduce": "tests/reproduce"}  # it takes many minutes and writes about networks that need root


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fenced(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands_in(page: Path) -> list[list[str]]:
    """The `fourfold` commands in a page's shell blocks, in order, each as words without its comment."""
    lines = [shlex.split(line, comments=True) for block in fenced(page, "sh") for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["fourfold"]]


def torchrun_commands_in(page: Path) -> list[list[str]]:
    """What follows `torchrun ... -m fourfold` in a page's blocks."""
    blocks = (block.replace("\\\n", " ") for language in ("text", "sh") for block in fenced(page, language))
    lines = [
        shlex.split(line) for block in blocks for line in block.splitlines() if re.search(r"torchrun .*-m fourfold [a-z]", line)
    ]
    return [words[words.index("fourfold") + 1 :] for words in lines]


WITH_COMMANDS = [page for page in PAGES if commands_in(page)]
NEED_GPUS = ("gpus.md",)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_parse_as_printed(page: Path) -> None:
    for name, *arguments in (*commands_in(page), *torchrun_commands_in(page)):
        with COMMANDS.commands[name].make_context(name, arguments):  # raises on unknown options and missing arguments
            pass


def test_the_synopsis_names_commands_and_options_that_exist() -> None:
    lines = fenced(ROOT / "docs" / "cli.md", "text")[0].splitlines()
    assert {line.split()[1] for line in lines} == set(COMMANDS.commands)
    for line in lines:
        known = {
            option
            for parameter in COMMANDS.commands[line.split()[1]].params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line)) <= known, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_inline_commands_exist(page: Path) -> None:
    assert set(re.findall(r"`fourfold ([a-z]+)", page.read_text())) <= set(COMMANDS.commands)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if page.name not in NEED_GPUS], ids=name_of)
def test_commands_run_as_printed(page: Path, tmp_path: Path) -> None:
    """In an empty folder beside `tests`, with the files that the page names in a first comment."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for language in ("python", "toml"):
        for code in fenced(page, language):
            if file := re.match(r"# ([\w.]+)\n", code):
                (tmp_path / file[1]).write_text(code)
    for words in commands_in(page):
        if words[0] in RUN_ELSEWHERE or (any("foreign.py" in word for word in words) and not find_spec("transformers")):
            continue
        command = [sys.executable, "-m", "fourfold", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"{words}\n{done.stderr[-2000:]}"
    assert page.name != "getting-started.md" or (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
