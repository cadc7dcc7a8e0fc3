"""Which device each rank of a machine gets, with any number of GPUs."""

from __future__ import annotations

import pytest

from fourfold.errors import InvalidInput
from fourfold.runtime.host import devices
from fourfold.runtime.host.devices import rank_devices


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: request.param)


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_ranks_get_a_gpu_each_where_there_are_enough(gpus: None) -> None:
    found = rank_devices("auto", 4)
    assert found.kind == "cuda" and not found.shared and [found.index(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert not {"NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"} & found.environment(3).keys()
    assert rank_devices("cpu", 4).kind == "cpu"


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_too_few_gpus_are_shared_only_if_that_is_wanted(gpus: None) -> None:
    assert rank_devices("auto", 3).kind == "cpu"
    with pytest.raises(InvalidInput, match="3 ranks want a GPU each, this machine has 2; use --ranks 2, --share-gpu"):
        rank_devices("cuda", 3)
    found = rank_devices("auto", 3, share_gpu=True)
    assert found.shared and [found.index(rank) for rank in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl(gpus: None) -> None:
    found = rank_devices("cuda", 2, share_gpu=True)
    first, second = found.environment(0), found.environment(1)
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["NCCL_SOCKET_IFNAME"] == "lo" and first["NCCL_IB_DISABLE"] == "1"


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.parametrize(
    ("device", "share_gpu", "message"),
    [
        ("cuda", False, "PyTorch finds no GPU on this machine; use --device cpu$"),
        ("auto", True, "use --device cpu, without --share-gpu$"),
        ("cpu", True, "--share-gpu is for ranks on GPUs, --device is cpu; leave one of them out"),
        ("gpu", False, "unknown device 'gpu'; known: auto, cpu, cuda$"),
    ],
)
def test_what_a_machine_without_gpus_refuses(gpus: None, device: str, share_gpu: bool, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rank_devices(device, 2, share_gpu=share_gpu)
