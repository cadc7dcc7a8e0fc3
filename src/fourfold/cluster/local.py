"""This machine as a cluster, for planning before anything was measured on it.

Only its cores and its memory are known. The rates are assumptions, chosen to be low rather than high, and say so in their
sources; a calibrated file replaces them.
"""

from __future__ import annotations

import os

from fourfold.cluster.parts import Device, Link, Nodes, Sources
from fourfold.cluster.spec import Cluster

ASSUMED = "assumed, not calibrated"
CORE_FP32 = 32e9  # FLOP/s: one 8-wide multiply-add a cycle at 2 GHz, half of what AVX2 cores reach
CORE_BANDWIDTH = 5e9  # bytes/s
LOOPBACK_LATENCY = 50e-6
LOOPBACK_BANDWIDTH = 1e9
RANKS_A_CORE = 4  # with more of them nobody runs a plan here; it is for another machine


def local(ranks: int | None = None) -> Cluster:
    """One node whose ranks, by default one per core, share its cores and memory."""
    cores = usable_cores()
    ranks = cores if ranks is None else ranks
    return Cluster(
        name="local",
        about=f"this machine, {cores} cores; {ASSUMED}",
        kinds=(_processor(cores),),
        nodes=(Nodes(count=1, device="cpu", devices=ranks, sources=Sources(whole="this machine; as many ranks as asked for")),),
        links=(_loopback(),),
        size=ranks,
    )


def may_run_locally(ranks: int) -> bool:
    """Whether a plan of `ranks` ranks may be meant for this machine."""
    return ranks <= RANKS_A_CORE * usable_cores()


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor(cores: int) -> Device:
    return Device(
        name="cpu",
        kind="cpu",
        memory=total_memory(),
        bandwidth=cores * CORE_BANDWIDTH,
        # Without units for bf16, which few processors have, it is no faster than fp32.
        rates=(("fp64", cores * CORE_FP32 / 2), ("fp32", cores * CORE_FP32), ("bf16", cores * CORE_FP32)),
        launch=5e-6,
        cores=cores,
        sources=Sources(whole=ASSUMED, single=(("cores", "this machine"), ("memory", "this machine"))),
    )


def _loopback() -> Link:
    return Link(
        name="loopback",
        nodes=1,
        latency=LOOPBACK_LATENCY,
        bandwidth=LOOPBACK_BANDWIDTH,
        shared_by=1,
        sources=Sources(whole=ASSUMED),
    )
