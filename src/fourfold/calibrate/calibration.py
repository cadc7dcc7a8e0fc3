"""This machine, or the cluster torchrun started us on, measured: a `Cluster` with curves of every collective.

Ranks are told apart by host; those of one host are a node. Each collective is timed in groups that lie within a node and in
groups that reach across, for every group size that divides the ranks, one group alone and all such groups at once. What the
ranks do for it is in `collectives`; for kernels, where they are wanted, in `kernels`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourfold.calibrate.collective_calls import CurveRequest
from fourfold.calibrate.collectives import FULL, Effort, TimedCurve, measure_rates, time_collective, time_waits
from fourfold.calibrate.kernels import KernelTimings, Sample
from fourfold.calibrate.machine_speed import load_pace, measure_speed, save_pace, speed_exponent
from fourfold.calibrate.node_runs import node_run
from fourfold.calibrate.robust_stats import interquartile_mean, interquartile_range, strays
from fourfold.cluster import Cluster, Collective, Curve, Link, Measured, Sources, Waits, local
from fourfold.cluster.local import usable_cores
from fourfold.optimizers import OPTIMIZERS
from fourfold.oracle.prices.prices import KernelTime
from fourfold.plans.layout.mesh import divisors
from fourfold.runtime.comm.shared.memory import host_of_this_process
from fourfold.runtime.execution.precision import PRECISIONS
from fourfold.runtime.rank_pool import RankPool, is_leader

LOOPBACK = "loopback"
LEAST = 1e-6  # seconds: what a collective costs at least
NEAR = 1.05  # a pace that much beside what the machine does now is kept: times compare only at one
AT_ONCE = 16  # kernels timed between two signs of progress
WAITING: Collective = "all_gather"  # the exchange that shows what long computing before it does
SENT = Sources(whole="calibration, from sends between two ranks")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A cluster and kernels as far as they are measured, and what comes next."""

    cluster: Cluster
    kernels: Mapping[str, KernelTime]
    done: int
    of: int
    next: str


def calibrated(
    ranks: RankPool,
    *,
    name: str = "calibrated",
    effort: Effort = FULL,
    kernels: Sequence[Sample] = (),
    precision: str = "fp32",
) -> Iterator[Progress]:
    """Clusters of ever more measurements, the last complete; an interrupted calibration leaves the one before. Kernels are
    gone through in the same rounds, so that every number is taken at moments that lie far apart."""
    hosts = ranks(host_of_this_process)
    wanted, timing = requests(hosts), KernelTimings(kernels, PRECISIONS[precision])
    told = f"{len(set(hosts))} host{'s' if len(set(hosts)) > 1 else ''}, {ranks.count} ranks; measured"
    so_far = _Measurements(replace(_described(hosts, name), about=told), ranks.count, ranks(load_pace)[0])
    done, of = 0, effort.rounds * (1 + len(wanted) + len(_parts(timing.wanted)))

    def progress(words: str) -> Progress:
        cluster = so_far.cluster() if so_far.facts else so_far.base
        return Progress(cluster=cluster, kernels=timing.times(cluster.kinds[0].pace), done=done, of=of, next=words)

    for number in range(effort.most):
        every = number < effort.rounds
        again = [(request, effort.sizes) for request in wanted] if every else so_far.uncertain()
        unsure = timing.wanted if every else timing.uncertain(so_far.pace)
        if not again and not unsure:
            break
        of = max(of, done + 1 + len(again) + len(_parts(unsure)))
        yield progress("rates of one rank while all are busy")
        so_far.next_round(ranks(measure_speed)[0], ranks(measure_rates))
        done += 1
        for request, sizes in again:
            count, size = len(request.groups), len(request.groups[0])
            yield progress(f"{request.collective} in {count} x {size} ranks over {request.level}")
            pace = ranks(measure_speed)[0]
            so_far.add(request, pace, ranks(time_collective, request, sizes)[request.groups[0][0]])
            if request.collective == WAITING and request.crowd > 1 and every:
                so_far.add_waits(request, ranks(measure_speed)[0], ranks(time_waits, request)[request.groups[0][0]])
            done += 1
        for k, part in enumerate(_parts(unsure)):
            yield progress(f"kernel {k * AT_ONCE + 1} of {len(unsure)}")
            timing.time_round(ranks, part, alone=every)
            done += 1
    if is_leader():
        save_pace(_rounded(so_far.pace))
    done = of
    yield progress("")


def _parts(kernels: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Kernels, some at once."""
    return [kernels[k : k + AT_ONCE] for k in range(0, len(kernels), AT_ONCE)]


class _Measurements:
    """The measurements of a calibration so far. Times are normalised to one pace of the machine (`calibrate.machine_speed`)."""

    def __init__(self, base: Cluster, ranks: int, before: float) -> None:
        self.base, self.ranks, self.before = base, ranks, before
        self.facts: list[tuple[float, dict[str, float]]] = []  # with the pace of the moment, as all that follow
        self.blocks: dict[CurveRequest, dict[float, list[tuple[float, float]]]] = {}
        self.stretches: dict[CurveRequest, list[tuple[float, list[tuple[float, float]]]]] = {}
        self.computing: list[list[float]] = []  # by round
        self.paces: list[float] = []

    def next_round(self, pace: float, facts: list[dict[str, float]]) -> None:
        self.paces.append(pace)
        self.facts += [(pace, fact) for fact in facts]
        self.computing.append([])

    def add(self, request: CurveRequest, pace: float, found: TimedCurve) -> None:
        """One more round of a curve."""
        self.paces.append(pace)
        known = self.blocks.setdefault(request, {})
        for size, seconds in found.points:
            known.setdefault(size, []).append((pace, seconds))
        if sum(map(len, request.groups)) == self.ranks:
            self.computing[-1] += found.computing

    def add_waits(self, request: CurveRequest, pace: float, found: list[tuple[float, float]]) -> None:
        """One more round of an exchange after ever more computing."""
        self.stretches.setdefault(request, []).append((pace, found))

    @property
    def pace(self) -> float:
        """That of earlier calibrations, while the machine still comes near it and is about as slow half of the time; else that
        of its better moments, a quarter of all."""
        ordered = sorted(self.paces)
        still = ordered[0] <= NEAR * self.before and self.before <= NEAR * ordered[len(ordered) // 2]
        return self.before if still else ordered[len(ordered) // 4]

    def cluster(self) -> Cluster:
        """The cluster as far as it is known."""
        device = self.base.kinds[0]
        facts = [_at(fact, self.pace / pace) for pace, fact in self.facts]
        device = replace(device, **_device_facts(facts, device.cores, self.ranks), pace=_rounded(self.pace))
        whole = [times for times in self.computing if 2 * len(times) > len(self.computing[0])]  # later rounds are short
        rounds = [statistics.mean(times) for times in whole]  # steps even out shorter moments
        if rounds:
            device = replace(device, drift=_rounded(drift(rounds)))
        curves = tuple(self._curve(request) for request, found in self.blocks.items() if found)
        links = tuple(linked(link, [c for c in curves if c.level == link.name]) for link in self.base.links)
        waits = tuple(self._waits(request) for request in self.stretches)
        return replace(self.base, kinds=(device,), links=links, measured=Measured(curves=curves, waits=waits))

    def uncertain(self) -> list[tuple[CurveRequest, tuple[float, ...]]]:
        """Curves with a time that is not known yet, and their sizes up to the last such."""
        out = []
        for request in self.blocks:
            told = self._told(request)
            stray = [size for size, times in told.items() if strays(times)]
            if stray:
                out.append((request, tuple(size for size in told if size <= stray[-1])))
        return out

    def _told(self, request: CurveRequest) -> dict[float, list[float]]:
        """By size, the times of a collective at the pace."""
        found = self.blocks[request].items()
        return {size: [seconds * self._speed(request, pace) for pace, seconds in times] for size, times in found}

    def _speed(self, request: CurveRequest, pace: float) -> float:
        """What makes a time of a moment one at the pace: cores carry exchanges within a host; a wire keeps its own pace."""
        return (self.pace / pace) ** (speed_exponent() if request.level == LOOPBACK else 0.0)

    def _waits(self, request: CurveRequest) -> Waits:
        rounds = [
            [
                (busy * (self.pace / pace) ** speed_exponent(1.0), seconds * self._speed(request, pace))
                for busy, seconds in found
            ]
            for pace, found in self.stretches[request]
        ]
        computing, seconds = zip(
            *(map(interquartile_mean, zip(*points, strict=True)) for points in zip(*rounds, strict=True)), strict=True
        )
        return Waits(
            level=request.level,
            ranks=len(request.groups[0]),
            groups=len(request.groups),
            computing=tuple(_rounded(one) for one in computing),
            seconds=tuple(_rounded(max(one, LEAST)) for one in seconds),
            source=f"calibration, middle of {len(rounds)} rounds, torch {torch.__version__}",
        )

    def _curve(self, request: CurveRequest) -> Curve:
        told = self._told(request)
        points = [(max(interquartile_mean(times), LEAST), interquartile_range(times)) for times in told.values()]
        counts = [len(times) for times in told.values()]
        rounds = " to ".join(map(str, dict.fromkeys((min(counts), max(counts)))))
        return Curve(
            collective=request.collective,
            level=request.level,
            ranks=len(request.groups[0]),
            groups=len(request.groups),
            sizes=tuple(told),
            seconds=tuple(_rounded(seconds) for seconds, _ in points),
            spreads=tuple(_rounded(spread) for _, spread in points),
            source=f"calibration, middle of {rounds} rounds, torch {torch.__version__}",
        )


def _at(fact: Mapping[str, float], longer: float) -> dict[str, float]:
    """Rates at a pace that takes longer by a factor; of them `launch` alone is a time, `rate` alone that of arithmetic."""
    return {
        name: value * longer ** (speed_exponent() if name == "launch" else -speed_exponent(float(name == "rate")))
        for name, value in fact.items()
    }


def linked(link: Link, curves: list[Curve]) -> Link:
    """A link with the latency and bandwidth that sends over it had."""
    sends = [curve for curve in curves if curve.collective == "send"]
    if not sends:
        return link
    sizes, seconds = sends[-1].sizes, sends[-1].seconds
    longer = seconds[-1] - seconds[0]
    speed = (sizes[-1] - sizes[0]) / longer if longer > 0 else sizes[-1] / seconds[-1]
    return replace(link, latency=seconds[0], bandwidth=_rounded(speed), sources=SENT)


def requests(hosts: list[str], *, within: str = LOOPBACK, across: str = "network", shared: bool = True) -> list[CurveRequest]:
    """The curves that plans on these ranks may ask for. `within`, `across`: the links of a host and between hosts; `shared`:
    whether the ranks of a host can share memory."""
    out = []
    count = len(hosts)
    for size in divisors(count)[1:]:
        adjacent = tuple(tuple(range(k, k + size)) for k in range(0, count, size))
        strided = tuple(tuple(range(k, count, count // size)) for k in range(count // size))
        for groups in dict.fromkeys((adjacent, strided, adjacent[:1], strided[:1])):
            inside = all(len({hosts[rank] for rank in group}) == 1 for group in groups)
            kinds: list[Collective] = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
            kinds += ["send"] if size == 2 else []
            kinds += ["shared_gather", "shared_sum", "shared_fetch", "shared_give"] if inside and shared else []
            level = within if inside else across
            busy = Counter(hosts[rank] for group in groups for rank in group)
            crowd = max(1.0, max(busy.values()) / usable_cores())
            out += [CurveRequest(collective=kind, groups=groups, level=level, crowd=crowd) for kind in kinds]
    unique = {(r.collective, r.level, len(r.groups[0]), len(r.groups)): r for r in reversed(out)}
    return list(reversed(unique.values()))


def _described(hosts: list[str], name: str) -> Cluster:
    """The ranks as a cluster nobody has measured yet."""
    base, run = local(len(hosts)), node_run(hosts, device="cpu")
    if run.count == 1:
        return replace(base, name=name)
    network = Link(name="network", latency=1e-4, bandwidth=1e8, sources=Sources(whole="assumed, not calibrated"))
    return replace(base, name=name, nodes=(run,), links=(*base.links, network))


def drift(computing: list[float]) -> float:
    """How far the same computing strays while all ranks compute: half the distance between its tenth and its ninetieth
    hundredth, relative to the middle."""
    ordered = sorted(computing)
    tenth = len(ordered) // 10
    return (ordered[-1 - tenth] - ordered[tenth]) / 2 / statistics.median(ordered)


def _rounded(number: float) -> float:
    """Four digits: more would pretend to a precision no measurement has."""
    return float(f"{number:.4g}")


def _device_facts(facts: list[dict[str, float]], cores: int, ranks: int) -> dict[str, Any]:
    """The device's fields from what its ranks reached; a shared processor's are those of all its cores."""
    medians = {key: _rounded(statistics.median(fact[key] for fact in facts)) for key in facts[0]}
    rate, crowd = medians["rate"] * cores, max(1.0, ranks / max(cores, 1))
    return {
        "rates": (("fp64", crowd * rate / 2), ("fp32", crowd * rate), ("bf16", crowd * rate)),
        "bandwidth": crowd * medians["bandwidth"] * cores,
        "launch": medians["launch"] / crowd,
        "updates": tuple((name, crowd * medians[f"update_{name}"]) for name in OPTIMIZERS),
        "sources": Sources(whole="calibration, all ranks busy", single=(("rate_fp64", "half of fp32"),)),
    }
