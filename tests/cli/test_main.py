"""What a command meets at its edges: a stdout that is closed, full or written to by others, no room for temporary files,
folders with spaces in their names."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fourfold.cli.main import run
from fourfold.errors import InvalidInput
from fourfold.runs.comparison_run import save_data
from fourfold.runtime.host.scratch import path_of, temporary_file, temporary_paths
from fourfold.workload.model_text import build

SMALL = "vgg16-cifar,batch=4,width=32,channels=4"
LOUD = """
import ctypes, os, subprocess, torch

def net():
    os.write(1, b"written\\n")
    subprocess.run(["echo", "by a child"])
    ctypes.CDLL(None).puts(b"from C")
    print("printed")
    return torch.nn.Linear(3, 4), (torch.ones(4, 3),)
"""


def fourfold(*arguments: object, to: str = "") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, its stdout sent elsewhere by the shell."""
    command = ["bash", "-c", f'exec "$@" {to}', "bash", sys.executable, "-m", "fourfold", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_stdout_has_the_record_alone_whatever_a_factory_writes(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text(LOUD)
    done = fourfold("inspect", f"{file}:net", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batch"] == 4
    assert {"written", "by a child", "from C", "printed"} <= set(done.stderr.splitlines())


@pytest.mark.parametrize(("to", "why"), [(">&-", "Bad file descriptor"), ("> /dev/full", "No space left on device")])
@pytest.mark.parametrize("arguments", [["--help"], ["clusters", "--json"], ["clusters"]], ids=" ".join)
def test_a_stdout_that_takes_nothing_is_named(arguments: list[str], to: str, why: str) -> None:
    done = fourfold(*arguments, to=to)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fourfold: cannot write to stdout: {why}\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    done = fourfold("clusters", to="| head -1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_stdout_costs_no_file_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = fourfold("train", SMALL, "--strategy", "data", "--ranks", "1", "--steps", "2", "--no-predict", "--record", file,
                    to="> /dev/full")  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "fourfold: cannot write to stdout: No space left on device\n")
    assert json.loads(file.read_text())["steps"] == 2


def test_errors_are_not_taken_for_output_where_stderr_is_closed() -> None:
    done = fourfold("clusters", "no-such", to="2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_temporary_folder_is_named_with_the_remedy() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with temporary_paths(1) as (path,), pytest.raises(InvalidInput, match=r"cannot write .* set TMPDIR to a folder"):
            save_data(build(SMALL), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_missing_temporary_folder_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(InvalidInput, match=r"cannot make a temporary file: No such file .* set TMPDIR"):
        temporary_file()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a file without a name is opened through /proc")
def test_a_temporary_file_has_no_name_and_others_can_open_it(tmp_path: Path) -> None:
    with temporary_file(tmp_path) as file:
        assert not list(tmp_path.iterdir())
        subprocess.run([sys.executable, "-c", f"open({path_of(file)!r}, 'w').write('here')"], check=True)
        assert file.read() == b"here"


def test_folders_with_spaces_in_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my nets", "my plans", "my cache", "my tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "my plans")
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "my cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "my tmp"))
    (tmp_path / "my nets" / "a net.py").write_text(LOUD)
    model = f"{tmp_path}/my nets/a net.py:net"
    assert run(["plan", model, "--strategy", "data", "--devices", "2", "-o", "a plan.json"]) == 0
    assert run(["train", model, "--plan", "a plan.json", "--steps", "1", "--record", f"{tmp_path}/my plans/a run.json"]) == 0
    assert run(["report", "a plan.json", "a run.json", "-o", "a page.html"]) == 0
    assert {p.name for p in Path.cwd().iterdir()} == {"a plan.json", "a run.json", "a page.html"}
    assert list((tmp_path / "my cache").iterdir())
    assert not list((tmp_path / "my tmp").glob("fourfold*"))
