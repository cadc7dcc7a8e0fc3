"""Whatever a user gets wrong ends in one line on stderr and exit code 2: no traceback, no hang, no process left."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.cli.main import run

SMALL = "vgg16-cifar,batch=4,width=32,channels=4"
SIMULATE = ["simulate", SMALL, "--cluster", "abci"]
ONE = [*SIMULATE, "--devices", "2", "--strategy", "data"]
FACTORIES = """
import torch
from torch import nn

x = torch.zeros(4, 3)

def good(width: int = 3, bias: bool = True, rate: float = 0.5, kind: str = "a"):
    return nn.Linear(3, width, bias=bias), (x,)

def raises():
    raise RuntimeError("no weights here\\nsecond line")

def leaves():
    import sys
    sys.exit(7)

class Leaving(nn.Module):
    def forward(self, x):
        raise SystemExit("enough")

def leaving():
    return nn.Sequential(nn.Linear(3, 3), Leaving()), (x,)

def nothing():
    pass

def three():
    return nn.Linear(3, 3), (x,), None

def no_module():
    return "a model", (x,)

def bare_input():
    return nn.Linear(3, 3), x

def list_of_numbers():
    return nn.Linear(3, 3), (1.0, 2.0)

def bad_loss():
    return nn.Linear(3, 3), (x,), (x,), 3

def no_batch():
    return nn.Linear(3, 3), (torch.zeros(()),)

def needs(size):
    return nn.Linear(3, size), (x,)

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:
            return y * 2
        return y

def deciding():
    return Deciding(), (x,)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x):
        return x * self.scale

def meta():
    return Own(), (torch.zeros(4, 3, device="meta"),)

def vector_loss():
    return nn.Linear(3, 3), (x,), (x,), lambda y, t: (y - t).square()

def wrong_shape():
    return nn.Linear(5, 3), (x,)

def root_of_mean():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), (x,), (x,), lambda y, t: (y - t).square().mean().sqrt()

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).view(4, 3))

def fixed():
    return Fixed(), (x,)

not_a_function = 3
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("factories") / "nets.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused; gives the line."""

    before = set(multiprocessing.active_children())  # pools that other tests keep

    def check(*arguments: object, code: int = 2) -> str:
        assert run([str(a) for a in arguments]) == code
        out, err = capsys.readouterr()
        lines = err.strip().splitlines()
        assert out == ""
        assert len(lines) == 1, err
        assert lines[0].startswith("fourfold: ")
        assert set(multiprocessing.active_children()) <= before
        return lines[0]

    return check


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "resnet5"], "unknown model 'resnet5'; did you mean 'resnet50'?"),
        (["inspect", "resnet50,imag=64"], "no argument 'imag'; did you mean 'image'?"),
        (["inspect", "resnet50,image"], "argument 'image' of resnet50 has no value; write name=value"),
        (["inspect", "resnet50,image=big"], "argument 'image' of resnet50 is 'big'; it must be a whole number"),
        (["inspect", "resnet50,image=64,image=32"], "argument 'image' of resnet50 is given twice"),
        (["inspect", "vgg16-cifar,image=8"], "image is 8, the least is 32; use image=32 or more"),
        (["inspect", SMALL, "--batch", "0"], "the batch is 0; it must be at least 1"),
        (["inspect", "no/such/file.py:net"], "there is no file no/such/file.py"),
        (["inspect", "no_such_package.models:net"], "there is no module 'no_such_package'"),
        (["plan", SMALL, "--devices", "2", "--stages", "2"], "belong to a --strategy"),
        (["plan", SMALL, "--devices", "2", "--fix", "classifier"], "write OPS=SPLIT"),
        (["plan", SMALL, "--devices", "2", "--fix", "classifier.*=sideways"], "unknown split"),
        (["plan", SMALL, "--devices", "2", "--time-limit", "0"], "more than 0 seconds"),
        (["plan", SMALL, "--devices", "2", "--strategy", "data", "--fix", "a=filter"], "leave --strategy out"),
        (["plan", SMALL, "--devices", "2", "--cost-model", "paradl"], "leave --cost-model out"),
        (["plan", SMALL, "--devices", "999999", "--cluster", "dgx-h100"], "ask for fewer"),
        (["explain", "no-such-plan.json"], "cannot read plan"),
        (["plan", SMALL, "--strategy", "filtre", "--devices", "2"], "unknown strategy 'filtre'; did you mean 'filter'?"),
        (["plan", SMALL, "--strategy", "grid:px=2", "--devices", "4"], "strategy grid has no option 'px'; it takes pr, pc"),
        (["plan", SMALL, "--strategy", "splitbrain:passe=2", "--devices", "4"], "'passe'; did you mean 'passes'?"),
        (["plan", SMALL, "--strategy", "grid:pr=two", "--devices", "4"], "needs a positive whole number"),
        (["plan", SMALL, "--strategy", "grid:pr=3", "--devices", "4"], "4 ranks cannot be cut into groups of 3; use one of"),
        (["plan", SMALL, "--strategy", "data", "--devices", "0"], "0 ranks asked for; use at least 1"),
        (["plan", SMALL, "--strategy", "data", "--devices", "2", "-o", "no/such/p.json"], "cannot write no/such/p.json"),
        (["verify", SMALL, "--ranks", "2"], "give either --plan FILE or --strategy NAME"),
        (["verify", SMALL, "--plan", "p.json", "--strategy", "data"], "not both"),
        (["verify", SMALL, "--strategy", "data"], "how many ranks? give --ranks N"),
        (["verify", SMALL, "--strategy", "data", "--ranks", "0"], "--ranks 0; use at least 1"),
        (["verify", SMALL, "--strategy", "data", "--ranks", "2", "--optimizer", "adam"], "did you mean 'adamw'?"),
        (["verify", SMALL, "--strategy", "data", "--ranks", "2", "--precision", "fp16"], "unknown precision 'fp16'"),
        (["train", SMALL, "--strategy", "data", "--ranks", "2", "--steps", "0"], "--steps 0; use at least 1"),
        (["train", SMALL, "--plan", "no/such/plan.json"], "cannot read plan no/such/plan.json"),
        (["verify", SMALL, "--strategy", "grid:pr=3", "--ranks", "4"], "4 ranks cannot be cut into groups of 3"),
        (["simulat", SMALL], "No such command 'simulat'"),
        (["plan", SMALL, "--strategy", "data", "--devices", "2", "--cluster", "abcj"], "unknown cluster 'abcj'; did you mean"),
        (["plan", SMALL, "--strategy", "data", "--devices", "2", "--precision", "fp16"], "unknown precision 'fp16'"),
        (["plan", SMALL, "--strategy", "data", "--devices", "2", "--optimizer", "adam"], "did you mean 'adamw'?"),
        (["plan", SMALL, "--strategy", "data", "--devices", "2", "--trace", "no/such/t.json"], "cannot write no/such/t.json"),
        ([*SIMULATE, "--devices", "1,x"], "--devices 1,x: 'x' is no number of devices; write them as 1,2,4"),
        ([*SIMULATE, "--devices", "0,2"], "--devices 0,2: '0' is no number of devices"),
        ([*SIMULATE, "--devices", ""], "'' is no number of devices"),
        ([*SIMULATE, "--devices", "1,9999"], "has 4352 devices, 9999 are asked for; ask for fewer or describe more nodes"),
        ([*SIMULATE, "--devices", "2", "--strategy", "filtre"], "unknown strategy 'filtre'; did you mean 'filter'?"),
        ([*SIMULATE, "--devices", "2", "--precision", "bf16"], "device 'v100' has no rate for bf16"),
        ([*SIMULATE, "--devices", "2", "--cost-model", "paradel"], "unknown cost model 'paradel'; did you mean 'paradl'?"),
        ([*SIMULATE, "--devices", "2", "--trace", "t.json"], "--trace shows one step, 14 are asked for"),
        ([*ONE, "--trace", "no/such/t.json"], "cannot write no/such/t.json: there is no folder no/such"),
        ([*ONE, "--trace", "."], "cannot write .: it is a folder"),
        ([*ONE, "--trace", "t.json", "--cost-model", "paradl"], "paradl's formulas do not give; leave --cost-model out"),
        ([*ONE, "--samples", "0"], "--samples 0; an epoch has at least 1"),
        (["plan", SMALL, "--stratgy", "data"], "--stratgy"),
        (["plan", SMALL, "--strategy", "data"], "--devices"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_named_with_its_remedy(refused: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


PIPE = ["plan", SMALL, "--strategy", "pipeline", "--devices", "2"]
BATCH = ["plan", SMALL, "--strategy", "data", "--devices", "2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PIPE, "--stages", "3"], "3 stages need at least 3 ranks under 1f1b-so, 2 given; use at most 2 stages or more ranks"),
        (["plan", SMALL, "--strategy", "pipeline", "--devices", "99"], "37 places, 99 stages need 98; use at most 38 stages"),
        ([*PIPE, "--stages", "0"], "--stages 0; use at least 1"),
        ([*PIPE, "--microbatches", "5"], "5 micro-batches of a batch of 4; use at most 4 or a larger batch"),
        ([*PIPE, "--microbatches", "0"], "--microbatches 0; use at least 1"),
        ([*PIPE, "--schedule", "gpip"], "unknown schedule 'gpip'; did you mean 'gpipe'?"),
        ([*PIPE, "--schedule", "interleaved", "--stages", "3"], "gives each rank 2 stages, 3 do not come out even; use 2 or 4"),
        ([*PIPE, "--schedule", "interleaved", "--microbatches", "3"], "a multiple of 2 micro-batches, 3 given; use 2 or 4"),
        ([*BATCH, "--zero", "2"], "--zero 2; use 1 to divide the optimizer's state, 3 for weights too, 0 for neither"),
        ([*BATCH, "--recompute", "-1"], "--recompute -1; use 0 for none, or the number of segments per stage"),
        ([*BATCH, "--recompute", "99"], "a stage can be cut in 37 places, 99 segments need 98; use at most 38 segments"),
    ],
    ids=lambda value: " ".join(value[2:])[:60] if isinstance(value, list) else "",
)
def test_a_pipeline_that_cannot_be_is_named_with_its_remedy(
    refused: Callable[..., str], arguments: list[str], said: str
) -> None:
    assert said in refused(*arguments)


@pytest.mark.parametrize("schedule", ["1f1b-as", "fbp-as"])
def test_asynchronous_schedules_are_planned_and_not_run(
    refused: Callable[..., str], capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    assert run([*PIPE, "--schedule", schedule]) == 0
    assert f"schedule {schedule}" in capsys.readouterr().out
    for command in ("verify", "train"):
        line = refused(command, SMALL, "--strategy", "pipeline", "--ranks", "2", "--schedule", schedule)
        assert f"schedule {schedule} needs devices that stream transfers under compute" in line
        assert "use 1f1b-so, 1f1b-sno, gpipe or interleaved" in line


def test_a_loss_that_is_no_sum_over_samples_is_refused_in_micro_batches(refused: Callable[..., str], factories: str) -> None:
    line = refused("plan", f"{factories}:root_of_mean", "--strategy", "pipeline", "--devices", "2")
    assert "sqrt (aten.sqrt.default) is not linear in a sum over the batch" in line
    assert "use 1 micro-batch" in line
    assert run(["plan", f"{factories}:root_of_mean", "--strategy", "pipeline", "--devices", "2", "--microbatches", "1"]) == 0


def test_a_model_of_fixed_batch_is_refused_in_micro_batches(refused: Callable[..., str], factories: str) -> None:
    line = refused("plan", f"{factories}:fixed", "--strategy", "pipeline", "--devices", "2")
    assert "the model fixes its batch at 4, so 4 micro-batches cannot be smaller; use 1 micro-batch" in line


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("goood", "has no 'goood'; did you mean 'good'?"),
        ("not_a_function", "has a int, no function, 'not_a_function'"),
        ("good,widht=3", "has no argument 'widht'; did you mean 'width'?"),
        ("good,width=x", "must be a whole number"),
        ("good,bias=maybe", "must be true or false"),
        ("good,rate=fast", "must be a number"),
        ("needs", "needs size"),
        ("raises", "raised RuntimeError: no weights here second line"),
        ("leaves", "nets.py:leaves called sys.exit(7); return (module, inputs) instead"),
        ("nothing", "returned None; return (module, inputs)"),
        ("three", "returned a tuple of 3; return (module, inputs)"),
        ("no_module", "returned a str as the module"),
        ("bare_input", "returned a Tensor as inputs"),
        ("list_of_numbers", "returned a float among its inputs"),
        ("bad_loss", "returned a int as the loss"),
        ("no_batch", "no tensor with a batch dim"),
        ("vector_loss", "the loss must be a scalar"),
    ],
)
def test_a_factory_is_named_with_what_it_did(refused: Callable[..., str], factories: str, factory: str, said: str) -> None:
    line = refused("inspect", f"{factories}:{factory}")
    assert said in line
    assert "nets.py" in line or "loss" in line


def test_a_model_that_exits_is_an_error(refused: Callable[..., str], factories: str) -> None:
    assert "the model's code called sys.exit('enough')" in refused("inspect", f"{factories}:leaving")


def test_a_time_limit_that_is_no_number_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_TIMEOUT", "soon")
    line = refused("train", SMALL, "--strategy", "data", "--ranks", "2", "--no-predict")
    assert "FOURFOLD_TIMEOUT is 'soon'; give the seconds" in line


def test_a_broken_file_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    assert "broken.py raised ZeroDivisionError" in refused("inspect", f"{tmp_path}/broken.py:net")


def test_data_dependent_control_flow_is_named_by_line(refused: Callable[..., str], factories: str) -> None:
    line = refused("inspect", f"{factories}:deciding")
    assert "Deciding cannot be exported" in line
    number = FACTORIES.splitlines().index("        if y.sum() > 0:") + 1
    assert f"nets.py:{number} `if y.sum() > 0:`" in line
    assert "avoid .item(), .numpy() and control flow that depends on values" in line


def test_a_model_that_fails_on_its_own_inputs_is_refused(refused: Callable[..., str], factories: str) -> None:
    assert "cannot be exported" in refused("inspect", f"{factories}:wrong_shape")


def test_a_meta_parameter_nobody_can_initialise_is_named(refused: Callable[..., str], factories: str) -> None:
    line = refused("verify", f"{factories}:meta", "--strategy", "data", "--ranks", "2")
    assert "Own" in line
    assert "no reset_parameters" in line


def test_a_split_past_its_limit_names_layer_and_numbers(refused: Callable[..., str]) -> None:
    line = refused("plan", "vgg16-cifar", "--strategy", "filter", "--devices", "128")
    assert "features.2.conv2d_1 has 64 filters, fewer than the 128 ranks" in line


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert run(["plan", SMALL, "--strategy", "data+filter", "--devices", "2", "-o", str(path)]) == 0
    return path


def changed(source: Path, target: Path, **fields: object) -> Path:
    target.write_text(json.dumps({**json.loads(source.read_text()), **fields}))
    return target


def test_ranks_must_match_the_plan(refused: Callable[..., str], plan_file: Path) -> None:
    line = refused("verify", SMALL, "--plan", plan_file, "--ranks", "3")
    assert "has 2 ranks, 3 are asked to run it; use 2 ranks or plan for 3 devices" in line


def test_the_batch_must_match_the_plan(refused: Callable[..., str], plan_file: Path) -> None:
    assert "is for a batch of 4, --batch is 8" in refused("train", SMALL, "--plan", plan_file, "--batch", "8")


def test_a_plan_for_another_model_is_refused(refused: Callable[..., str], plan_file: Path) -> None:
    line = refused("verify", "vgg16-cifar,batch=4,width=64,channels=4", "--plan", plan_file, "--ranks", "2")
    assert "the plan was made for graph" in line
    assert "plan it again" in line


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"graph": "0123456789abcdef"}, "the plan was made for graph 0123456789abcdef"),
        ({"version": 99}, "plan file version 99"),
        ({"mesh": {}}, "needs at least one axis"),
        ({"mesh": {"data": 0}}, "each of size 1 or more"),
        ({"splits": [{"op": "features.*", "modle": "filter"}]}, "'modle'; did you mean 'model'?"),
        ({"splits": [{"op": "features.*", "model": "filtre"}]}, "unknown split 'filtre'; did you mean 'filter'?"),
        ({"splits": [{"op": "classifier.9*", "model": "filter"}]}, "no op matches 'classifier.9*'"),
        ({"splits": [{"op": "features.0", "model": "domain:7"}]}, "cannot be split by domain:7"),
        ({"splits": [{"op": "features.0", "model": "filter", "data": "filter"}], "mesh": {"data": 8, "model": 1}}, "8 ranks"),
        ({"splits": "all"}, "plan.json: splits: is 'all', a list of objects is needed"),
        ({"batch": "many"}, "plan.json: batch: is 'many', a whole number is needed"),
    ],
)
def test_a_plan_file_is_checked(
    refused: Callable[..., str], plan_file: Path, tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    path = changed(plan_file, tmp_path / "plan.json", **fields)
    assert said in refused("verify", SMALL, "--plan", path)


@pytest.fixture(scope="module")
def staged_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "staged.json"
    assert run(["plan", SMALL, "--strategy", "data+pipeline", "--devices", "4", "-o", str(path)]) == 0
    return path


def stage(first: str, *ranks: int, data: int | None = None) -> dict[str, object]:
    return {"first": first, "ranks": list(ranks), "mesh": {"data": data or len(ranks)}}


FIRST, SECOND = "features.0.conv2d", "features.17.conv2d_7"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stages": [stage(FIRST, 0, 1), stage(SECOND, 1, 2)]}, "each rank from 0 on belongs to one set of ranks"),
        ({"stages": [stage(FIRST, 0, 1), stage(SECOND, 2, 4)]}, "the stages use ranks [0, 1, 2, 4]"),
        ({"stages": [stage(FIRST, 0, 1), stage(SECOND, 2, 3, data=3)]}, "stage 1 has ranks [2, 3] for a mesh data=3 of 3"),
        ({"stages": [stage(FIRST, 0, 0), stage(SECOND, 1, 2)]}, "stage 0 has ranks [0, 0]"),
        ({"stages": [stage(FIRST, 0, 1), stage("features.17.conv", 2, 3)]}, "which is no op; did you mean"),
        ({"stages": [stage(FIRST, 0), stage(SECOND, 1), stage("features.7.conv2d_3", 2)]}, "must begin after the one before"),
        ({"stages": [stage(FIRST, 0, 1)] * 2}, "2 stages given; use 1 stages or the schedule interleaved"),
        ({"stages": "two"}, "plan.json: stages: is 'two', a list of objects is needed"),
        ({"stages": [{"first": FIRST}]}, "plan.json: stages 1: ranks: is missing"),
        ({"microbatches": 0}, "0 micro-batches of a batch of 4; use between 1 and 4"),
        ({"schedule": "1f1b-os"}, "unknown schedule '1f1b-os'; did you mean"),
        ({"zero": 2}, "zero is 2; use 0, 1 (optimizer state divided) or 3 (weights too)"),
        ({"recompute": [{"first": "features.99", "last": SECOND}]}, "recomputation begins at 'features.99', which is no op"),
        ({"recompute": [{"first": SECOND, "last": FIRST}]}, "which does not follow it"),
    ],
    ids=lambda value: str(value)[:70] if isinstance(value, dict) else "",
)
def test_stages_in_a_plan_file_are_checked(
    refused: Callable[..., str], staged_file: Path, tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    path = changed(staged_file, tmp_path / "plan.json", **fields)
    assert said in refused("verify", SMALL, "--plan", path)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--stages", "2"], "says 2 stages, --stages is 2; leave --stages out or plan again"),
        (["--microbatches", "4"], "says 2 micro-batches, --microbatches is 4"),
        (["--schedule", "gpipe"], "says schedule 1f1b-so, --schedule is gpipe"),
        (["--recompute", "2"], "says 0 segments to recompute, --recompute is 2"),
        (["--zero", "1"], "says zero 0, --zero is 1"),
    ],
)
def test_a_plan_file_leaves_nothing_to_ask(
    refused: Callable[..., str], staged_file: Path, option: list[str], said: str
) -> None:
    assert said in refused("train", SMALL, "--plan", staged_file, *option)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1}', "\x00\xff"])
def test_a_corrupted_plan_file_is_refused(refused: Callable[..., str], tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    assert "plan" in refused("train", SMALL, "--plan", tmp_path / "plan.json")


def ranks_of(pid: int) -> list[int]:
    """The worker processes of a run, by the kernel's own list of its children."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def endless(request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """A training run in mid-air on two ranks."""
    strategy = getattr(request, "param", "data")
    asked = ["--strategy", strategy, "--ranks", "2", "--steps", "1000000", "--no-predict"]
    command = [sys.executable, "-m", "fourfold", "train", SMALL, *asked]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests started in the background ignore it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step ")
    yield process
    if process.poll() is None:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str], workers: list[int]) -> tuple[int, list[str]]:
    _, err = process.communicate(timeout=60)
    until = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, workers)), "ranks were left behind"
    return process.returncode, err.strip().splitlines()


@pytest.mark.parametrize("endless", ["data", pytest.param("pipeline", marks=pytest.mark.slow)], indirect=True)
def test_a_killed_rank_ends_the_run_with_code_3(endless: subprocess.Popen[str]) -> None:
    workers = ranks_of(endless.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    code, lines = ended(endless, workers)
    assert code == 3
    assert len(lines) == 1
    assert "rank 1 died (signal SIGKILL" in lines[0]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_cleanly(endless: subprocess.Popen[str], number: signal.Signals) -> None:
    workers = ranks_of(endless.pid)
    if number == signal.SIGINT:
        os.killpg(endless.pid, number)  # as a terminal does: the ranks get it too
    else:
        os.kill(endless.pid, number)
    code, lines = ended(endless, workers)
    assert code == 130
    assert lines == ["fourfold: interrupted"]
