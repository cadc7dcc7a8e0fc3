"""Where the ranks of a plan run: the host of each rank and the kind of its device.

Lowering uses it to decide which way a message takes. For a prediction it is made from the cluster, for a run from the running
processes. `differences` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fourfold.errors import InvalidInput

Level = Literal["rank", "host", "network"]
"""What connects ranks: nothing (there is one), memory or a bus inside a host, links between hosts."""
SHOWN = 16  # hosts listed in a message
AMPLE_BYTES = 2**30
"""Bytes of shared memory from which on a limit is not reported: few plans need more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`hosts`: the host of each rank, as a number. `devices`: the kind of each rank's device. `shared_bytes`: memory that the
    ranks of one host can share; None: as much as they need."""

    hosts: tuple[int, ...]
    devices: tuple[str, ...]
    shared_bytes: int | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.hosts or len(self.hosts) != len(self.devices):
            raise InvalidInput(
                f"a placement needs one host and one device for each rank, it has {len(self.hosts)} and {len(self.devices)}"
            )
        object.__setattr__(
            self, "_hash", hash((self.hosts, self.devices, self.shared_bytes))
        )  # thousands of ranks, many look-ups

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def one_host(ranks: int, device: str = "cpu") -> Placement:
        """Processes on one host, with devices of one kind."""
        return Placement(hosts=(0,) * ranks, devices=(device,) * ranks)

    @staticmethod
    def separate_hosts(ranks: int) -> Placement:
        """One process per host."""
        return Placement(hosts=tuple(range(ranks)), devices=("cpu",) * ranks)

    def level(self, ranks: Iterable[int]) -> Level:
        """What connects these ranks."""
        found = list(ranks)
        if len(found) < 2:
            return "rank"
        return "host" if len({self.hosts[rank] for rank in found}) == 1 else "network"

    def on_processors(self, ranks: Iterable[int]) -> bool:
        return all(self.devices[rank] == "cpu" for rank in ranks)

    def shares_memory(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks can exchange tensors through memory they share: processors of one host. GPUs use their links."""
        found = list(ranks)
        return self.on_processors(found) and self.level(found) != "network"

    def differences(self, running: Placement) -> list[str]:
        """How the placement of a run differs from this one, which was predicted: a sentence for each difference."""
        out = []
        if self.devices != running.devices:
            out.append(f"predicted for {_counted(self.devices)}, running on {_counted(running.devices)}")
        mine, theirs = _numbered(self.hosts), _numbered(running.hosts)
        if mine != theirs:
            out.append(
                f"predicted for ranks on hosts {_shown(mine)}, running on hosts {_shown(theirs)} (a host is where "
                "processes can share memory)"
            )
        if running.shared_bytes is not None and running.shared_bytes < AMPLE_BYTES and "cpu" in running.devices:
            out.append(
                f"ranks of a host can share {running.shared_bytes / 2**20:.0f} MiB of memory here; what does not fit is sent "
                "over sockets"
            )
        return out


def _counted(devices: tuple[str, ...]) -> str:
    return ", ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))


def _numbered(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """Hosts numbered in the order of their first ranks."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def _shown(hosts: tuple[int, ...]) -> str:
    first = ", ".join(map(str, hosts[:SHOWN]))
    return f"[{first}]" if len(hosts) <= SHOWN else f"[{first}, ... {len(hosts)} ranks on {len(set(hosts))}]"
