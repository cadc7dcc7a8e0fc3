"""Hosts on rate-limited links: the rate holds, nothing is left behind, and a machine that cannot make them says so.

They need root and iproute2, which test machines seldom have: but for the refusals, these tests are slow and skip visibly.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.errors import InvalidInput, WorkerFailed
from fourfold.reproduce.hosts import bits, hosts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "slow_link.py"
sys.path.insert(0, str(BENCHMARKS))

from slow_link import PROBE  # noqa: E402

lays_links = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="network namespaces need root and iproute2"
)


def spaces() -> list[str]:
    """Our namespaces and those of our children, of which none may stay."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob("fourfold-*")) if folder.exists() else []


def test_a_machine_without_the_tools_is_refused_in_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "slow links need ip and tc, not found here; install the package iproute2\n"


@pytest.mark.parametrize("rate", ["", "fast", "100", "100 mbit", "0mbit", "-1gbit"])
def test_a_rate_without_number_or_unit_is_refused(rate: str) -> None:
    with pytest.raises(InvalidInput, match="as in 100mbit"):
        bits(rate)


@pytest.mark.slow
@lays_links
@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_gloo_gets_the_rate_of_the_link_and_no_more(rate: str) -> None:
    with hosts(rate=rate) as run:
        measured = json.loads(run(PROBE)[0])["bandwidth_Mbitps"] * 1e6
    assert 0.8 * bits(rate) < measured <= bits(rate)
    assert not spaces()


@pytest.mark.slow
@lays_links
def test_every_host_runs_its_rank_and_answers() -> None:
    script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['WORD'])"
    with hosts(count=3, rate="1gbit") as run:
        assert run(["python", "-c", script], env={"WORD": "hello"}) == [f"{k} 3 hello\n" for k in range(3)]


@pytest.mark.slow
@lays_links
def test_a_host_that_fails_stops_the_others_and_is_quoted() -> None:
    script = "import os, time; exit('no more') if os.environ['RANK'] == '1' else time.sleep(100)"
    begun = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"(?s)host 1 failed.*no more"), hosts() as run:
        run(["python", "-c", script])
    assert time.monotonic() - begun < 60
    assert not spaces()


@pytest.mark.slow
@lays_links
def test_a_host_that_does_not_end_is_stopped() -> None:
    with pytest.raises(WorkerFailed, match="did not end within 4 s"), hosts() as run:
        run(["python", "-c", "import time; time.sleep(100)"], timeout=4)
    assert not spaces()


@pytest.mark.slow
@lays_links
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPT), "--", "python", "-c", "import time; time.sleep(1234)"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    switch = f"fourfold-{process.pid}-switch"
    while switch not in spaces():
        time.sleep(0.05)
    time.sleep(3)  # the ranks are running now
    process.send_signal(number)
    assert process.wait(20) != 0
    assert not spaces()
    assert not [p for p in Path("/proc").glob("[0-9]*") if b"time.sleep(1234)" in _command_line(p)]


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
