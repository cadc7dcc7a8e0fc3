"""Calibration of GPUs, run on processors in their place: the same functions, with clocks instead of events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.api import calibration as api_calibration
from fourfold.api import prepared_run
from fourfold.api import running as api_running
from fourfold.calibrate import gpu_machine, gpu_prices, measured_prices
from fourfold.calibrate.calibration import Progress, requests
from fourfold.calibrate.collectives import Effort
from fourfold.calibrate.gpu_calibration import calibrated_on_gpus
from fourfold.calibrate.gpu_kernels import DeviceTime
from fourfold.calibrate.gpu_machine import GpuFacts, gpu_cluster, preset_device
from fourfold.calibrate.kernel_table import add_kernels, load_kernels, table_name
from fourfold.calibrate.kernels import samples
from fourfold.cluster import Cluster, load_cluster, preset, save_calibration, save_cluster
from fourfold.cluster.cache import calibration_file, kernels_file
from fourfold.errors import Damaged, InvalidInput, Notice
from fourfold.oracle.predict import predict
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.plans import LoweredPlan, lower_plan, named
from fourfold.report.calibration import calibration_text
from fourfold.report.text import console
from fourfold.runtime.host.devices import RankDevices
from fourfold.runtime.host.launch import LocalRanks
from ranks import pool
from small import graph_of

QUICK = Effort(sizes=(256.0, 65536.0), rounds=1)
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
FACTS = GpuFacts(name="NVIDIA H200", memory=1.5e11, launch=4e-6, updates={"sgd": 1e12}, rates={})
OTHER = replace(FACTS, name="NVIDIA X1-PCIe", rates={"fp32": 1e13, "bf16": 2e13}, bandwidth=1e12)


def lowered(strategy: str) -> LoweredPlan:
    graph = graph_of("vgg16-cifar")
    return lower_plan(graph, named(strategy, graph, ranks=2, batch=4))


@pytest.fixture(scope="module")
def progress() -> list[Progress]:
    some = list(samples(lowered("data"), {}).values())[:3]
    return list(calibrated_on_gpus(pool(2), name="gpus", effort=QUICK, kernels=some))


def test_a_calibration_has_every_collective_but_those_of_shared_memory(progress: list[Progress]) -> None:
    cluster = progress[-1].cluster
    assert {curve.collective for curve in cluster.measured.curves} == KINDS
    assert {curve.sizes for curve in cluster.measured.curves} == {QUICK.sizes}
    assert cluster.device(0).kind == "gpu" and progress[-1].done == progress[-1].of
    (link,) = cluster.links
    assert link.sources.whole.startswith("calibration")


def test_its_kernels_come_with_it_under_the_name_of_the_device(progress: list[Progress]) -> None:
    assert len(progress[-1].kernels) == 3 and all(time.forward > 0 for time in progress[-1].kernels.values())
    assert progress[-1].cluster.measured.kernels == gpu_prices.own_table(pool(2))


def test_it_reads_back_from_its_file(progress: list[Progress], tmp_path: Path) -> None:
    cluster = progress[-1].cluster
    save_cluster(cluster, tmp_path / "gpus.toml")
    assert load_cluster(tmp_path / "gpus.toml") == cluster


def test_the_gpus_of_ranks_are_as_they_were_calibrated(progress: list[Progress]) -> None:
    path = calibration_file(2, gpu_prices.gpus_of(pool(2)))
    assert path != calibration_file(2), "that of the processors is another"
    assert not gpu_prices.calibrated_gpus(pool(2)).measured.curves
    save_calibration(progress[-1].cluster, path)
    try:
        assert gpu_prices.calibrated_gpus(pool(2)) == progress[-1].cluster
        path.write_text("damaged")
        with pytest.raises(Damaged):
            gpu_prices.calibrated_gpus(pool(2))
    finally:
        path.unlink()


def test_kernels_are_timed_once_and_a_step_rests_on_them(progress: list[Progress], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cluster = lowered("filter"), progress[-1].cluster
    found = predict(plan, gpu_prices.gpu_prices([plan], cluster, pool(2), precision="fp32"))
    assert found.estimate.measured_share == 1.0
    monkeypatch.setattr(gpu_prices, "timed_on_gpus", None)  # must not be needed again
    again = predict(plan, gpu_prices.gpu_prices([plan], cluster, pool(2), precision="fp32"))
    assert again.step_seconds == found.step_seconds > 0


def test_kernels_are_timed_for_the_cluster_of_these_gpus_and_for_no_other(progress: list[Progress]) -> None:
    plan, own = lowered("filter"), progress[-1].cluster
    for cluster, measured in ((own, True), (None, True), (preset("dgx-h200").with_size(2), False)):
        prices = measured_prices._prices_on_gpus(plan, pool(2), cluster, "fp32")
        assert (predict(plan, prices).estimate.measured_share == 1.0) is measured
        assert cluster is None or prices.cluster == cluster


def test_a_kernel_that_cannot_be_timed_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = list(samples(lowered("data"), {}).values())[:2]
    asked = []

    def timed(sample: object, precision: str, device: torch.device) -> DeviceTime:
        asked.append(sample)
        if sample is one:
            raise torch.cuda.OutOfMemoryError("too much\nand more")
        return DeviceTime(forward=1.0, backward=2.0, forward_host=0.1, backward_host=0.3, spread=0.0)

    monkeypatch.setattr(gpu_prices, "_timed", timed)
    times, failed = gpu_prices.time_all([one, other], "fp32", torch.device("cpu"))
    assert failed == {one.kernel.key: "too much"} and list(times) == [other.kernel.key]
    monkeypatch.setattr(gpu_prices, "time_on_gpu", None)

    class Ranks:
        count, devices = 1, RankDevices()

        def __call__(self, function: object, *args: object) -> list[object]:
            return ["host"] if args == () else [(times, failed)]

    with pytest.warns(Notice, match="cannot be timed by itself"):
        assert gpu_prices.timed_on_gpus(Ranks(), [one, other], [], "fp32") == times


def test_a_search_times_kernels_on_the_gpus_of_its_cluster_and_on_no_others(progress: list[Progress]) -> None:
    timing = measured_prices.timing(progress[-1].cluster, Pretended(), "bf16")
    assert predict(lowered("data"), timing([lowered("data")])).estimate.measured_share == 1.0
    with pytest.raises(InvalidInput, match="was not calibrated on these GPUs"):
        measured_prices.timing(preset("dgx-h200").with_size(2), Pretended(), "fp32")


class Pretended(LocalRanks):
    """Local ranks on processors that are taken for GPUs: `own_device` of any other kind than cuda is a processor."""

    def __init__(self) -> None:
        self.count, self.devices = 2, RankDevices(kind="pretended", gpus=2)  # type: ignore[arg-type]

    def __call__(self, function: Any, *args: Any) -> list[Any]:
        return pool(2)(function, *args)

    def close(self, *, at_once: bool = False) -> None:
        """The pool stays for others."""


SMALL = "vgg16-cifar,batch=4,width=32,channels=2"


def test_what_calibrate_writes_of_gpus_is_what_verify_and_train_predict_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (api_calibration, prepared_run):
        monkeypatch.setattr(module, "rank_pool", lambda count, **options: Pretended())
    monkeypatch.setattr(api_calibration, "GPU_EFFORT", QUICK)
    said: list[str] = []
    result = api_calibration.calibrate(2, models=[SMALL], progress=lambda words, done, of: said.append(words))
    try:
        assert result.path == calibration_file(2, "2 processor") and any("kernels of" in words for words in said)
        assert load_kernels(result.cluster.measured.kernels)
        assert "each GPU" in render(calibration_text(result.cluster, file="x"))
        for cluster in (None, "local", str(result.path)):
            notes: list[str] = []
            trained = api_running.train(
                SMALL, strategy="data", ranks=2, steps=1, cluster=cluster, note=lambda text, notes=notes: notes.append(text)
            )
            assert trained.prediction is not None and trained.prediction.prices.cluster == result.cluster
            assert trained.prediction.estimate.measured_share == 1.0
        assert any("running on 2 x cpu" in text for text in notes)
    finally:
        result.path.unlink()


@pytest.mark.parametrize(
    ("name", "kind"), [("NVIDIA H200", "h200"), ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA L4", None), ("H2000", None)]
)
def test_a_drivers_name_finds_the_device_of_a_preset(name: str, kind: str | None) -> None:
    found = preset_device(name)
    assert (found.name if found else None) == kind


def test_a_known_gpu_keeps_the_rates_its_efficiencies_are_relative_to() -> None:
    cluster = gpu_cluster("here", ["a", "a"], FACTS, RankDevices(kind="cuda", gpus=2))
    device, known = cluster.device(0), preset("dgx-h200").device(0)
    assert (device.name, device.rates, device.bandwidth) == (known.name, known.rates, known.bandwidth)
    assert (device.memory, device.launch, dict(device.updates)["sgd"]) == (1.5e11, 4e-6, 1e12)
    assert cluster.memory(0) == 1.5e11 and device.sources.of("update_sgd") == "calibration"


@pytest.mark.parametrize("facts", [FACTS, OTHER], ids=["known", "unknown"])
def test_described_gpus_can_be_written_and_read(facts: GpuFacts, tmp_path: Path) -> None:
    cluster = gpu_cluster("here", ["a"] * 2 + ["b"] * 2, facts, RankDevices(kind="cuda", gpus=1, shared=True))
    save_cluster(cluster, tmp_path / "here.toml")
    assert load_cluster(tmp_path / "here.toml") == cluster


def test_an_unknown_gpu_has_the_rates_that_were_measured() -> None:
    device = gpu_cluster("here", ["a"] * 2 + ["b"] * 2, OTHER, RankDevices(kind="cuda", gpus=2)).device(0)
    assert (device.name, device.rate("bf16"), device.bandwidth) == ("nvidia-x1-pcie", 2e13, 1e12)


def test_ranks_that_share_a_gpu_take_turns_on_it_and_divide_its_memory() -> None:
    alone = gpu_cluster("here", ["a"] * 2, FACTS, RankDevices(kind="cuda", gpus=2))
    shared = gpu_cluster("here", ["a"] * 2, FACTS, RankDevices(kind="cuda", gpus=1, shared=True))
    assert shared.memory(0) == alone.memory(0) / 2
    plan = lowered("data")
    one, two = (predict(plan, Prices(cluster=cluster)) for cluster in (alone, shared))
    assert two.breakdown["compute"] == pytest.approx(2 * one.breakdown["compute"], rel=0.05)


def test_two_shared_gpus_are_each_as_fast_as_one() -> None:
    four = gpu_cluster("here", ["a"] * 4, FACTS, RankDevices(kind="cuda", gpus=2, shared=True))
    two = gpu_cluster("here", ["a"] * 2, FACTS, RankDevices(kind="cuda", gpus=2))
    kernel = next(iter(samples(lowered("data"), {}).values())).kernel
    assert Prices(cluster=four).kernel(kernel, 0).forward == pytest.approx(Prices(cluster=two).kernel(kernel, 0).forward)


def test_gpus_of_two_kinds_are_refused() -> None:
    class Ranks:
        count, devices = 2, RankDevices()

        def __call__(self, function: object, *args: object) -> list[str]:
            return ["NVIDIA H200", "NVIDIA L4"]

    with pytest.raises(InvalidInput, match="NVIDIA H200 and NVIDIA L4"):
        gpu_prices.gpus_of(Ranks())


def render(text: Any) -> str:
    with (page := console()).capture() as found:
        page.print(text)
    return found.get()


def on_gpus(name: str) -> Cluster:
    cluster = gpu_cluster("here", ["a"], FACTS, RankDevices(kind="cuda", gpus=1))
    return replace(cluster, measured=replace(cluster.measured, kernels=name))


def test_tables_keep_the_hosts_seconds_and_tf32_has_one_of_its_own() -> None:
    cluster = on_gpus("some gpu")
    assert table_name(cluster, "bf16") == table_name(cluster, "fp32") == "some gpu" != table_name(cluster, "tf32")
    add_kernels("some gpu", {"a": KernelTime(forward=1.0, backward=2.0, spread=0.1, host_seconds=(3.0, 4.0))})
    assert load_kernels("some gpu")["a"].host_seconds == (3.0, 4.0)
    assert json.loads(kernels_file("some gpu").read_text())["fields"][-2:] == ["forward_host", "backward_host"]


def test_measured_seconds_of_the_host_come_before_shipped_ones() -> None:
    kernel = next(iter(samples(lowered("data"), {}).values())).kernel
    shipped = KernelTime(forward=1.0, backward=1.0)
    measured = replace(shipped, host_seconds=(7.0, 8.0))
    for time, host in ((shipped, None), (measured, (7.0, 8.0))):
        found = Prices(cluster=on_gpus("x"), kernels={kernel.key: time}).kernel(kernel, 0).host_seconds
        assert found == host if host else found[0] > 0


def test_requests_of_gpus_have_links_of_their_own() -> None:
    found = requests(["a", "a", "b", "b"], within="node", across="network", shared=False)
    assert {request.collective for request in found} == KINDS and {request.level for request in found} == {"node", "network"}


def test_devices_are_measured_by_products_copies_and_updates() -> None:
    facts = gpu_machine.measure_gpu("cpu")
    assert set(facts.rates) == set(gpu_machine.DTYPES) and min(*facts.rates.values(), facts.bandwidth, facts.launch) > 0
    assert min(facts.updates.values()) > 0
