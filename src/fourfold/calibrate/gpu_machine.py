"""The GPUs of the ranks described as a cluster: name and memory asked of the driver, updates and launches measured.

A GPU whose kind a preset has gets the preset's rates and bandwidth, because the fitted efficiencies that come with Fourfold are
relative to them; any other gets the rates of large matrix products and copies. Ranks that share GPUs take turns on them as
ranks do on the cores of a processor, and are described so: with as many `cores` as there are GPUs, whose memory and rates the
node has together.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourfold.calibrate.gpu_kernels import queued
from fourfold.calibrate.machine_speed import machine_name
from fourfold.calibrate.node_runs import node_run
from fourfold.cluster import Cluster, Device, Link, Precision, Sources, preset, preset_names
from fourfold.cluster.local import total_memory
from fourfold.optimizers import OPTIMIZERS
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import matrix_mode
from fourfold.runtime.host.devices import RankDevices, own_device

NODE, NETWORK = "node", "network"
"""The links between GPUs of a host, and between hosts."""
DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
}
TIMES = 5
ASSUMED = Sources(whole="assumed, not calibrated")
MEASURED = "calibration"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What is computed to measure a device: width of a matrix product, bytes copied, tensors updated and their elements."""

    matrix: int
    copied: int
    tensors: int
    updated: int


SIZES = {
    "cuda": _Sizes(matrix=8192, copied=2**29, tensors=64, updated=2**20),
    "cpu": _Sizes(matrix=128, copied=2**20, tensors=2, updated=2**10),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A rank's device: its name, bytes of memory, and what it reaches."""

    name: str
    memory: float
    launch: float
    updates: Mapping[str, float]
    rates: Mapping[Precision, float]  # none where a preset has the device
    bandwidth: float = 0.0


def gpu_name(kind: str) -> str:
    """What the driver calls the device of this rank."""
    return torch.cuda.get_device_name() if kind == "cuda" else "processor"


def gpu_kernels_name(kind: str) -> str:
    """Everything the times of kernels on this rank's device depend on."""
    if kind != "cuda":
        return f"{machine_name()} as a device"
    versions = f"torch {torch.__version__} cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}"
    return f"{gpu_name(kind)} {versions}"


def preset_device(name: str) -> Device | None:
    """The GPU of a preset that a driver's name means: H200 in "NVIDIA H200"."""
    words = re.split(r"[\s-]+", name.lower())
    kinds = (kind for found in preset_names() for kind in preset(found).kinds)
    return next((kind for kind in kinds if kind.kind == "gpu" and kind.name in words), None)


def measure_gpu(kind: str) -> GpuFacts:
    """The device of this rank, measured for a second."""
    device, name = own_device(kind), gpu_name(kind)
    sizes, known = SIZES[device.type], preset_device(name)
    memory = torch.cuda.mem_get_info()[1] if kind == "cuda" else total_memory()
    small = torch.zeros(8, device=device)
    calls = [queued(lambda _: [small.add(1.0) for _ in range(100)], device=device) for _ in range(TIMES)]
    return GpuFacts(
        name=name,
        memory=float(memory),
        launch=_rounded(min(max(pair) for pair in calls) / 100),
        updates={optimizer: _update_rate(optimizer, device, sizes) for optimizer in OPTIMIZERS},
        rates={} if known is not None else {precision: _product_rate(precision, device, sizes) for precision in DTYPES},
        bandwidth=0.0 if known is not None else copy_rate(device),
    )


def release(device: torch.device) -> None:
    """Give back what was measured with: libraries and the allocator keep memory, which would count as the next run's."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _update_rate(optimizer: str, device: torch.device, sizes: _Sizes) -> float:
    """Bytes of float32 parameters updated in a second."""
    parameters = [torch.zeros(sizes.updated, device=device, requires_grad=True) for _ in range(sizes.tensors)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return 4 * sizes.updated * sizes.tensors / _seconds(optimizer_named(optimizer)(parameters).step, device)


def _product_rate(precision: Precision, device: torch.device, sizes: _Sizes) -> float:
    """FLOP/s of a large product."""
    a, b = (torch.rand(sizes.matrix, sizes.matrix, device=device).to(DTYPES[precision]) for _ in range(2))
    with matrix_mode(precision):
        return 2 * sizes.matrix**3 / _seconds(lambda: torch.mm(a, b), device)


def copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second."""
    size = SIZES[device.type].copied
    source, target = (torch.zeros(size // 4, device=device) for _ in range(2))
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _seconds(once: Callable[[], Any], device: torch.device) -> float:
    once()
    return min(queued(lambda _: once(), device=device)[0] for _ in range(TIMES))


def gpu_cluster(name: str, hosts: list[str], facts: GpuFacts, devices: RankDevices) -> Cluster:
    """The ranks as a cluster whose exchanges nobody has measured yet."""
    run = node_run(hosts, device="")
    gpus = min(devices.gpus, run.devices) if devices.shared else 0
    device = _device(facts, gpus)
    links = [Link(name=NODE, nodes=1, latency=1e-3, bandwidth=1e9, sources=ASSUMED)]  # sockets over loopback
    if not devices.shared:
        links = [Link(name=NODE, nodes=1, latency=1e-5, bandwidth=2e10, sources=ASSUMED)]  # about PCIe 4
    if run.count > 1:
        links.append(Link(name=NETWORK, latency=3e-5, bandwidth=1e9, sources=ASSUMED))
    shared = f" share {gpus} of them" if gpus else ""
    return Cluster(
        name=name,
        about=f"{run.count} host{'s' if run.count > 1 else ''}, {len(hosts)} ranks on {facts.name}{shared}",
        kinds=(device,),
        nodes=(replace(run, device=device.name),),
        links=tuple(links),
        size=len(hosts),
    )


def _device(facts: GpuFacts, shared: int) -> Device:
    """A rank's GPU; or, with so many shared ones, those of its node together."""
    known, times = preset_device(facts.name), max(shared, 1)
    own = {"memory": "asked of the driver", "launch": MEASURED, **{f"update_{name}": MEASURED for name in facts.updates}}
    rates = known.rates if known is not None else tuple(facts.rates.items())
    source = known.sources if known is not None else Sources(whole=f"{MEASURED}, large products and copies")
    return Device(
        name=known.name if known is not None else re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-"),
        kind="gpu",
        memory=times * facts.memory,
        bandwidth=_rounded(times * (known.bandwidth if known is not None else facts.bandwidth)),
        rates=tuple((precision, _rounded(times * rate)) for precision, rate in rates),
        launch=facts.launch,
        cores=shared,
        updates=tuple((name, _rounded(rate)) for name, rate in facts.updates.items()),
        sources=Sources(whole=source.whole, single=tuple(sorted((dict(source.single) | own).items()))),
    )


def _rounded(number: float) -> float:
    """Four digits: more would pretend to a precision no measurement has."""
    return float(f"{number:.4g}")
