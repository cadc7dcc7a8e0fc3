"""This machine, or the cluster torchrun started us on, measured: a `Cluster` with curves of every collective.

Ranks are told apart by host; those of one host are a node. Each collective is timed in groups that lie within a node and in
groups that reach across, for every group size that divides the ranks, one group alone and all such groups at once.

Between computing, a collective costs more than over and over: ranks come to it at different times, threads sleep and must be
woken. So each repetition computes for a moment first. What counts is the time from coming to it until it is done, on the
average rank: waiting for the later ones is part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fourfold.cluster import Cluster, Collective, Curve, Link, Measured, Nodes, Sources, local
from fourfold.cluster.parts import OPTIMIZERS
from fourfold.errors import InvalidInput
from fourfold.gauge.middle import apart, middle
from fourfold.gauge.pace import pace_now
from fourfold.plans.mesh import Mesh
from fourfold.runtime.board import CAPACITY, Board, host_of_this_process
from fourfold.runtime.crew import Crew
from fourfold.runtime.shared_sum import SharedSums
from fourfold.runtime.trial import optimizer_named
from fourfold.runtime.world import World, all_gather_single, reduce_scatter_single

LOOPBACK = "loopback"
REPEATS = 32
LEAST_REPEATS = 2
BLOCK_SECONDS = 0.15  # a block of what takes long lasts about so long
LEAST_SECONDS = 0.1
LEAST = 1e-6  # seconds: what a collective costs at least
OUTLIERS = 10  # of so many repetitions, one is left out
STRETCH = 4e-3  # seconds of computing before each repetition: about what lies between two exchanges of small networks
UPDATED = 4 * 2**20  # elements of the parameters whose update is timed
MATRIX = 512  # size of the product that gives the rate
SENT = Sources(whole="calibration, from sends between two ranks")
COPIED = 16 * 2**20  # bytes copied for the bandwidth: more than a cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: which sizes, and how many times everything. Machines have bad moments of seconds and of minutes, so
    that each number is taken at moments far apart."""

    sizes: tuple[float, ...] = (2.0**10, 2.0**16, 2.0**20, 2.0**23, 2.0**26)  # bytes: between them times are nearly straight
    rounds: int = 6


FULL = Effort()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One curve to measure: the groups that communicate at once."""

    collective: Collective
    groups: tuple[tuple[int, ...], ...]
    level: str
    effort: Effort


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A cluster as far as it is measured, and what comes next."""

    cluster: Cluster
    done: int
    of: int
    next: str


def calibrated(ranks: Crew, *, name: str = "calibrated", effort: Effort = FULL) -> Iterator[Progress]:
    """Clusters of ever more measurements, the last complete; an interrupted calibration leaves the one before."""
    hosts = ranks(host_of_this_process)
    wanted = requests(hosts, effort)
    told = f"{len(set(hosts))} host{'s' if len(set(hosts)) > 1 else ''}, {ranks.count} ranks; measured"
    so_far = _SoFar(replace(_described(hosts, name), about=told), ranks.count)
    done, of = 0, effort.rounds * (1 + len(wanted))
    cluster = so_far.base
    for _ in range(effort.rounds):
        yield Progress(cluster=cluster, done=done, of=of, next="rates of one rank while all are busy")
        so_far.next_round(ranks(pace_now)[0], ranks(rates))
        for request in wanted:
            done, cluster = done + 1, so_far.cluster()
            words = f"{request.collective} in {len(request.groups)} x {len(request.groups[0])} ranks over {request.level}"
            yield Progress(cluster=cluster, done=done, of=of, next=words)
            pace = ranks(pace_now)[0]
            so_far.add(request, pace, ranks(measured, request)[request.groups[0][0]])
        done, cluster = done + 1, so_far.cluster()
    yield Progress(cluster=cluster, done=of, of=of, next="")


class _SoFar:
    """What a calibration has found until now. Times are told at the pace of the machine's better moments, a quarter of all:
    each is multiplied by that over the pace of its own moment (`gauge.pace`)."""

    def __init__(self, base: Cluster, ranks: int) -> None:
        self.base, self.ranks = base, ranks
        self.facts: list[tuple[float, dict[str, float]]] = []  # with the pace of the moment, as all that follow
        self.blocks: dict[Request, dict[float, list[tuple[float, float]]]] = {}
        self.computing: list[list[float]] = []  # by round
        self.paces: list[float] = []

    def next_round(self, pace: float, facts: list[dict[str, float]]) -> None:
        self.paces.append(pace)
        self.facts += [(pace, fact) for fact in facts]
        self.computing.append([])

    def add(self, request: Request, pace: float, found: Found) -> None:
        """One more round of a curve."""
        self.paces.append(pace)
        known = self.blocks.setdefault(request, {})
        for size, seconds in found.points:
            known.setdefault(size, []).append((pace, seconds))
        if sum(map(len, request.groups)) == self.ranks:
            self.computing[-1] += found.computing

    @property
    def pace(self) -> float:
        return sorted(self.paces)[len(self.paces) // 4]

    def cluster(self) -> Cluster:
        """The cluster as far as it is known."""
        device = self.base.kinds[0]
        facts = [_faster(fact, pace / self.pace) for pace, fact in self.facts]
        device = replace(device, **_device_facts(facts, device.cores, self.ranks), pace=_rounded(self.pace))
        rounds = [statistics.mean(times) for times in self.computing if times]  # steps even out shorter moments
        if rounds:
            device = replace(device, drift=_rounded(drift(rounds)))
        curves = tuple(self._curve(request, found) for request, found in self.blocks.items())
        links = tuple(_linked(link, [c for c in curves if c.level == link.name]) for link in self.base.links)
        return replace(self.base, kinds=(device,), links=links, measured=Measured(curves=curves))

    def _curve(self, request: Request, found: Mapping[float, list[tuple[float, float]]]) -> Curve:
        near = request.level == LOOPBACK  # cores carry these; a wire keeps its own pace
        told = [[seconds * (self.pace / pace if near else 1.0) for pace, seconds in times] for times in found.values()]
        points = [(max(middle(times), LEAST), apart(times)) for times in told]
        return Curve(
            collective=request.collective,
            level=request.level,
            ranks=len(request.groups[0]),
            groups=len(request.groups),
            sizes=tuple(found),
            seconds=tuple(_rounded(seconds) for seconds, _ in points),
            spreads=tuple(_rounded(spread) for _, spread in points),
            source=f"calibration, middle of {len(next(iter(found.values())))} rounds, torch {torch.__version__}",
        )


def _faster(fact: Mapping[str, float], factor: float) -> dict[str, float]:
    """Rates at a pace faster by a factor; of them `launch` alone is a time."""
    return {name: value / factor if name == "launch" else value * factor for name, value in fact.items()}


def _linked(link: Link, curves: list[Curve]) -> Link:
    """A link with the latency and bandwidth that sends over it had."""
    sends = [curve for curve in curves if curve.collective == "send"]
    if not sends:
        return link
    sizes, seconds = sends[-1].sizes, sends[-1].seconds
    speed = (sizes[-1] - sizes[0]) / max(seconds[-1] - seconds[0], 1e-9)
    return replace(link, latency=seconds[0], bandwidth=_rounded(speed), sources=SENT)


def requests(hosts: list[str], effort: Effort = FULL) -> list[Request]:
    """The curves that plans on these ranks may ask for."""
    out = []
    count = len(hosts)
    for size in [n for n in range(2, count + 1) if count % n == 0]:
        near = tuple(tuple(range(k, k + size)) for k in range(0, count, size))
        far = tuple(tuple(range(k, count, count // size)) for k in range(count // size))
        for groups in dict.fromkeys((near, far, near[:1], far[:1])):
            inside = all(len({hosts[rank] for rank in group}) == 1 for group in groups)
            kinds: list[Collective] = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
            kinds += ["send"] if size == 2 else []
            kinds += ["shared_gather", "shared_sum"] if inside else []
            level = LOOPBACK if inside else "network"
            out += [Request(collective=kind, groups=groups, level=level, effort=effort) for kind in kinds]
    unique = {(r.collective, r.level, len(r.groups[0]), len(r.groups)): r for r in reversed(out)}
    return list(reversed(unique.values()))


def _described(hosts: list[str], name: str) -> Cluster:
    """The ranks as a cluster nobody has measured yet."""
    nodes = list(dict.fromkeys(hosts))
    base = local(len(hosts))
    if len(nodes) == 1:
        return replace(base, name=name)
    counts = sorted({hosts.count(host) for host in nodes})
    if len(counts) > 1 or hosts != sorted(hosts, key=nodes.index):
        raise InvalidInput(f"{len(nodes)} hosts with {' and '.join(map(str, counts))} ranks, not equally many one after the "
                           "other; start as many on each")  # fmt: skip
    run = Nodes(count=len(nodes), device="cpu", devices=counts[0], sources=Sources(whole="found by calibration"))
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


# --- on the ranks ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A curve's points (bytes, seconds), and how long the same computing took each time, in a unit of its own."""

    points: tuple[tuple[float, float], ...]
    computing: tuple[float, ...]


def measured(request: Request) -> Found:
    """A collective at every size once; all ranks of the process group must call."""
    mine = next((group for group in request.groups if dist.get_rank() in group), None)
    made = {group: dist.new_group(list(group)) for group in request.groups}
    group = made[mine] if mine is not None else None
    stretch, run = _Stretch(mine is not None), _collectives(request, mine, group)
    sizes = [size for size in request.effort.sizes if request.collective != "shared_gather" or size <= CAPACITY]
    blocks = {}
    for size in sizes:
        once = run(int(size))
        blocks[size] = _block(once, stretch, group, _repeats(once))
    if group is not None:
        dist.destroy_process_group(group)
    there = 0.5 if request.collective == "send" else 1.0
    long = [block for block in blocks.values() if block.repeats == REPEATS]  # short ones begin unevenly
    return Found(
        points=tuple((size, there * block.seconds) for size, block in blocks.items()),
        computing=tuple(block.computing / max(stretch.times, 1) for block in long),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Seconds of a collective, and of the computing before it."""

    seconds: float
    computing: float
    repeats: int


def _repeats(once: Callable[[], Any]) -> int:
    """How many repetitions make a block, the same on all ranks: few of what takes long."""
    once()
    dist.barrier()
    begun = time.perf_counter()
    once()
    spent = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return max(LEAST_REPEATS, min(REPEATS, round(BLOCK_SECONDS / float(spent))))


def _block(once: Callable[[], Any], stretch: _Stretch, group: Any, repeats: int) -> _Block:
    """Computing and the collective, several times: the mean over all ranks that take part, without the longest few."""
    dist.barrier()
    spent, computing = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        stretch()
        came = time.perf_counter()
        once()
        spent.append(time.perf_counter() - came)
        computing.append(came - begun)
    busy = float(group is not None)
    sums = busy * torch.tensor([*spent, *computing, 1.0], dtype=torch.float64)
    dist.all_reduce(sums)
    shared = (sums[:-1] / sums[-1]).tolist()
    return _Block(_mean(shared[:repeats]), statistics.mean(shared[repeats:]), repeats)


def _mean(times: list[float]) -> float:
    """Without the longest few. No median: where ranks take turns on cores, half of the times may be short and half long, and
    what counts is their sum."""
    return statistics.mean(sorted(times)[: len(times) - len(times) // OUTLIERS])


class _Stretch:
    """A moment of computing on those ranks that communicate, equally much on each; all ranks must make one."""

    def __init__(self, busy: bool) -> None:
        self.matrix, self.times = torch.rand(MATRIX // 2, MATRIX // 2), 1
        start = time.perf_counter()
        for _ in range(REPEATS):
            self()
        times = torch.tensor([STRETCH * REPEATS / (time.perf_counter() - start)])
        dist.broadcast(times, 0)
        self.times = max(1, round(times.item())) if busy else 0

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix)


def _collectives(request: Request, mine: tuple[int, ...] | None, group: Any) -> Callable[[int], Callable[[], Any]]:
    """For a size in bytes, a function that does the collective once; ranks outside all groups do nothing."""
    if mine is None:
        return lambda size: lambda: None
    count, kind = len(mine), request.collective
    if kind in ("shared_gather", "shared_sum"):
        return _shared(kind, group, mine)

    def run(size: int) -> Callable[[], Any]:
        n = max(size // 4, 1)
        one, all_of = torch.zeros(n), torch.zeros(n * count)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(one, group=group)
        if kind == "all_gather":
            return lambda: all_gather_single(all_of, one, group=group)
        if kind == "reduce_scatter":
            return lambda: reduce_scatter_single(one, all_of, group=group)
        if kind == "all_to_all":
            n = max(n // (count - 1), 1) * count
            return lambda: dist.all_to_all_single(torch.empty(n), torch.zeros(n), group=group)
        return lambda: _ping(one, mine)  # there and back: `measured` halves it

    return run


def _ping(tensor: torch.Tensor, pair: tuple[int, ...]) -> None:
    """A message from the first to the second and back."""
    mine, other = (pair[0], pair[1]) if dist.get_rank() == pair[0] else (pair[1], pair[0])
    if mine == pair[0]:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    else:
        dist.recv(tensor, other)
        dist.send(tensor, other)


def _shared(kind: str, group: Any, mine: tuple[int, ...]) -> Callable[[int], Callable[[], Any]]:
    if kind == "shared_gather":
        board = Board.open(group, 60.0)
        return lambda size: (lambda: board.gather(torch.zeros(max(size // 4, 1)))) if board is not None else (lambda: None)
    mesh = Mesh.of(data=len(mine))
    world = World(mesh, rank=mine.index(dist.get_rank()), device=torch.device("cpu"), ranks=mine)
    world._groups["inline", ("data",)] = group

    def run(size: int) -> Callable[[], Any]:
        parameter = torch.zeros(max(size // 4, 1), requires_grad=True)
        sums = SharedSums({"p": parameter}, {"p": ("data",)}, world)
        gradient = torch.zeros(parameter.shape)

        def once() -> None:
            parameter.grad = gradient
            sums.finish()

        return once

    return run


def rates() -> dict[str, float]:
    """What one busy rank reaches: multiply-adds, copies, updates."""
    a, b = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    dist.barrier()
    product = _seconds(lambda: torch.mm(a, b))
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    copy = _seconds(lambda: target.copy_(source))
    small = torch.zeros(8)
    out = {"rate": 2 * MATRIX**3 / product, "bandwidth": 2 * COPIED / copy, "launch": _seconds(lambda: small.add(1.0))}
    for name in OPTIMIZERS:
        parameter = torch.zeros(UPDATED, requires_grad=True)
        parameter.grad = torch.zeros(UPDATED)
        out[f"update_{name}"] = 4 * UPDATED / _seconds(optimizer_named(name)([parameter]).step)
    return out


def _seconds(once: Callable[[], Any]) -> float:
    """The time on this rank, while others may do the same."""
    once()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < REPEATS or time.perf_counter() - begun < LEAST_SECONDS:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return _mean(times)


def _device_facts(facts: list[dict[str, float]], cores: int, ranks: int) -> dict[str, Any]:
    """The device's fields from what its ranks reached; a shared processor's are those of all its cores."""
    middle = {key: _rounded(statistics.median(fact[key] for fact in facts)) for key in facts[0]}
    rate, crowd = middle["rate"] * cores, max(1.0, ranks / max(cores, 1))
    return {
        "rates": (("fp64", crowd * rate / 2), ("fp32", crowd * rate), ("bf16", crowd * rate)),
        "bandwidth": crowd * middle["bandwidth"] * cores,
        "launch": middle["launch"] / crowd,
        "updates": tuple((name, crowd * middle[f"update_{name}"]) for name in OPTIMIZERS),
        "sources": Sources(whole="calibration, all ranks busy", single=(("rate_fp64", "half of fp32"),)),
    }
