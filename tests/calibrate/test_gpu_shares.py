"""The benchmark that runs one rank's share alone: its collectives have the right shapes, its prediction is of that share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_shares

MODEL = "vgg16-cifar,batch=4,width=32,channels=8,norm=True"


@pytest.fixture(scope="module")
def predictor() -> gpu_shares.Predictor:
    return gpu_shares.Predictor(torch.device("cpu"))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("data", "spatial", "filter", "channel")]


@pytest.mark.parametrize("strategy", ["data+filter", *SLOW])
def test_a_share_runs_alone_and_its_peak_is_that_predicted(strategy: str, predictor: gpu_shares.Predictor) -> None:
    workload = gpu_shares.load_workload(MODEL)
    rank = gpu_shares.share_ranks(workload, strategy)[-1]
    found = gpu_shares.compared(workload, strategy, rank, "fp32", predictor)
    assert abs(found["peak_error"]) < 0.1
    assert found["predicted_seconds"] > 0 and found["known_from"]["measured"] == 1.0
    assert gpu_shares.row("x", found) and gpu_shares.summary({"x": found})
