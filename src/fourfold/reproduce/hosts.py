"""Hosts with slow links between them on one machine: network namespaces, a bridge, and a rate limit in each direction.

Each host is a namespace with one interface, `eth0`, joined to a bridge in a namespace of its own, so that nothing is left
on the machine once the namespaces are gone. Token buckets (`tc tbf`) limit what a host sends and what the bridge sends to
it: a full-duplex link. Ranks in different namespaces reach each other through it alone.

    with hosts(count=2, rate="100mbit") as run:
        outputs = run(["python", "-m", "fourfold", "train", ...])      # under torchrun, one rank per host

Needs root and iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fourfold.errors import InvalidInput, WorkerFailed

PREFIX = "fourfold"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST_SECONDS = 1e-3  # what passes unhindered after a pause: small beside any message worth timing
LEAST_BURST = 16 * 1024  # bytes: some packets
QUEUE = "100ms"  # what waits in a bucket; beyond it packets are lost, as in a switch
GRACE_SECONDS = 2.0  # for the others to end by themselves once one host has failed
PORT = 29500  # free: every namespace has its own ports

Run = Callable[..., list[str]]


def require() -> None:
    """Refuse where namespaces cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise InvalidInput(f"slow links need {' and '.join(missing)}, not found here; install the package iproute2")
    if os.geteuid() != 0:
        raise InvalidInput(f"slow links need root for network namespaces, this is user {os.geteuid()}; run as root")


def bits(rate: str) -> float:
    """``100mbit`` in bit/s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) == 0:
        raise InvalidInput(f"the rate is '{rate}'; write a number with {', '.join(UNITS)}, as in 100mbit")
    return float(found[1]) * UNITS[found[2]]


@contextmanager
def hosts(*, count: int = 2, rate: str = "100mbit") -> Iterator[Run]:
    """`count` hosts on links of `rate`; all is removed on leaving, by an error, Ctrl-C or SIGTERM too.

    ``run(command, env={}, timeout=600)`` runs the command on all under torchrun and returns what each host wrote to
    stdout; what a failing one wrote is in the error.
    """
    require()
    bits(rate)
    if not 2 <= count <= 200:
        raise InvalidInput(f"{count} hosts asked for; use between 2 and 200")
    _sweep()
    names = [f"{PREFIX}-{os.getpid()}-{k}" for k in range(count)]
    switch = f"{PREFIX}-{os.getpid()}-switch"
    with _terminations_raised():
        try:
            _lay(switch, names, rate)
            yield lambda command, **options: _run(names, command, **options)
        finally:
            for name in (*names, switch):
                _remove(name)


def _lay(switch: str, names: Sequence[str], rate: str) -> None:
    _do("ip", "netns", "add", switch)
    _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", switch, "link", "set", "bridge", "up")
    for k, name in enumerate(names):
        _do("ip", "netns", "add", name)
        _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{k}", "netns", switch)
        _do("ip", "-n", name, "address", "add", f"{_address(k)}/24", "dev", "eth0")
        _do("ip", "-n", switch, "link", "set", f"port{k}", "master", "bridge")
        for where, device in ((name, "eth0"), (switch, f"port{k}")):
            _limit(where, device, rate)
            _do("ip", "-n", where, "link", "set", device, "up")


def _address(k: int) -> str:
    return f"10.77.0.{k + 1}"


def _limit(where: str, device: str, rate: str) -> None:
    burst = max(LEAST_BURST, round(bits(rate) / 8 * BURST_SECONDS))
    _do("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", str(burst), "latency", QUEUE)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidInput(
            f"'{' '.join(command)}' failed with {done.returncode}: {done.stderr.strip()}; network namespaces "
            "need root and a kernel with veth, bridge and sch_tbf"
        )
    return done.stdout


def _remove(name: str) -> None:
    """End what still runs in a namespace and delete it; its interfaces go with it."""
    if not Path("/run/netns", name).exists():
        return
    for pid in _do("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _do("ip", "netns", "delete", name)


def _sweep() -> None:
    """Remove what a killed run left behind."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            _remove(path.name)


@contextmanager
def _terminations_raised() -> Iterator[None]:
    """SIGTERM ends the process by an exception, as Ctrl-C does, so that the hosts are removed on the way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raised(number: int, _: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raised)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    names: Sequence[str], command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 600
) -> list[str]:
    settings = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(env or {})}
    nodes: list[subprocess.Popen[Any]] = []
    with TemporaryDirectory(prefix="fourfold-hosts-") as folder:
        said = [Path(folder, f"{k}.out") for k in range(len(names))]
        errors = [path.with_suffix(".err") for path in said]
        try:
            for k, name in enumerate(names):
                line = ["ip", "netns", "exec", name, *_torchrun(k, len(names)), *_resolved(command)]
                with said[k].open("w") as out, errors[k].open("w") as err:
                    nodes.append(
                        subprocess.Popen(
                            line, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=settings, start_new_session=True
                        )
                    )
            failed = _waited(nodes, timeout)
        finally:
            for node in nodes:
                _stop(node)
        if failed is not None:
            code = nodes[failed].returncode
            ending = f"failed with {code}" if code != -signal.SIGKILL else f"did not end within {timeout:.0f} s"
            raise WorkerFailed(f"host {failed} {ending}:\n{said[failed].read_text()}{errors[failed].read_text()}")
        return [path.read_text() for path in said]


def _stop(node: subprocess.Popen[Any]) -> None:
    if node.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
    node.wait()


def _torchrun(k: int, count: int) -> list[str]:
    place = ["--nnodes", str(count), "--node-rank", str(k), "--nproc-per-node", "1"]
    meeting = ["--master-addr", _address(0), "--master-port", str(PORT)]
    return [sys.executable, "-m", "torch.distributed.run", *place, *meeting, "--no-python"]


def _resolved(command: Sequence[str]) -> list[str]:
    """``python`` is the interpreter that runs this."""
    return [sys.executable if k == 0 and word == "python" else word for k, word in enumerate(command)]


def _waited(nodes: Sequence[subprocess.Popen[Any]], timeout: float) -> int | None:
    """The first host to fail, or None once all are done; one that does not end in time has failed."""
    end = time.monotonic() + timeout
    failed: int | None = None
    while any(node.poll() is None for node in nodes):
        if failed is None:
            failed = next((k for k, node in enumerate(nodes) if node.poll()), None)
            end = end if failed is None else min(end, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > end:
            return failed if failed is not None else next(k for k, node in enumerate(nodes) if node.poll() is None)
        time.sleep(0.05)
    return failed if failed is not None else next((k for k, node in enumerate(nodes) if node.returncode), None)
