"""How long a collective takes: by the measured curve of just such groups if there is one, else by a formula.

Symbols of the formulas: p ranks of a group; alpha seconds to start a message (`Channel.latency`); beta seconds per byte
(`Channel.ring`, `even` or `border`, which hold sharing, oversubscription and levels); m bytes, of what each function
says. A group of one rank costs nothing. Every time rises with m, alpha and beta.

The formulas are Hockney's alpha-beta model of the algorithms that NCCL and gloo use for large messages, as in ParaDL (arXiv
2104.09075). They leave out: protocols for small messages (too high there), the arithmetic of sums, and the processor time
that gloo's copies take (too low on CPUs; gloo's all-gather took 2.5 times what its all-reduce took). Measure instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fourfold.cluster import Cluster, Collective
from fourfold.oracle.prices.curves import reading, rising
from fourfold.oracle.prices.traffic import Channel, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds, and how they are known."""

    seconds: float
    spread: float | None = None  # seconds between quartiles, where measured
    measured: bool = False
    extrapolated: bool = False  # beyond the measured sizes


FREE = Cost(seconds=0.0)


def collective_cost(cluster: Cluster, traffic: Traffic, collective: Collective, size: float) -> Cost:
    """The time until the last of several groups is done that start at once. `size` is in bytes, as `Curve` defines it."""
    costs = [_cost(cluster, channel, traffic.groups, collective, size) for channel in traffic.channels]
    return max(costs, key=lambda cost: cost.seconds)


def measured_cost(cluster: Cluster, traffic: Traffic, collective: Collective, size: float) -> Cost | None:
    """The same by measured curves alone; None where one is missing."""
    costs = [_measured(cluster, channel, traffic.groups, collective, size) for channel in traffic.channels]
    known = [cost for cost in costs if cost is not None]
    return max(known, key=lambda cost: cost.seconds) if len(known) == len(costs) else None


def _cost(cluster: Cluster, channel: Channel, groups: int, collective: Collective, size: float) -> Cost:
    if channel.ranks == 1:
        return FREE
    found = _measured(cluster, channel, groups, collective, size)
    return found if found is not None else Cost(seconds=FORMULAS[collective](channel, size))


def _measured(cluster: Cluster, channel: Channel, groups: int, collective: Collective, size: float) -> Cost | None:
    for curve in cluster.measured.curves_of(collective, cluster.links[channel.level].name):
        if (curve.ranks, curve.groups) == (channel.ranks, groups):
            read = reading(curve, size)
            return Cost(seconds=read.seconds, spread=read.spread, measured=True, extrapolated=read.extrapolated)
    return None


def waiting(cluster: Cluster, traffic: Traffic, computing: float) -> float:
    """Seconds by which exchanges of these groups take longer after so much computing than their curves say; beyond what was
    measured, as at its end. 0 where it was not."""
    extra = [0.0]
    for channel in traffic.channels:
        for waits in cluster.measured.waits:
            found = (waits.level, waits.ranks, waits.groups)
            if channel.ranks > 1 and found == (cluster.links[channel.level].name, channel.ranks, traffic.groups):
                seconds = rising(waits.seconds)
                extra.append(float(np.interp(computing, waits.computing, seconds)) - seconds[0])
    return max(extra)


def allreduce_time(channel: Channel, size: float) -> float:
    """The lesser of a ring's time, 2 (p-1) (alpha + m beta/p), and a tree's, 2 ceil(log2 p) (alpha + m beta), m bytes of the
    tensor: libraries choose, the tree for small m on many ranks.

    A ring: p-1 steps reduce-scatter, p-1 gather, m/p bytes each; a tree: up and down. Source: ParaDL; Patarasuk and Yuan
    2009; Thakur et al. 2005. Wrong between the two, where libraries cut messages into pieces and do better than both.
    """
    tree = 2 * math.ceil(math.log2(channel.ranks)) * (channel.latency + size * channel.border)
    return min(2 * _ring_time(channel, size / channel.ranks), tree)


def allgather_time(channel: Channel, size: float) -> float:
    """The lesser of a ring's time, (p-1) (alpha + m beta), and that of recursive doubling, ceil(log2 p) alpha + 2 (p-1) m beta,
    m bytes of one rank's part: libraries choose, doubling for small m on many ranks.

    Doubling moves as many bytes as a ring, but not between neighbours. That its term of bytes is taken twice is an assumption:
    it puts the switch where m beta is about alpha, the length at which a link has half its rate. Source: ParaDL; Thakur et al.
    2005; Hockney 1994. Parts of unequal size cost as much as the largest. Wrong on gloo for small m: it always uses a ring.
    """
    doubling = math.ceil(math.log2(channel.ranks)) * channel.latency + 2 * (channel.ranks - 1) * size * channel.ring
    return min(_ring_time(channel, size), doubling)


def reducescatter_time(channel: Channel, size: float) -> float:
    """(p-1) (alpha + m beta), m bytes of one rank's part. The first half of a ring all-reduce.

    Source: Thakur et al. 2005. Wrong for small m on many ranks, where recursive halving has fewer steps.
    """
    return _ring_time(channel, size)


def _ring_time(channel: Channel, size: float) -> float:
    """p-1 steps, in each of which every rank passes m bytes on to the next."""
    return (channel.ranks - 1) * (channel.latency + size * channel.ring)


def alltoall_time(channel: Channel, size: float) -> float:
    """(p-1) alpha + m beta, m bytes of all that one rank gives to others, evenly. Pairwise messages.

    beta is that of the narrowest place, weighted by the part of m that passes it. Source: Thakur et al. 2005. Wrong where
    parts are uneven (halos: see `neighbour_time`) and where packets of many senders collide.
    """
    return (channel.ranks - 1) * channel.latency + size * channel.even


def broadcast_time(channel: Channel, size: float) -> float:
    """ceil(log2 p) (alpha + m beta), m bytes of the tensor. A binomial tree, one link for each sender.

    Source: Thakur et al. 2005. Wrong for large m where the library cuts it into pieces (NCCL's ring: about m beta).
    """
    return math.ceil(math.log2(channel.ranks)) * (channel.latency + size * channel.border)


def send_time(channel: Channel, size: float) -> float:
    """alpha + m beta, m bytes of the message. Source: Hockney 1994. Wrong where a small message is buffered and the sender
    goes on at once."""
    return (channel.latency + size * channel.border) if channel.ranks > 1 else 0.0


def neighbour_time(channel: Channel, size: float, *, neighbours: int) -> float:
    """n alpha + m beta, m bytes of all that a rank gives to its n neighbours in the group: a halo.

    At each border of a unit one rank of a group sends out and one takes in, so a group needs one link there. Both
    directions flow at once. Source: ParaDL's halo term, 2 alpha + m beta, for any number of neighbours. Wrong where a halo
    is wider than the neighbour's part and reaches further: those are more neighbours.
    """
    return neighbours * channel.latency + size * channel.border if channel.ranks > 1 else 0.0


def shared_gather_time(channel: Channel, size: float) -> float:
    """alpha + p m beta, m bytes of one rank's part: each writes its own and reads all. Wrong where ranks outnumber cores: one
    that is not running is waited for."""
    return channel.latency + channel.ranks * size * channel.border


def shared_sum_time(channel: Channel, size: float) -> float:
    """3 alpha + 3 m beta, m bytes of the tensor: put, add up a slice of all rows, copy the others' slices; a barrier after
    each. Wrong as the gather is."""
    return 3 * (channel.latency + size * channel.border)


FORMULAS: dict[Collective, Callable[[Channel, float], float]] = {
    "all_reduce": allreduce_time,
    "all_gather": allgather_time,
    "reduce_scatter": reducescatter_time,
    "all_to_all": alltoall_time,
    "broadcast": broadcast_time,
    "send": send_time,
    "shared_gather": shared_gather_time,
    "shared_sum": shared_sum_time,
}
