"""What "equal" notices, and a covering set of the cells of `make verify-all`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import verify_all
from fourfold.cli.main import run
from fourfold.runs.comparison_run import RunResult
from fourfold.runs.reference import EAGER, PROGRAM, Reference
from fourfold.runs.verify import Check, _checks, verify
from fourfold.workload.workload import load_workload
from ranks import pool

COVERING = """
vgg16-cifar,batch=4,width=256,channels=16 | data | 2 | fp64
vgg16-cifar,batch=4,width=256,channels=16 | spatial | 2 | fp32
cosmoflow,batch=4,size=32,width=8 | channel | 2 | fp64
gnmt,batch=4,width=32,vocabulary=101,length=9 | data+filter | 2 | fp64
gpt2,batch=4,layers=4,width=96,heads=6,vocabulary=500,length=32 | filter | 2 | fp64
vgg16-cifar,batch=4,width=256,channels=16,dropout=0.5 | splitbrain | 2 | fp64
resnet50,batch=4,image=64,width=16,classes=10 | spatial | 3 | fp64
gpt2,batch=3,layers=2,width=60,heads=5,vocabulary=101,length=17,dropout=0.1 | spatial | 3 | fp64
vgg16-cifar,batch=3,image=45,width=250,channels=6,norm=True | data+filter | 3 | fp64
vgg16-cifar,batch=1,width=256,channels=16 | data | 4 | fp64
resnet50,batch=1,image=64,width=16,classes=10 | data+spatial | 4 | fp64
unet3d,batch=1,size=24,width=2 | filter | 4 | fp64
vgg16-cifar,batch=8,width=256,channels=16 | splitbrain:k=2 | 4 | fp64
vgg16-cifar,batch=8,width=256,channels=16 | spatial:d0=2,d1=2 | 4 | fp64
""".strip().splitlines()


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    found: dict[str, str] = verify_all.json.loads(verify_all.TABLE.read_text())
    return found


@pytest.mark.parametrize("name", COVERING)
def test_a_cell_comes_out_as_the_table_says(name: str, table: dict[str, str]) -> None:
    cell = next(c for c in verify_all.cells() if c.name == name)
    word, split = verify_all.outcome(cell, pool(cell.ranks), torch.device("cpu"))
    assert verify_all.fault(cell, word, split, table) == ""


def test_the_table_has_every_cell_and_no_other(table: dict[str, str]) -> None:
    assert set(table) == {cell.name for cell in verify_all.cells()}


def test_no_cell_of_the_table_is_unequal(table: dict[str, str]) -> None:
    assert all(word == verify_all.EQUAL or word.startswith("refused: ") for word in table.values())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = tmp_path_factory.mktemp("nets") / "net.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def net():\n"
        "    layers = nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(30, 2)\n"
        "    return nn.Sequential(*layers), (torch.randn(4, 3, 8),)\n"
    )
    return Reference(workload=load_workload(f"{path}:net"))


def judged(reference: Reference, trial: RunResult, precision: str = "fp64") -> list[Check]:
    trainable = {p.key for p in reference.workload.graph.parameters if p.trainable}
    checks, _, _ = _checks(trial, reference, precision, trainable)
    return checks


def test_the_reference_is_equal_to_itself(reference: Reference) -> None:
    assert all(check.error == 0 for check in judged(reference, reference.exact))
    assert all(check.holds for check in judged(reference, reference.single("fp32", 0), "fp32"))


def test_bf16_holds_one_process_and_not_a_gradient_that_strays(reference: Reference) -> None:
    single = reference.single("bf16", 0)
    assert all(check.holds for check in judged(reference, single, "bf16"))
    far = {key: exact + 100 * (single.gradients[key] - exact) for key, exact in reference.exact.gradients.items()}
    bad = {check.what for check in judged(reference, replace(single, gradients=far), "bf16") if not check.holds}
    assert bad == {"gradient", "whole gradient"}


BF16 = [
    ("vgg16-cifar,batch=6,width=64,channels=8,norm=True", "spatial", 2),
    ("vgg16-cifar,batch=6,width=64,channels=8,norm=True", "data+pipeline --zero 1", 3),
    ("gpt2,batch=4,layers=2,width=48,heads=6,vocabulary=101,length=16", "fsdp --recompute 2", 2),
    ("gpt2,batch=4,layers=2,width=48,heads=6,vocabulary=101,length=16", "filter", 2),
    ("gnmt,batch=4,width=32,vocabulary=101,length=9", "pipeline --schedule interleaved", 2),
]


@pytest.mark.parametrize(("model", "strategy", "ranks"), BF16)
def test_plans_run_in_bf16_as_near_as_one_process(model: str, strategy: str, ranks: int) -> None:
    cell = verify_all.Cell(model, strategy, ranks, "bf16")
    word, _ = verify_all.outcome(cell, pool(ranks), torch.device("cpu"))
    assert word == "equal"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--precision", "tf32"], "tf32 is a mode of GPUs"),
        (["--device", "cuda"], "no GPU" if not torch.cuda.is_available() else "a GPU each"),
        (["--device", "cpu", "--share-gpu"], "--share-gpu is for ranks on GPUs"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_devices_and_precisions_that_are_not_there_are_refused_in_a_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["verify", "vgg16-cifar,width=8", "--strategy", "data", "--ranks", "64", *options])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize("field", ["outputs", "gradients", "first_state", "state"])
def test_a_small_error_in_one_tensor_is_noticed_and_named(reference: Reference, field: str) -> None:
    tensors: dict[str, Any] = getattr(reference.exact, field)
    for key in [k for k, t in tensors.items() if t.is_floating_point()]:
        scale = reference.exact.gradients["4.weight"].norm() if field != "outputs" else tensors[key].norm()
        off = torch.zeros_like(tensors[key])
        off.view(-1)[0] = scale * 1e-6
        checks = judged(reference, replace(reference.exact, **{field: {**tensors, key: tensors[key] + off}}))
        assert [check.tensor for check in checks if not check.holds] == [key]


def test_a_counter_that_is_off_by_one_is_noticed(reference: Reference) -> None:
    state = dict(reference.exact.state)
    state["1.num_batches_tracked"] = state["1.num_batches_tracked"] + 1
    (bad,) = [check for check in judged(reference, replace(reference.exact, state=state)) if not check.holds]
    assert (bad.what, bad.tensor, bad.error) == ("buffer", "1.num_batches_tracked", float("inf"))


def test_a_missing_gradient_and_a_nan_are_noticed(reference: Reference) -> None:
    fewer = {k: g for k, g in reference.exact.gradients.items() if k != "0.weight"}
    assert not all(c.holds for c in judged(reference, replace(reference.exact, gradients=fewer)))
    spoilt = {**reference.exact.gradients, "0.weight": reference.exact.gradients["0.weight"] * float("nan")}
    assert not all(c.holds for c in judged(reference, replace(reference.exact, gradients=spoilt)))
    lost = [float("nan"), *reference.exact.losses[1:]]
    assert not all(c.holds for c in judged(reference, replace(reference.exact, losses=lost)))


def test_a_bias_before_a_batch_norm_is_compared_with_the_others(reference: Reference) -> None:
    gradient = reference.exact.gradients["0.bias"]
    assert float(gradient.norm()) < 1e-12  # truly zero: its relative error says nothing
    noisy = {**reference.exact.gradients, "0.bias": gradient + 1e-15}
    assert all(check.holds for check in judged(reference, replace(reference.exact, gradients=noisy)))


def test_the_module_is_left_as_it_was(reference: Reference) -> None:
    assert reference.perturbed.losses
    now = reference.workload.example.module.state_dict()
    assert all(torch.equal(now[key], tensor) for key, tensor in reference.start.items())
    assert now["0.weight"].dtype == torch.float32


def test_float64_needs_no_float32_luck(reference: Reference) -> None:
    checks = judged(reference, reference.single("fp32", 0), "fp64")
    assert not all(check.holds for check in checks)


UNUSED = "x if torch.rand(3) is not None else None"


@pytest.mark.parametrize(
    ("body", "kind"), [("x.relu()", EAGER), ("nn.functional.dropout(x)", EAGER), ("x.float()", EAGER), (UNUSED, EAGER),
                       (f"nn.functional.dropout({UNUSED})", PROGRAM)]
)  # fmt: skip
def test_the_reference_is_eager_unless_its_draws_cannot_be_replayed(tmp_path: Path, body: str, kind: str) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        f"    def forward(self, x):\n        x = super().forward(x)\n        return {body}\n"
        "def net():\n"
        "    return Net(3, 3), (torch.randn(4, 3),)\n"
    )
    assert Reference(workload=load_workload(f"{tmp_path}/net.py:net")).kind == kind


AMPLIFYING = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
    def forward(self, x):
        x = (x > 0).to(x.dtype)  # what moves in the last place does not come further than here
        for layer in self.layers:
            x = torch.sin(7 * layer(x))
        return x
def net():
    return Net(), (torch.randn(8, 16),)
"""


def test_a_network_that_amplifies_rounding_is_not_called_unequal(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(AMPLIFYING)
    seen = load_workload(f"{tmp_path}/net.py:net")
    verdict = verify(seen, seen.plan("filter", ranks=2), pool(2), reference=Reference(workload=seen))
    assert verdict is not None
    assert not verdict.plain, "moved inputs alone would call it unequal"
    assert verdict.equal
    assert max(check.error for check in verdict.checks) > 1e-9
    assert all(check.error <= 1e-9 for check in verdict.checks if check.step == 1)


BROKEN = """
import torch
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0
def net():
    return Net(4, 4), (torch.randn(8, 4),)
"""


def test_a_loss_that_is_not_a_number_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BROKEN)
    seen = load_workload(f"{tmp_path}/net.py:net")
    verdict = verify(seen, seen.plan("data", ranks=2), pool(2), reference=Reference(workload=seen))
    assert verdict is not None
    assert (verdict.equal, verdict.bad_step) == (False, 1)


@pytest.mark.parametrize("allowed", [False, True])
def test_training_stops_at_a_loss_that_is_not_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], allowed: bool
) -> None:
    (tmp_path / "net.py").write_text(BROKEN)
    more = ["--allow-nan"] if allowed else []
    arguments = ["train", f"{tmp_path}/net.py:net", "--strategy=data", "--ranks=2", "--steps=3", "--no-predict", "--json"]
    assert run([*arguments, *more]) == (0 if allowed else 1)
    out, said = capsys.readouterr()
    assert json.loads(out)["nonfinite_step"] == 1
    assert json.loads(out)["steps"] == (3 if allowed else 1)
    assert ("the loss of step 1 is" in said and "--allow-nan goes on" in said) is not allowed
