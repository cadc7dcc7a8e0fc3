"""The commands, their JSON and what they print."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.cli.main import run
from fourfold.plans import load_plan
from fourfold.report.runs import read_run
from fourfold.runs.reference import Reference
from fourfold.runs.verify import verify
from fourfold.workload.materialise import materialise
from fourfold.workload.model_text import build
from fourfold.workload.workload import load_workload
from ranks import pool

SMALL = "vgg16-cifar,batch=4,width=32,channels=4"
FACTORIES = """
import torch
from torch import nn

print("a factory may print")

class Net(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.first = nn.Linear(6, width, bias=bias)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 2)

    def forward(self, x, scale=None):
        y = self.second(self.norm(self.first(x)).relu())
        return y if scale is None else y * scale

def plain(width=8, bias: bool = True):
    return Net(width, bias), (torch.arange(24.0).view(4, 6),)

def with_loss(batch: int = 4):
    x = torch.randn(batch, 6)
    return Net(8), (x,), (torch.zeros(batch, 2),), nn.functional.mse_loss

def by_name():
    return Net(8), {"x": torch.randn(4, 6), "scale": torch.tensor(0.5)}

def on_meta():
    with torch.device("meta"):
        return Net(8), (torch.zeros(4, 6),)
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.fixture
def record(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a command with --json; stdout must be one object and nothing else."""

    def call(*arguments: object, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert run([*map(str, arguments), "--json"]) == code
        out, _ = capsys.readouterr()
        assert out.count("\n") == 1
        found: dict[str, Any] = json.loads(out)
        return found

    return call


def test_help_does_not_load_torch() -> None:
    script = (
        "import sys; from fourfold.cli.main import run\n"
        "code = run(['plan', '--help']); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--strategy" in done.stdout


def test_models_lists_every_factory_with_its_arguments(record: Callable[..., dict[str, Any]]) -> None:
    rows = {row["name"]: row for row in record("models")["models"]}
    assert {"alexnet", "vgg16-cifar", "resnet50", "cosmoflow", "gnmt", "unet3d", "gpt2"} <= set(rows)
    assert rows["resnet50"]["arguments"]["image"] == 224
    assert all(row["about"] for row in rows.values())


def test_inspect_counts_the_model(record: Callable[..., dict[str, Any]]) -> None:
    found = record("inspect", "vgg16-cifar")
    module = build("vgg16-cifar", meta=True).module
    assert found["parameters"] == sum(p.numel() for p in module.parameters())
    assert found["batch"] == 32
    limits = {row["split"]: row for row in found["limits"]}
    assert (limits["batch"]["size"], limits["filter"]["size"]) == (32, 10)
    assert limits["filter"]["op"] == "classifier.6.linear_2"
    assert (limits["channel"]["size"], limits["channel"]["op"]) == (3, "features.0.conv2d")
    assert limits["filter"]["heavy_size"] == 64
    assert (limits["domain:0"]["size"], limits["domain:0"]["op"]) == (2, "features.24.conv2d_10")
    assert found["ops_without_rule"] == []
    assert sum(group["flops"] for group in found["groups"]) == found["flops"]


def test_flops_grow_with_the_batch_and_the_hash_does_not(record: Callable[..., dict[str, Any]]) -> None:
    few, many = (record("inspect", SMALL, "--batch", n) for n in (2, 6))
    assert many["flops"] == 3 * few["flops"]
    assert many["graph"] == few["graph"]


def test_tables_fit_a_hundred_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["models"]) == 0
    assert run(["inspect", "resnet50,image=64"]) == 0
    assert run(["plan", SMALL, "--strategy", "grid", "--devices", "4", "-o", str(tmp_path / "p.json")]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert err == ""


def test_plan_gives_one_candidate_and_writes_it(record: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = record("plan", SMALL, "--strategy", "grid:pr=2,pc=2", "--devices", "4", "--batch", "8", "-o", file)
    assert found.keys() >= {"model", "cluster", "devices", "batch", "search_seconds", "best", "candidates"}
    assert (found["devices"], found["batch"], found["best"], found["cluster"]) == (4, 8, 0, "local")
    (candidate,) = found["candidates"]
    assert candidate["mesh"] == {"data": 2, "model": 2}
    assert candidate["feasible"] is True
    assert candidate["stages"][0]["ranks"] == [0, 1, 2, 3]
    assert candidate["schedule"] is None
    assert candidate["step_seconds"] > 0
    plan = load_plan(file)
    assert (plan.batch, dict(plan.mesh.axes), plan.strategy) == (8, candidate["mesh"], "grid:pr=2,pc=2")


def test_a_thin_layer_that_runs_whole_is_noted(record: Callable[..., dict[str, Any]]) -> None:
    (candidate,) = record("plan", "vgg16-cifar", "--strategy", "filter", "--devices", "16")["candidates"]
    assert any("classifier.6" in note for note in candidate["limits"])
    assert candidate["ops_replicated"] == ["classifier.6.linear_2"]
    assert candidate["split_flops_fraction"] > 0.99


def test_verify_and_train_follow_one_plan(record: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    record("plan", SMALL, "--strategy", "data+filter", "--devices", "2", "-o", file)
    found = record("verify", SMALL, "--plan", file)
    assert found["equal"] is True
    assert found["ranks"] == 2
    assert found["reference"] == "eager"
    errors = ("loss_error", "gradient_error", "parameter_error", "output_error", "noise_floor")
    assert all(0 <= found[key] < 1e-9 for key in errors)
    assert found["worst"]["tensor"]
    assert found["split_flops_fraction"] == 1.0
    assert found["measured_seconds"] > 0
    low, high = found["predicted_interval_seconds"]
    assert 0 < low < found["predicted_seconds"] < high and found["waiting"] is None
    assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.05)
    trained = record("train", SMALL, "--plan", file, "--steps", "2", "--precision", "fp64")
    assert trained["steps"] == len(trained["losses"]) == 2
    assert trained["samples_per_second"] == pytest.approx(4 / trained["step_seconds"])
    assert len(trained["peak_bytes"]) == 2
    near = pytest.approx(found["measured_peak_bytes"], rel=0.05)  # buffers of exchanges come and go as the ranks meet
    assert max(trained["peak_bytes"]) == near
    assert trained["waiting"] is None
    for written in (found, trained):  # both are records that `report` reads, for this plan
        (tmp_path / "run.json").write_text(json.dumps(written))
        assert read_run(tmp_path / "run.json", of=load_plan(file)).predicted == written["predicted_seconds"]
    alone = record("train", SMALL, "--strategy", "data", "--ranks", "1", "--steps", "2", "--precision", "fp64")
    assert trained["losses"] == pytest.approx(alone["losses"], rel=1e-12)


def test_a_pipeline_is_planned_verified_and_trained(record: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    asked = ("--microbatches", "3", "--schedule", "1f1b-sno", "--recompute", "2")
    (candidate,) = record("plan", SMALL, "--strategy", "pipeline", "--devices", "2", *asked, "-o", file)["candidates"]
    assert (candidate["microbatches"], candidate["schedule"], len(candidate["recompute"])) == (3, "1f1b-sno", 4)
    assert [stage["in_flight"] for stage in candidate["stages"]] == [2, 1]
    first, last = candidate["stages"]
    assert first["sent_bytes"] > 0
    assert last["sent_bytes"] == 0
    assert min(first["parameter_bytes"], last["parameter_bytes"], first["flops"], last["flops"]) > 0
    found = record("verify", SMALL, "--plan", file)
    assert found["equal"] is True
    assert len(found["waiting"]) == 2
    trained = record("train", SMALL, "--strategy", "pipeline", "--ranks", "2", *asked, "--steps", "1", "--precision", "fp64")
    alone = record("train", SMALL, "--strategy", "data", "--ranks", "1", "--steps", "1", "--precision", "fp64")
    assert trained["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert len(trained["waiting"]) == len(trained["peak_bytes"]) == 2


@pytest.mark.parametrize("microbatches", [3, 16])
def test_a_schedule_is_shown_as_far_as_it_fits(capsys: pytest.CaptureFixture[str], microbatches: int) -> None:
    model = ["plan", SMALL, "--batch", "32", "--strategy", "data+pipeline", "--devices", "5"]
    assert run([*model, "--microbatches", str(microbatches)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    (row,) = [line for line in out.splitlines() if line.startswith("  ranks 3-4")]
    assert row.split()[2:5] == ["1F0", "1B0", "1F1"]
    assert row.endswith("...") == (microbatches == 16)


def test_an_unequal_run_exits_with_one(record: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.runs.verify.TIGHT", 1e-30)  # two ranks add in another order than one
    monkeypatch.setattr("fourfold.runs.verify.DRIFT", 0.0)
    found = record("verify", SMALL, "--strategy", "data", "--ranks", "2", "--steps", "1", code=1)
    assert found["equal"] is False
    assert found["worst"]["error"] > 0


def test_a_users_factory_is_verified(record: Callable[..., dict[str, Any]], nets: str) -> None:
    factory = f"{nets}:plain,width=9,bias=no"
    found = record("verify", factory, "--strategy", "data", "--ranks", "2", "--batch", "5", "--optimizer", "adamw")
    assert found["equal"] is True
    assert found["plan"]["batch"] == 5


@pytest.mark.parametrize("factory", ["plain", "with_loss", "by_name", "on_meta"])
def test_a_factory_of_any_form_runs_as_eager(nets: str, factory: str) -> None:
    """What the command does, on ranks that are there already."""
    seen = load_workload(f"{nets}:{factory}", batch=5)
    plan = seen.plan("data", ranks=2)
    verdict = verify(seen, plan, pool(2), reference=Reference(workload=seen, optimizer="adamw"))
    assert verdict is not None and verdict.equal
    assert plan.batch == 5


def test_a_batch_is_repeated_and_cut_where_the_factory_fixes_it(nets: str) -> None:
    whole, more = build(f"{nets}:plain"), build(f"{nets}:plain", batch=6)
    assert torch.equal(more.tensors[0], torch.cat([whole.tensors[0], whole.tensors[0][:2]]))
    assert build(f"{nets}:by_name", batch=3).batch == 3


def test_the_seed_decides_the_weights(nets: str) -> None:
    first, again, other = (
        materialise(build(f"{nets}:on_meta", seed=seed), seed=seed).module.state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["first.weight"], other["first.weight"])
    assert float(first["norm.running_var"].sum()) == 8.0


def test_a_module_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_nets.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    assert build("some_nets:plain,width=3").module.first.out_features == 3


@pytest.mark.slow
def test_torchrun_gives_one_answer() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fourfold"]
    done = subprocess.run(
        [*command, "verify", SMALL, "--strategy", "data", "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["ranks"]) == (True, 2)


def test_progress_stays_on_the_terminal(tmp_path: Path) -> None:
    """A run with stderr on a terminal and stdout in a file: the file has the lines and no control characters."""
    import os
    import pty

    ours, theirs = pty.openpty()
    out = tmp_path / "out.txt"
    command = [sys.executable, "-m", "fourfold", "train", SMALL, "--strategy", "data", "--ranks", "1", "--steps", "2"]
    with out.open("w") as file:
        environment = {**os.environ, "TERM": "xterm"}
        process = subprocess.Popen(command, stdout=file, stderr=theirs, stdin=subprocess.DEVNULL, env=environment)
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 65536):
                shown += block
        except OSError:  # the last holder of the terminal has gone
            pass
        assert process.wait(timeout=200) == 0
    os.close(ours)
    lines = out.read_text().splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["step", "step"]
    assert "\x1b" not in out.read_text()
    assert b"capturing" in shown
