"""Ranks under torchrun end their groups' threads before the interpreter ends: one that frees a message later aborts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, os
def report():
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print("threads left:", sum(name.startswith("pt_gloo") for name in names), flush=True)
atexit.register(report)  # runs after what is registered later
import torch
from torch import nn
import fourfold as ff
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
x, y, loss = torch.randn(8, 8), torch.randint(0, 4, (8,)), nn.functional.cross_entropy
plan = ff.plan(model, (x,), targets=(y,), loss=loss, strategy="pipeline", devices=2).best
run = ff.parallelize(model, plan, loss=loss, optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1))
run.step(x, y)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the names of threads are read from /proc")
def test_no_thread_of_a_group_outlives_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("threads left: 0") == 2, done.stdout
