"""Which device each rank of this machine computes on.

Several ranks can share one GPU, to try plans on a machine that has fewer GPUs than the plan needs. NCCL refuses two ranks of
one host on one GPU, so each of them then says it is a host of its own, and they talk over loopback sockets: NCCL with its
real rules, but slow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fourfold.errors import InvalidInput

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]
DEVICES = ("auto", "cpu", "cuda")
"""What a command may ask for; auto: GPUs if every rank of this machine can have one."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevices:
    """The devices of the ranks of this machine. `gpus`: how many GPUs there are; `shared`: ranks may have one together."""

    kind: Kind = "cpu"
    gpus: int = 0
    shared: bool = False

    def index(self, local_rank: int) -> int:
        return local_rank % self.gpus

    def environment(self, rank: int) -> Mapping[str, str]:
        """What CUDA and NCCL are to find in the environment of a rank: queues for as many streams as stages may have messages
        under way on, or one would wait behind another; for a GPU that is shared, a host name of its own."""
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        if not self.shared:
            return queues
        return {**queues, "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


PROCESSORS = RankDevices()


def rank_devices(device: str, ranks: int, *, share_gpu: bool = False) -> RankDevices:
    """The devices for so many ranks of this machine; refuses more ranks than GPUs, unless they may share."""
    if device not in DEVICES:
        raise InvalidInput(f"unknown device '{device}'; known: {', '.join(DEVICES)}")  # 'gpu' is nearest to 'cpu'
    if device == "cpu":
        if share_gpu:
            raise InvalidInput("--share-gpu is for ranks on GPUs, --device is cpu; leave one of them out")
        return PROCESSORS
    gpus = gpu_count()
    if gpus >= ranks or (share_gpu and gpus):
        return RankDevices(kind="cuda", gpus=gpus, shared=gpus < ranks)
    if device == "auto" and not share_gpu:
        return PROCESSORS
    if not gpus:
        raise InvalidInput(f"PyTorch finds no GPU on this machine; use --device cpu{', without --share-gpu' * share_gpu}")
    raise InvalidInput(
        f"{ranks} ranks want a GPU each, this machine has {gpus}; use --ranks {gpus}, --share-gpu to let ranks share one, "
        "or --device cpu"
    )


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_device(kind: str) -> torch.device:
    """The device of this process, of a kind."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def take_device(devices: RankDevices, rank: int, local_rank: int) -> torch.device:
    """Make a rank's device this process's own, before its process groups are made."""
    import torch

    if devices.kind == "cpu":
        return torch.device("cpu")
    for name, value in devices.environment(rank).items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", devices.index(local_rank))
    torch.cuda.set_device(device)
    return device


def init_process_group(device: torch.device, **arguments: object) -> None:
    """Join the ranks, with gloo, and on GPUs NCCL too."""
    import torch.distributed as dist

    bound = {"device_id": device} if device.type == "cuda" else {}
    try:
        dist.init_process_group(BACKENDS[device.type], **arguments, **bound)  # type: ignore[arg-type]
    except RuntimeError as error:  # NCCL's
        if "Duplicate GPU" not in str(error):
            raise
        raise InvalidInput(
            f"another rank of this machine computes on {device} too; call torch.cuda.set_device(LOCAL_RANK) first, "
            "start as many ranks as there are GPUs, or let ranks share one as docs/gpus.md says"
        ) from error
