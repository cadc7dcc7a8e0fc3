"""The README's Python example runs as printed, under torchrun, on four ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"

BEFORE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
inputs, targets, loss_fn = (torch.randn(8, 3, 6, 6),), (torch.randint(0, 4, (8,)),), nn.functional.cross_entropy
batches = [(inputs[0], targets[0])] * 3
"""
AFTER = """
import os
if os.environ["RANK"] == "0":
    print("loss", float(loss), "keys", sorted(weights))
"""


def test_the_python_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    script = tmp_path / "train.py"
    script.write_text(BEFORE + code + AFTER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "keys ['0.bias', '0.weight', '3.bias', '3.weight']" in done.stdout
