"""One rank's share of a split step, alone on one GPU: measured seconds and peak memory against the predicted.

`python benchmarks/gpu_shares.py [NAME ...] [--out FILE]`. A machine with one GPU cannot run four ranks side by side at their
speed, but it can run what one of them computes: this process is a rank of the mesh whose collectives are copies of the right
shapes (an all-reduce leaves the tensor as it is). The prediction has the kernels of the share timed on the same GPU by
`fourfold.calibrate`, links that cost nothing, and those copies. Cells that FILE has already are not run again.
`--device cpu --small` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.calibrate.gpu_machine import GpuFacts, copy_rate, gpu_cluster, measure_gpu, release
from fourfold.calibrate.gpu_prices import gradient_kernels, time_all
from fourfold.calibrate.kernels import samples_of
from fourfold.cluster import Cluster, Link
from fourfold.errors import Error
from fourfold.graph.spec import computed_as
from fourfold.oracle.memory.peak import CPU, CUDA, memory
from fourfold.oracle.predict import Prediction, predict
from fourfold.oracle.prices.prices import KernelTime, Prices
from fourfold.oracle.time import stage as stage_times
from fourfold.plans import LoweredPlan, Mesh
from fourfold.plans.lists.paths import Paths
from fourfold.plans.lists.rank_classes import rank_classes
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.policy import DEFAULT
from fourfold.runs.initial_tensors import ModuleSource
from fourfold.runs.measured_memory import measured_peak
from fourfold.runs.parallel import Parallel
from fourfold.runtime.comm import gloo_p2p
from fourfold.runtime.comm import world as world_module
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution import runner as runner_module
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.execution.precision import lower_for_precision, matrix_mode
from fourfold.runtime.host.devices import RankDevices, own_device
from fourfold.workload.workload import Workload, load_workload

RANKS = 4
MODELS = {"unet3d": "unet3d,size=64,width=16,batch=4", "resnet50": "resnet50,image=224,batch=64"}
SMALL = {"unet3d": "unet3d,size=16,width=2,batch=4", "resnet50": "resnet50,batch=4,image=64,width=16,classes=10"}
STRATEGIES = ("data", "spatial", "filter")
PRECISIONS = ("bf16", "fp32")
CLASSES = 2  # at most so many kinds of ranks of a plan: at the border, and inside
WARM, STEPS = 4, 12
OPTIMIZER = "sgd"
FREE = Link(name="free", nodes=1, latency=0.0, bandwidth=1e18)
WANTED = {"seconds": 0.05, "peak": 0.02}


class Copies:
    """Collectives of a rank that is alone: each gives a result of the right shape made of the rank's own numbers. `bytes`:
    read and written by them."""

    def __init__(self) -> None:
        self.bytes = 0

    def wait(self) -> None:
        """Every copy is complete at once, as far as the host can see."""

    def all_reduce(self, tensor: Tensor, *args: Any, **options: Any) -> Copies:
        if not options.get("async_op"):  # `World.all_reduce` has copied it; buckets of gradients are summed in place
            self.bytes += 2 * tensor.nbytes
        return self

    def all_to_all(
        self, received: Tensor, packed: Tensor, receives: Any, sends: Any, group: Any, *, direct: bool = False
    ) -> Copies:
        if not packed.numel():
            received.zero_()
            self.bytes += received.nbytes
            return self
        for start in range(0, received.numel(), packed.numel()):
            part = received[start : start + packed.numel()]
            self._copy(part, packed[: part.numel()])
        return self

    def all_gather(self, rows: Tensor, row: Tensor, group: Any, *, direct: bool = False) -> Copies:
        return self.all_gather_single(rows.view(-1), row)

    def all_gather_single(self, rows: Tensor, row: Tensor, **options: Any) -> Copies:
        self._copy(rows.view(-1, row.numel()), row)
        return self

    def reduce_scatter(self, out: Tensor, rows: Tensor, group: Any, *, direct: bool = False) -> None:
        self._copy(out.view(-1), rows.reshape(-1)[: out.numel()])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self.bytes += target.nbytes + source.nbytes


def placement(ranks: int) -> Placement:
    """As of so many GPUs of a host, wherever this runs."""
    return Placement(hosts=(0,) * ranks, devices=("gpu",) * ranks)


class LoneWorld(World):
    """A rank of a mesh without the others."""

    def group(self, axes: tuple[str, ...], purpose: str = "inline") -> Any:
        return None


@contextmanager
def alone(rank: int, ranks: int) -> Iterator[Copies]:
    """Inside, this process is a rank of a mesh whose other ranks are not there."""

    def of_all_ranks(mesh: Mesh, device: torch.device) -> World:
        paths = Paths(mesh, tuple(range(mesh.size)), placement(mesh.size), DEFAULT)
        return LoneWorld(mesh, rank=rank, device=device, paths=paths)

    copies = Copies()
    with ExitStack() as stack:
        for owner, name, value in (
            (World, "of_all_ranks", staticmethod(of_all_ranks)),
            (runner_module, "running_placement", lambda device, count: placement(count)),
            (dist, "all_reduce", copies.all_reduce),
            (world_module, "all_gather_single", copies.all_gather_single),
            (gloo_p2p, "all_gather", copies.all_gather),
            (gloo_p2p, "all_to_all", copies.all_to_all),
            (gloo_p2p, "reduce_scatter", copies.reduce_scatter),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield copies


@dataclass(frozen=True, kw_only=True)
class Measured:
    seconds: float
    host: float  # until the host has launched a step
    spread: float  # between quartiles, relative
    peak: int
    copied: int  # bytes, by the collectives of a step


def measure_share(workload: Workload, strategy: str, rank: int, precision: str, device: torch.device) -> Measured:
    """The share of a rank, run."""
    torch.manual_seed(0)
    example = workload.example
    elsewhere = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # by what was measured before
    with alone(rank, RANKS) as copies, matrix_mode(precision):
        run = Parallel(
            ModuleSource(example.module, example.loss),
            workload.plan(strategy, ranks=RANKS),
            workload.graph,
            optimizer=lambda named: optimizer_named(OPTIMIZER)([tensor for _, tensor in named]),
            device=device,
            precision=precision,
        )
        parts = run.local(*example.tensors)

        def step() -> None:
            run.step(*parts)

        for _ in range(WARM):
            step()
        before = copies.bytes
        step()
        copied = copies.bytes - before
        times, host = sorted(step_seconds(step, device)), launch_seconds(step, device)
        _, peak = measured_peak(step, held=lambda: [*parts, *run.runner.persistent_tensors()], device=device)
    quarter, middle = len(times) // 4, statistics.median(times)
    spread = (times[-1 - quarter] - times[quarter]) / middle
    return Measured(seconds=middle, host=host, spread=spread, peak=peak - elsewhere, copied=copied)


def step_seconds(step: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds from the end of each step to the end of the next, while the host runs ahead."""
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(STEPS):
            step()
            marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    torch.cuda.synchronize()
    step()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def launch_seconds(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of the host for a step that begins with an empty queue."""
    if device.type == "cpu":
        return 0.0
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return min(times)


class Predictor:
    """Predicts shares; each kernel is timed once, for all of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.facts: GpuFacts = measure_gpu(device.type)
        self.copy_rate = copy_rate(device)
        self.kernels: dict[str, dict[str, KernelTime]] = {}

    def cluster(self) -> Cluster:
        """Ranks with a GPU each, and exchanges that cost nothing."""
        found = gpu_cluster("alone", ["here"] * RANKS, self.facts, RankDevices(kind="cuda", gpus=RANKS))
        return replace(found, links=(FREE,))

    def predict(self, lowered: LoweredPlan, rank: int, precision: Any) -> Prediction:
        """The step as if all ranks were like this one."""
        known = self.kernels.setdefault(precision, {})
        dtypes = computed_as(precision)
        sums = [kernel for kernel in gradient_kernels([lowered], dtypes) if kernel.key not in known]
        times, failed = time_all([*samples_of([lowered], dtypes, known).values(), *sums], precision, self.device)
        known.update(times)
        for key, why in failed.items():
            print(f"  not timed: {key[:80]}: {why}", flush=True)
        like = [[rank, *(other for other in range(RANKS) if other != rank)]]
        prices = Prices(cluster=self.cluster(), precision=precision, kernels=known)
        with patch.object(stage_times, "rank_classes", lambda mesh, programs: like):
            return predict(lowered, prices, optimizer=OPTIMIZER)


def compared(workload: Workload, strategy: str, rank: int, precision: str, predictor: Predictor) -> dict[str, Any]:
    """A share predicted and measured."""
    device = predictor.device
    lowered = lower_for_precision(workload.graph, workload.plan(strategy, ranks=RANKS), precision=precision, device=device.type)
    found = predictor.predict(lowered, rank, precision)
    release(device)
    measured = measure_share(workload, strategy, rank, precision, device)
    release(device)
    copying = measured.copied / predictor.copy_rate
    machine = CPU if device.type == "cpu" else CUDA
    expected = memory(lowered, placement(RANKS), optimizer=OPTIMIZER, machine=machine, precision=precision)
    seconds, peak = found.step_seconds + copying, expected.of(rank)
    return {
        "predicted_seconds": seconds,
        "measured_seconds": measured.seconds,
        "spread": measured.spread,
        "seconds_error": seconds / measured.seconds - 1,
        "predicted_peak": peak.bytes,
        "measured_peak": measured.peak,
        "peak_error": peak.bytes / measured.peak - 1,
        "copying_seconds": copying,
        "breakdown": dict(found.breakdown),
        "predicted_host_seconds": host_seconds(found),
        "measured_host_seconds": measured.host,
        "known_from": dict(found.known_from),
        "peak_at": f"{peak.action} {peak.op}",
        "peak_parts": dict(peak.parts),
    }


def host_seconds(found: Prediction) -> float:
    """Seconds the host needs to launch the kernels of a step."""
    return sum(item.host_seconds for (_, kind), items in found.estimate.items.items() if kind in "FB" for item in items)


def share_ranks(workload: Workload, strategy: str) -> list[int]:
    """A rank of each kind that the plan has."""
    lowered = lower_for_precision(workload.graph, workload.plan(strategy, ranks=RANKS), precision="fp32", device="cuda")
    (part,) = lowered.parts
    classes = rank_classes(part.program.mesh, [part.program])
    return [members[0] for members in classes][:CLASSES]


def row(key: str, one: dict[str, Any]) -> str:
    times = "{:9.3f} / {:9.3f} ms {:+6.1%}".format(
        1e3 * one["predicted_seconds"], 1e3 * one["measured_seconds"], one["seconds_error"]
    )
    peaks = "{:8.1f} / {:8.1f} MB {:+6.1%}".format(one["predicted_peak"] / 1e6, one["measured_peak"] / 1e6, one["peak_error"])
    host = "host {:7.3f} / {:7.3f} ms".format(1e3 * one["predicted_host_seconds"], 1e3 * one["measured_host_seconds"])
    return f"{key:30} {times}   {peaks}   {host}"


def summary(found: dict[str, Any]) -> str:
    """How many cells are within what is wanted."""
    good = {name: sum(abs(one[f"{name}_error"]) <= most for one in found.values()) for name, most in WANTED.items()}
    parts = (f"{name} within {most:.0%} in {good[name]} of {len(found)}" for name, most in WANTED.items())
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; by default all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_shares.json"))
    parser.add_argument(
        "--precision", action="append", help="bf16, fp32, tf32 or fp64, several times; by default bf16 and fp32"
    )
    parser.add_argument("--strategy", action="append", help=f"by default {', '.join(STRATEGIES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--minutes", type=float, default=4.0, help="no cell is begun after so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    end, texts = time.monotonic() + 60 * options.minutes, SMALL if options.small else MODELS
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    predictor = Predictor(own_device(options.device))
    print(f"{predictor.facts.name}; predicted / measured of one rank of {RANKS}", flush=True)
    for name in options.names or texts:
        workload = load_workload(texts[name])
        for strategy in options.strategy or STRATEGIES:
            for rank in share_ranks(workload, strategy):
                for precision in options.precision or PRECISIONS:
                    key = f"{texts[name].partition(',')[0]} {strategy} rank {rank} {precision}"
                    if key in found or time.monotonic() > end:
                        continue
                    try:
                        one = compared(workload, strategy, rank, precision, predictor)
                    except (RuntimeError, Error) as error:
                        print(f"{key:30} {type(error).__name__}: {str(error).partition(chr(10))[0][:150]}", flush=True)
                        continue
                    found[key] = {"device": predictor.facts.name, "torch": torch.__version__, **one}
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(found, indent=1))
                    print(row(key, found[key]), flush=True)
    print(summary(found))


if __name__ == "__main__":
    main()
