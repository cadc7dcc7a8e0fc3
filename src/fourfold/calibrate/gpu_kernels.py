"""Kernels timed on a GPU: what the device needs for each, and what the host needs to ask for it.

A GPU works through a queue that the host fills, and a step takes as long as the slower of the two. So both are measured
apart: the device is put to sleep, calls are queued behind it meanwhile, timed on the host as they are asked for and by
events in the queue as they are done. Backward runs on several calls at once: in a step, too, the engine is entered once.
Operands of backward are made anew for each call, so that they are not in the cache from the call before, as in a step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.calibrate.kernels import Sample, SingleRankWorld
from fourfold.graph.spec import TensorSpec
from fourfold.oracle.prices.kernels import Kernel
from fourfold.runtime.kernels import Randomness, RankContext, build

CHAINED = 24
CHAINED_BYTES = 4e9  # kernels whose chain would take more are chained less
SERIES = 5
LONG = 0.05  # seconds: so long a chain is run only three times
CLOCK = 2e9  # cycles a second: the fastest a GPU's clock runs, so that sleep is rather too long
LEAST_SLEEP = 3e-4
MOST_SLEEP = 0.2
LEAST_HOST = 1e-6  # seconds the host needs at least for a backward
CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Seconds of the device, seconds of the host to ask for it, relative spread, and bytes an op takes for a while beyond what
    it gives and keeps."""

    forward: float
    backward: float
    forward_host: float
    backward_host: float
    spread: float
    forward_extra: int = 0
    backward_extra: int = 0


def queued(
    calls: Callable[[Any], Any],
    prepared: Callable[[], Any] = lambda: None,
    *,
    least: float = LEAST_SLEEP,
    device: torch.device = CUDA,
) -> tuple[float, float]:
    """Seconds on the device and on the host of calls that are queued while the device sleeps, on what was prepared before. A
    processor has no queue: there the host needs none beside them."""
    if device.type == "cpu":
        material, begun = prepared(), time.perf_counter()
        calls(material)
        return time.perf_counter() - begun, 0.0
    sleep = least
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        material = prepared()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep * CLOCK))
        begun = time.perf_counter()
        start.record()
        calls(material)
        host = time.perf_counter() - begun
        end.record()
        torch.cuda.synchronize()
        if host < 0.8 * sleep or sleep >= MOST_SLEEP:
            return start.elapsed_time(end) / 1e3, host
        sleep = min(max(2 * sleep, 2 * host), MOST_SLEEP)


class DeviceKernel:
    """One kernel bound to made-up tensors on a GPU, run as the runtime would run it on one rank."""

    def __init__(
        self,
        sample: Sample,
        device: torch.device,
        *,
        autocast: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        world = SingleRankWorld(sample.mesh, sample.member, device, None)
        self.run = build(sample.step, RankContext(world, Randomness(), dict(dtypes or {})))
        self.kernel, self.device, self.autocast = sample.kernel, device, autocast

    def device_time(self) -> DeviceTime:
        self._once()  # algorithms are chosen
        extra = self._once()
        held = 3 * sum(spec.bytes for spec in (*self.kernel.operands, *self.kernel.results))  # with gradients and what is kept
        count = max(1, min(CHAINED, int(CHAINED_BYTES / max(held, 1))))
        forward = self._forward(count)
        backward = self._backward(count) if any(self.kernel.gradients) else [(0.0, 0.0)]
        return DeviceTime(
            forward=statistics.median(d for d, _ in forward),
            backward=statistics.median(d for d, _ in backward),
            forward_host=min(h for _, h in forward),
            backward_host=min(h for _, h in backward),
            spread=max(_spread([d for d, _ in forward]), _spread([d for d, _ in backward])),
            forward_extra=extra[0],
            backward_extra=extra[1],
        )

    def _forward(self, count: int) -> list[tuple[float, float]]:
        shared = self._operands()
        return self._series(lambda: self._queued(lambda _: self._called([shared] * count)), count)

    def _backward(self, count: int) -> list[tuple[float, float]]:
        links = [self._operands() for _ in range(count)]
        ends = [t for link in links for t in link if t.requires_grad]
        grads = [torch.rand_like(t) for t in self._called(links)]
        if not grads:
            return [(0.0, 0.0)]
        return self._series(
            lambda: self._queued(
                lambda outs: torch.autograd.grad(outs, ends, grads, allow_unused=True), lambda: self._called(links)
            ),
            count,
        )

    def _queued(self, calls: Callable[[Any], Any], prepared: Callable[[], Any] = lambda: None) -> tuple[float, float]:
        return queued(calls, prepared, device=self.device)

    def _series(self, once: Callable[[], tuple[float, float]], count: int) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        while len(found) < SERIES and not (len(found) >= 3 and found[-1][0] * count > LONG):
            device, host = once()
            found.append((device / count, host / count))
        return found

    def _once(self) -> tuple[int, int]:
        """Bytes that forward and backward need for a while."""
        operands = self._operands()
        leaves = [t for t in operands if t.requires_grad]
        forward, outs = _grown(lambda: self._called([operands]), self.device)
        if not outs or not leaves:
            return forward, 0
        grads = [torch.rand_like(t) for t in outs]
        backward, _ = _grown(
            lambda: torch.autograd.grad(outs, leaves, grads, allow_unused=True, retain_graph=True), self.device
        )
        return forward, backward

    def _called(self, links: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Forward on each set of operands: the results that have a gradient (all are kept until the last is there)."""
        out: list[Any] = []
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            for operands in links:
                out.append(self.run(*operands))
        flat = (t for result in out for t in (result if isinstance(result, (tuple, list)) else (result,)))
        return [t for t in flat if t.requires_grad]

    def _operands(self) -> list[Tensor]:
        return [
            made(spec, limit_of(self.kernel), self.device).requires_grad_(wanted and spec.is_float)
            for spec, wanted in zip(self.kernel.operands, self.kernel.gradients, strict=True)
        ]


def sum_seconds(kernel: Kernel, device: torch.device) -> DeviceTime:
    """The time of adding up two gradients."""
    one, other = (made(spec, 1, device) for spec in kernel.operands)
    count = max(1, min(CHAINED, int(CHAINED_BYTES / max(kernel.moved, 1.0))))
    found = [queued(lambda _: [torch.add(one, other) for _ in range(count)], device=device) for _ in range(SERIES)]
    seconds = [device / count for device, _ in found]
    return DeviceTime(
        forward=statistics.median(seconds),
        backward=0.0,
        forward_host=min(host / count for _, host in found),
        backward_host=0.0,
        spread=_spread(seconds),
    )


def _spread(seconds: Sequence[float]) -> float:
    """How far the times lie apart, relative."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds) if min(seconds) else 0.0


def engine_seconds(device: torch.device) -> float:
    """Seconds of the host for what the engine does around the backward of a call, which a step has once and the timing of a
    kernel at every call: that of a view, which does nothing itself."""
    some = [torch.rand(8, 8, device=device, requires_grad=True) for _ in range(CHAINED)]
    grads = [torch.ones(8, 8, device=device) for _ in some]

    def views() -> list[Tensor]:
        return [tensor.t() for tensor in some]

    forward = min(queued(lambda _: views(), device=device)[1] for _ in range(SERIES))
    backward = min(queued(lambda outs: torch.autograd.grad(outs, some, grads), views, device=device)[1] for _ in range(SERIES))
    return max(backward - forward, 0.0) / CHAINED


def _grown(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Bytes a call takes for a while beyond what it leaves behind; 0 on a processor, where nobody counts."""
    if device.type == "cpu":
        return 0, call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), result


def limit_of(kernel: Kernel) -> int:
    """Indices a kernel reads lie below this: rows of a table, or classes."""
    first = kernel.operands[0].shape if kernel.operands else ()
    if "embedding" in kernel.target:
        return int(first[0])
    return int(first[1]) if "loss" in kernel.target and len(first) > 1 else 1


def made(spec: TensorSpec, limit: int, device: torch.device) -> Tensor:
    """Numbers of a shape: small positive ones for floats, indices below a limit for integers."""
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.rand(spec.shape, device=device, dtype=dtype).add_(0.1)
    return torch.randint(limit, spec.shape, device=device).to(dtype)
