"""Built-in models are captured once: a second look loads no torch and says the same; other models are captured each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli import sketch as module
from fourfold.cli.sketch import sketch
from fourfold.runtime.subject import subject

MODEL = "vgg16-cifar,width=32,channels=4"
LOOK = f"""
import sys
from fourfold.cli.sketch import sketch
found = sketch({MODEL!r}, batch=6)
print(found.graph.hash, found.batch, "torch" in sys.modules)
"""


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    return tmp_path / "graphs"


def looked() -> list[str]:
    return subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout.split()


def test_a_second_look_loads_no_torch_and_says_the_same() -> None:
    first, second = looked(), looked()
    assert first[2] == "True" and second == [*first[:2], "False"]


def test_a_sketch_makes_the_plans_that_a_subject_makes() -> None:
    whole = subject(MODEL, batch=6, data=False)
    for known in (sketch(MODEL, batch=6), sketch(MODEL, batch=6)):
        assert known.plan("data+filter", ranks=4) == whole.plan("data+filter", ranks=4)
        assert known.graph == whole.graph


def test_a_broken_file_is_captured_anew(empty: Path) -> None:
    graph = sketch(MODEL).graph
    (file,) = empty.iterdir()
    file.write_bytes(b"not a sketch")
    assert sketch(MODEL).graph == graph
    assert sketch(MODEL).graph == graph and len(list(empty.iterdir())) == 1


def test_models_texts_and_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {module._file(MODEL, None), module._file(MODEL, 4), module._file(f"{MODEL},norm=true", None)}
    monkeypatch.setattr(module, "version", lambda name: "0")
    assert len(files | {module._file(MODEL, None)}) == 4


def test_a_file_of_the_user_s_is_read_each_time(empty: Path, tmp_path: Path) -> None:
    code = "import torch\n\ndef net():\n    return torch.nn.Linear(3, {}), (torch.zeros(2, 3),)\n"
    file, shapes = tmp_path / "mine.py", []
    for width in (4, 15):  # of different lengths: Python tells its own compiled files apart by seconds and sizes
        file.write_text(code.format(width))
        graph = sketch(f"{file}:net").graph
        shapes.append(graph.values[graph.outputs[0]].shape[-1])
    assert shapes == [4, 15] and not empty.exists()
