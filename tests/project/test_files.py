"""Files: read strictly and within bounds, written whole or not at all; and no file that the project reads is code."""

from __future__ import annotations

import ast
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fourfold import files
from fourfold.cli.main import run
from fourfold.cluster.cache import calibration_file
from fourfold.errors import InvalidInput
from fourfold.files import MOST_BYTES, parse_json, read_text, write_file
from fourfold.plans import Mesh, Plan, load_plan, save_plan

SOURCES = Path(__file__).parents[2] / "src" / "fourfold"
SMALL = "vgg16-cifar,batch=4,width=32,channels=4"
OLD, NEW = "old " * 50_000, "new " * 50_000


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "file.txt").write_text(OLD)
    return tmp_path / "file.txt"


def alone(path: Path) -> bool:
    """Whether nothing lies beside a file."""
    return [*path.parent.iterdir()] == [path]


def test_a_file_is_replaced_whole(target: Path) -> None:
    write_file(target, NEW)
    assert target.read_text() == NEW and alone(target)
    write_file(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"


@contextmanager
def little_room(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: a write past that fails, as on a full disk."""
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_may_not_grow_leaves_the_old_one_as_it_was(target: Path) -> None:
    with little_room(len(NEW) // 2), pytest.raises(InvalidInput, match=r"cannot write .*file\.txt: File too large"):
        write_file(target, NEW)
    assert target.read_text() == OLD and alone(target)


def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "fourfold-test", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        target = tmp_path / "file.txt"
        target.write_text(OLD)
        with pytest.raises(InvalidInput, match=r"cannot write .*file\.txt: No space left on device"):
            write_file(target, NEW)
        assert target.read_text() == OLD and alone(target)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_commands_on_a_full_disk_say_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    asked = ["plan", SMALL, "--strategy", "data", "--devices", "2", "-o", str(plan)]
    assert run(asked) == 0
    before, _ = plan.read_text(), capsys.readouterr()
    with little_room(100):
        assert run(asked) == 2
    out, err = capsys.readouterr()
    assert not out and err == f"fourfold: cannot write {plan}: File too large\n"
    assert plan.read_text() == before and alone(plan)


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, MemoryError])
def test_whatever_interrupts_a_write_leaves_the_old_file_alone(
    target: Path, monkeypatch: pytest.MonkeyPatch, failing: str, kind: type[BaseException]
) -> None:
    def fail(*arguments: Any) -> None:
        raise kind(5, "Input/output error")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(InvalidInput if kind is OSError else kind):
        write_file(target, NEW)
    assert target.read_text() == OLD and alone(target)


def test_bytes_are_on_the_disk_before_the_file_takes_its_name(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        whole = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *a, name=name, whole=whole: (done.append(name), whole(*a))[1])
    write_file(target, NEW)
    assert done == ["fsync", "replace", "fsync"], "the file, its name, the folder"


def test_a_new_file_has_the_mode_an_ordinary_one_would_have(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a", "")
        (tmp_path / "b").write_text("")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"}
    assert modes == {0o640}


def test_a_replaced_file_keeps_its_mode_and_a_link_stays_a_link(target: Path, tmp_path: Path) -> None:
    target.chmod(0o604)
    link = tmp_path / "link"
    link.symlink_to(target.name)
    write_file(link, NEW)
    assert link.is_symlink() and target.read_text() == NEW and stat.S_IMODE(target.stat().st_mode) == 0o604


def test_a_link_to_nothing_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    write_file(tmp_path / "link", NEW)
    assert (tmp_path / "there").read_text() == NEW and (tmp_path / "link").is_symlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_may_not_be_written_is_not_replaced(target: Path) -> None:
    target.chmod(0o444)
    with pytest.raises(InvalidInput, match="Permission denied"):
        write_file(target, NEW)


def test_the_name_may_be_as_long_as_names_are(tmp_path: Path) -> None:
    write_file(tmp_path / ("n" * 255), NEW)
    assert (tmp_path / ("n" * 255)).read_text() == NEW
    with pytest.raises(InvalidInput, match="File name too long"):
        write_file(tmp_path / ("n" * 256), NEW)


def test_devices_and_pipes_are_written_to_directly(tmp_path: Path) -> None:
    write_file(Path(os.devnull), NEW)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    script = "from pathlib import Path; from fourfold.files import write_file; write_file(Path('/dev/stdout'), 'hello')"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"hello"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", f"{script}; print(' there')"], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "hello there\n" and alone(tmp_path / "out")


def test_a_file_beyond_its_limit_is_refused_unread(tmp_path: Path) -> None:
    huge = tmp_path / "plan.json"
    with huge.open("wb") as file:
        file.truncate(100 * 2**30)  # of nothing
    with pytest.raises(InvalidInput, match=r"plan\.json: has more than 16.0 MiB"):
        load_plan(huge)
    assert len(read_text(Path(os.devnull))) == 0
    with pytest.raises(InvalidInput, match=r"has more than 16\.0 MiB"):
        read_text(Path("/dev/zero"))
    assert MOST_BYTES == 16 * 2**20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "NaN is no number"),
        ("[-0]", "-0 is no whole number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("1e999", "the number 1e999 is too large"),
        ("1" + "0" * 400, r"the number 10000000000000000000\.\.\. does not fit 64 bits"),
        ("1" + "0" * 5000, "does not fit 64 bits"),
        (str(2**63), "does not fit 64 bits"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice"),
        ("[" * 33 + "]" * 33, "nest more than 32 deep"),
        ("[" * 5_000_000, "more than 200,000 lists"),
        ('{"a":' * 100, "nest more than 32 deep"),
        ("[" + "[]," * 300_000 + "1]", "more than 200,000 lists"),
        ('"' + "\\" * 100, "Unterminated string|Invalid"),
        ("\ufeff{}", "BOM"),
    ],
    ids=lambda text: text[:20],
)
def test_json_is_read_strictly(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_brackets_within_texts_are_none() -> None:
    data = {"a": "[" * 10_000, "b": '\\"' + "{" * 100, "c": [2**63 - 1, -(2**63) + 1, -0.0, 1e308]}
    assert parse_json(json.dumps(data)) == data


def test_a_plan_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    plan = Plan(graph="0" * 16, batch=4, mesh=Mesh.of(a=2), model="\udcff.py:net")
    with pytest.raises(InvalidInput, match=r"model: has the character U\+DCFF"):
        save_plan(plan, tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("command", [["verify", "--steps", "1"], ["train", "--steps", "1"]], ids=lambda c: c[0])
def test_a_damaged_calibration_stops_no_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = calibration_file(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("version = 1\nname = ")
    try:
        assert run([*command, SMALL, "--strategy", "data", "--ranks", "2", "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["predicted_seconds"] is None
        (line,) = err.splitlines()
        assert line.startswith(f"fourfold: no prediction is made: the calibration {path} cannot be used: it has no")
        assert run(["plan", SMALL, "--strategy", "data", "--devices", "2", "--cluster", "local"]) == 2
        assert "run `fourfold calibrate --ranks 2` again or delete it" in capsys.readouterr().err
        assert run([*command, SMALL, "--strategy", "data", "--ranks", "2", "--cluster", str(path)]) == 2
        assert "is no TOML" in capsys.readouterr().err
    finally:
        path.unlink()


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Every call of the package: its file, itself, and what is called."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(SOURCES).as_posix(), node, ast.unparse(node.func)


WRITERS = ("files.py",)
SCRATCH = ("runtime/comm/shared/memory.py", "reproduce/hosts.py")  # shared memory, and what children say while they run


def test_files_are_written_in_one_place() -> None:
    for file, node, name in calls():
        if file in WRITERS or file in SCRATCH:
            continue
        assert not name.endswith((".write_text", ".write_bytes")), f"{file}:{node.lineno} writes by itself"
        if name == "open" or name.endswith(".open"):
            mode = next((ast.unparse(a) for a in node.args if isinstance(a, ast.Constant) and a.value in ("w", "wb", "a")), "")
            assert not mode, f"{file}:{node.lineno} writes by itself"
        if name.endswith("savefig"):
            assert ast.unparse(node.args[0]) == "drawn", f"{file}:{node.lineno} draws into a file"


def test_nothing_that_is_read_is_code() -> None:
    for path in SOURCES.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
    for file, node, name in calls():
        if name == "torch.load":
            assert {k.arg: ast.unparse(k.value) for k in node.keywords}["weights_only"] == "True", f"{file}:{node.lineno}"
