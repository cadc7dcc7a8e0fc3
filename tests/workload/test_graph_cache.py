"""Built-in models are captured once: a second look loads no torch and says the same; other models are captured each time. A
plan's graph is found by its content hash; what the plan names as its model is never imported or called."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import run
from fourfold.cluster.cache import write_cached
from fourfold.graph.graph_file import VERSION, graph_data, graph_from
from fourfold.graph.spec import Constant, Device, Dtype, Graph, Op, Ref, Size, TensorSpec
from fourfold.workload import graph_cache as module
from fourfold.workload.graph_cache import cache_graph, cached_graph, model_graph
from fourfold.workload.workload import load_workload
from small import SMALL, graph_of

MODEL = "vgg16-cifar,width=32,channels=4"
LOOK = f"""
import sys
from fourfold.workload.graph_cache import model_graph
found = model_graph({MODEL!r}, batch=6)
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


def test_a_cached_graph_makes_the_plans_that_a_workload_makes() -> None:
    whole = load_workload(MODEL, batch=6, data=False)
    for known in (model_graph(MODEL, batch=6), model_graph(MODEL, batch=6)):
        assert known.plan("data+filter", ranks=4) == whole.plan("data+filter", ranks=4)
        assert known.graph == whole.graph


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"version": 1, "hash": "", "graph": 3}'])
def test_a_damaged_file_is_captured_anew(empty: Path, damage: bytes) -> None:
    graph = model_graph(MODEL).graph
    files = [*empty.iterdir(), *empty.with_name("sketches").iterdir()]
    assert len(files) == 2
    for file in files:
        file.write_bytes(damage)
        assert model_graph(MODEL).graph == graph
        assert model_graph(MODEL).graph == graph and file.read_bytes() != damage
    assert len([*empty.iterdir(), *empty.with_name("sketches").iterdir()]) == 2


def test_a_graph_with_one_number_changed_counts_as_missing(empty: Path) -> None:
    graph = model_graph(MODEL).graph
    (file,) = empty.iterdir()
    data = json.loads(file.read_text())
    text = json.dumps(data["graph"]).replace("1e-05", "1e-06").replace("conv2d", "conv3d")
    data["graph"] = json.loads(text)
    del data["version"], data["hash"]
    write_cached(file, VERSION, data)  # with a right hash of its text: the graph's own is off
    assert cached_graph(graph.hash) is None


@pytest.mark.parametrize("name", [*SMALL])
def test_a_graph_survives_its_file(name: str) -> None:
    graph = graph_of(name)
    cache_graph(graph)
    assert cached_graph(graph.hash) == graph


def test_every_literal_of_an_op_survives() -> None:
    literals = (Ref("x"), Dtype("int8"), Device(), Size(2, -1), None, True, 3, -0.0, 1e-300, float("inf"), float("-inf"),
                2 - 3j, "a\u2028<!--", (1, (Size(1, 0),), ()), {"a": {"map": Ref("y")}, "b": ()}, 2**62)  # fmt: skip
    op = Op(name="o", target="aten.o", args=literals, kwargs={"k": literals}, results=("r",), module="m", random=True)
    values = {"r": TensorSpec((Size(1, 0), 3), "float32")}
    graph = Graph(values=values, inputs=(), targets=(), parameters=(), constants=(Constant(name="c", data=bytes(range(256))),),
                  ops=(op,), loss="r", outputs=("r",), writes=(("a", "b"),), batch=4, aliases=(("p", "q"),))  # fmt: skip
    assert graph_from(json.loads(json.dumps(graph_data(graph), allow_nan=False))) == graph


def test_models_texts_and_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    where = module._model_graph_file
    files = {where(MODEL, None), where(MODEL, 4), where(f"{MODEL},norm=true", None)}
    monkeypatch.setattr(module, "version", lambda name: "0")
    assert len(files | {where(MODEL, None)}) == 4


CODE = "import torch\n\ndef net():\n    return torch.nn.Linear(3, {}), (torch.zeros(2, 3),)\n"


def test_a_file_of_the_user_s_is_read_each_time(empty: Path, tmp_path: Path) -> None:
    file, shapes = tmp_path / "mine.py", []
    for width in (4, 15):  # of different lengths: Python tells its own compiled files apart by seconds and sizes
        file.write_text(CODE.format(width))
        graph = model_graph(f"{file}:net").graph
        shapes.append(graph.values[graph.outputs[0]].shape[-1])
    assert shapes == [4, 15] and not empty.exists()


def test_explain_finds_the_graph_of_a_users_model_without_its_code(
    empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan = tmp_path / "mine.py", tmp_path / "plan.json"
    code.write_text(CODE.format(4))
    asked = ["plan", f"{code}:net", "--strategy", "data", "--devices", "2", "--cluster", "ethernet-1g", "-o", str(plan)]
    assert run(asked) == 0
    code.unlink()
    assert run(["explain", str(plan)]) == 0
    assert f"{code}:net" in capsys.readouterr().out.replace("\n", "")
    shutil.rmtree(empty)
    assert run(["explain", str(plan)]) == 2
    assert "is not in the cache; name its model with --model MODEL" in capsys.readouterr().err
    code.write_text(CODE.format(4))
    assert run(["explain", str(plan), "--model", f"{code}:net"]) == 0
    code.write_text(CODE.format(15))
    assert run(["explain", str(plan), "--model", f"{code}:net"]) == 2
    assert "the plan was made for graph" in capsys.readouterr().err


def test_what_a_plan_names_as_its_model_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trap, plan, page = tmp_path / "trap", tmp_path / "plan.json", tmp_path / "page.html"
    trap.with_suffix(".py").write_text(f"open({str(trap)!r}, 'w')")
    call, other = f"subprocess:getoutput,cmd=touch {trap}", "vgg16-cifar,batch=4,width=64,channels=4"
    assert run(["plan", MODEL, "--strategy", "data", "--devices", "2", "--cluster", "ethernet-1g", "-o", str(plan)]) == 0
    made = json.loads(plan.read_text())
    plan.write_text(json.dumps({**made, "model": call}))
    assert run(["report", str(plan), "-o", str(page), "--what-if", "0"]) == 0 and call in page.read_text()
    capsys.readouterr()
    for command in (["verify", other, "--plan"], ["train", other, "--plan"], ["explain", "--model", other]):
        assert run([*command, str(plan)]) == 2
        assert f"({call}), this model is" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "graphs")
    for text in (call, f"{trap}.py:net", MODEL):
        plan.write_text(json.dumps({**made, "model": text}))
        for command in (["explain", str(plan)], ["report", str(plan), "-o", str(page)]):
            assert run(command) == 2
            assert "is not in the cache; name its model with --model MODEL" in capsys.readouterr().err
    assert not trap.exists()
