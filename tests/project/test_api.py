"""The public interface: the promised names, a named strategy that is priced, and no argument that is ignored."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold import api
from fourfold.errors import Infeasible, InvalidInput

FUNCTIONS = {
    "plan",
    "parallelize",
    "verify",
    "simulate",
    "train",
    "calibrate",
    "inspect",
    "explain",
    "report",
    "models",
    "clusters",
    "load_plan",
    "save_plan",
}
VALUES = {"Plan", "Options", "Cluster", "Mesh", "Workload", "Parallel"}
ERRORS = {"Error", "InvalidInput", "Damaged", "Infeasible", "StalePlan", "CaptureFailed", "WorkerFailed", "Notice"}
SMALL = "vgg16-cifar,batch=4,width=32,channels=4"


def net() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def inputs(batch: int = 8) -> tuple[Tensor, ...]:
    return (torch.zeros(batch, 64, device="meta"),)


def planned(**arguments: Any) -> Any:
    return ff.plan(net(), inputs(), **{"devices": 2, **arguments})


def test_the_public_names_are_the_promised_ones() -> None:
    assert set(ff.__all__) == set(api.__all__) == FUNCTIONS | VALUES | ERRORS
    assert all(callable(getattr(ff, name)) for name in ff.__all__)
    assert all(getattr(ff, name).__doc__ for name in ff.__all__)
    assert set(ff.__all__) <= set(dir(ff))


def test_packages_of_the_same_name_do_not_replace_functions() -> None:
    script = (
        "import fourfold.models, fourfold.calibrate, fourfold.report.text, fourfold as ff\n"
        "from fourfold.models import MODELS\n"
        "assert {row.name for row in ff.models()} == set(MODELS) and callable(ff.report) and callable(ff.calibrate)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_nobody_promised_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = ff.paralelize  # type: ignore[attr-defined]


def test_a_named_strategy_is_priced() -> None:
    found = planned(strategy="data")
    (candidate,) = found.ranking.candidates
    assert candidate.step_seconds > 0
    assert found.best.strategy == "data"
    assert "data" in str(found) and "step" in str(found)


def test_a_search_ranks_plans_that_fit() -> None:
    found = planned(cluster="dgx-h100", devices=2)
    assert found.best == found.candidates[0]
    assert len(found.ranking.candidates) >= len(found.candidates)
    assert "dgx-h100" in str(found)


def test_a_schedule_that_can_only_be_planned_has_no_price() -> None:
    found = planned(strategy="pipeline", options=ff.Options(schedule="fbp-as"))
    assert found.ranking is None and found.best.schedule == "fbp-as"


def step(**arguments: Any) -> float:
    return float(planned(strategy="data", cluster="dgx-h100", **arguments).ranking.candidates[0].step_seconds)


@pytest.mark.parametrize(
    "changed", [{"devices": 4}, {"batch": 4096}, {"precision": "fp64"}, {"optimizer": "adamw"}], ids=lambda c: next(iter(c))
)
def test_each_argument_of_a_strategy_changes_its_price(changed: dict[str, Any]) -> None:
    assert step(**changed) != step()


def test_the_cluster_of_a_strategy_changes_its_price() -> None:
    assert planned(strategy="data", cluster="ethernet-1g").ranking.candidates[0].step_seconds != step()


def test_options_shape_the_plan_of_a_strategy() -> None:
    assert planned(strategy="data", options=ff.Options(zero=1)).best.zero == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"options": ff.Options(zero=1)}, "options"),
        ({"strategy": "data", "fixed": {"0.*": "filter"}}, "fixed"),
        ({"strategy": "data", "time_limit": 1.0}, "time_limit"),
        ({"time_limit": 0.0}, "time-limit 0"),
        ({"batch": 0}, "batch is 0"),
        ({"strategy": "data", "batch": 0}, "batch is 0"),
        ({"devices": 0}, "0 ranks"),
        ({"strategy": "data", "devices": 0}, "0 ranks"),
        ({"strategy": "data", "precision": "fp12"}, "precision 'fp12'"),
        ({"strategy": "data", "optimizer": "agd"}, "optimizer 'agd'"),
        ({"optimizer": "agd"}, "optimizer 'agd'"),
        ({"strategy": "data", "cluster": "dgx-h1000"}, "cluster 'dgx-h1000'"),
        ({"strategy": "dta"}, "strategy 'dta'"),
    ],
)
def test_an_argument_that_cannot_act_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        planned(**arguments)


def test_a_model_text_brings_its_own_inputs() -> None:
    assert ff.plan(SMALL, strategy="data", devices=2).best.model == SMALL
    with pytest.raises(InvalidInput, match="names its own inputs"):
        ff.plan(SMALL, inputs(), strategy="data", devices=2)
    with pytest.raises(InvalidInput, match="inputs= is missing"):
        ff.plan(net(), strategy="data", devices=2)


def test_a_workload_is_planned_as_its_module_is() -> None:
    workload = ff.Workload.of(net(), inputs())
    assert ff.plan(workload, strategy="data", devices=2).best == planned(strategy="data").best


def test_a_plan_that_does_not_fit_is_not_the_best() -> None:
    with torch.device("meta"):
        large = nn.Linear(200_000, 200_000)
    found = ff.plan(large, (torch.zeros(2, 200_000, device="meta"),), strategy="data", devices=2, cluster="dgx-h100")
    with pytest.raises(Infeasible, match="no plan fits: data"):
        _ = found.best
    assert len(found.ranking.candidates) == 1


def test_an_optimizer_object_is_refused_with_the_factory_to_pass() -> None:
    module = nn.Sequential(nn.Linear(64, 8))
    plan = ff.plan(module, (torch.zeros(8, 64),), strategy="data", devices=1).best
    with pytest.raises(InvalidInput, match=r"pass a factory, as optimizer=lambda named: torch.optim.AdamW\("):
        ff.parallelize(module, plan, optimizer=torch.optim.AdamW(module.parameters()))  # type: ignore[arg-type]


def test_strategies_are_simulated() -> None:
    table = ff.simulate(SMALL, cluster="dgx-h100", devices=(1, 2), strategies=("data", "filter"))
    assert [(row.devices, row.strategy) for row in table.rows] == [(1, "data"), (1, "filter"), (2, "data"), (2, "filter")]
    assert "data" in str(table)


def test_a_plan_is_verified_and_trained() -> None:
    found = ff.verify(SMALL, strategy="data", ranks=2, steps=1, predict=False)
    assert found is not None and found.equal
    trained = ff.train(SMALL, plan=found.plan, steps=1, predict=False)
    assert len(trained.history.losses) == 1


def test_a_model_is_inspected() -> None:
    assert ff.inspect(net(), inputs()).total("parameters") == 64 * 128 + 128 + 128 * 8 + 8
    assert {"abci", "local"} <= {cluster.name for cluster in ff.clusters()}
