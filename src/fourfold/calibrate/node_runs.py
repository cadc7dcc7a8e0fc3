"""The hosts of ranks as a run of equal nodes."""

from __future__ import annotations

from fourfold.cluster import Nodes, Sources
from fourfold.errors import InvalidInput


def node_run(hosts: list[str], *, device: str) -> Nodes:
    """The nodes of ranks, by the host of each; refuses hosts with unequally many or mixed ranks."""
    nodes = list(dict.fromkeys(hosts))
    counts = sorted({hosts.count(host) for host in nodes})
    if len(counts) > 1 or hosts != sorted(hosts, key=nodes.index):
        raise InvalidInput(
            f"{len(nodes)} hosts with {' and '.join(map(str, counts))} ranks, not equally many one after the "
            "other; start as many on each"
        )
    return Nodes(count=len(nodes), device=device, devices=counts[0], sources=Sources(whole="found by calibration"))
