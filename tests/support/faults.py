"""Processes killed, stopped, terminated and interrupted at random moments: `make faults`.

Each fault runs a command on two ranks, waits for a moment drawn from the command's own duration, sends the signal, and looks
at what is left: the exit code, what Fourfold says and which rank it names, processes five seconds later, and files. A fault
that comes when the work is done already is drawn again.

    python tests/support/faults.py [--seed N] [--only TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
SMALL = "vgg16-cifar,batch=4,width=32,channels=4"
COMMANDS = {
    "train": (["train", SMALL, "--strategy", "data", "--steps", "100"], "--record"),
    "verify": (["verify", SMALL, "--strategy", "data"], "--record"),
    "calibrate": (["calibrate", "--rounds", "1"], "-o"),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
TARGETS = ("rank", "parent", "torchrun's rank", "torchrun")
WAIT = {"stop": "10"}  # FOURFOLD_TIMEOUT; in other cases a rank that is slow to start shall not be the fault
GRACE = 5.0  # seconds until nothing may be left
PAUSE = 2.0  # seconds that a parent is stopped
LIMIT = 90.0  # seconds until a command must have ended
DRAWS = 6
TORCHS = ("torchelastic_", "torchinductor_")  # logs and a cache that torch leaves in any case
MARK = "FOURFOLD_FAULT"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One signal to one process of one command."""

    command: str
    target: str
    kind: str
    rank: int = 1

    def __str__(self) -> str:
        whom = f"{self.target} {self.rank}" if "rank" in self.target else self.target
        return f"{self.kind} {whom} in {self.command}"

    @property
    def torchrun(self) -> bool:
        return self.target.startswith("torchrun")

    @property
    def expected(self) -> tuple[set[int], str | None]:
        """The exit codes that are right, and what the one line says; None for no line at all."""
        name, rank = SIGNALS[self.kind].name, self.rank
        if self.target == "rank":
            died, stopped = rf"rank {rank} died \(signal {name}", rf"rank {rank} \(process \d+\) is stopped"
            return {"interrupt": ({0}, None), "stop": ({3}, stopped)}.get(self.kind, ({3}, died))
        if self.target == "torchrun's rank":
            stopped, asked = rf"rank {rank} \(process \d+\) is stopped", rf"interrupted: rank {rank} got {name}"
            return {"kill": ({1}, rf"rank {rank} died"), "stop": ({1}, stopped)}.get(self.kind, ({1}, asked))
        if self.kind == "kill":
            return {-9}, None
        if self.kind == "stop":
            return {0}, None
        return ({1}, rf"interrupted: rank [01] got {name}") if self.torchrun else ({130}, "interrupted$")


@dataclass(kw_only=True)
class Run:
    """A command in a folder of its own, with everything that belongs to it marked."""

    fault: Fault
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    before: set[str] = field(default_factory=lambda: set(shared_names()))

    @property
    def output(self) -> Path:
        return self.folder / "out" / ("result.toml" if self.fault.command == "calibrate" else "result.json")

    def start(self) -> subprocess.Popen[str]:
        for name in ("tmp", "out", "cache"):
            (self.folder / name).mkdir()
        arguments, option = COMMANDS[self.fault.command]
        ours = [sys.executable, "-m", "fourfold"]
        if self.fault.torchrun:
            ours = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fourfold"]
        ranks = [] if self.fault.torchrun else ["--ranks", "2"]
        source = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        places = {"TMPDIR": str(self.folder / "tmp"), "FOURFOLD_CACHE": str(self.folder / "cache"), "PYTHONPATH": source}
        settings = {MARK: self.mark, "FOURFOLD_TIMEOUT": WAIT.get(self.fault.kind, "60"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*ours, *arguments, *ranks, option, str(self.output), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, **places, **settings}, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where tests run in the background it is ignored
        )  # fmt: skip

    def output_of(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """What the command wrote until it ended; one that does not end is ended."""
        try:
            return process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.end(process)
            out, err = process.communicate()
            return out, f"{err}no end within {LIMIT:.0f} s"

    def end(self, process: subprocess.Popen[str]) -> None:
        for pid in (*self.processes(), process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> dict[int, bytes]:
        """The living processes of the command with their command lines; those that have ended have no environment."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
        return found

    def target(self, parent: int) -> int | None:
        """The process that the signal is for, once it is there and would notice."""
        if self.fault.target == "torchrun" and len(self._ranks(parent)) < 2:
            return None
        if "rank" not in self.fault.target:
            return parent if listens(parent) else None
        ranks = self._ranks(parent)
        return ranks[self.fault.rank] if len(ranks) == 2 else None

    def _ranks(self, parent: int) -> list[int]:
        """In rank order. Those of torchrun count once they run Fourfold's code; ours are started one after the other."""
        if not self.fault.torchrun:
            return sorted(pid for pid, line in self.processes().items() if b"spawn_main" in line)
        of_rank = {variable(pid, "RANK"): pid for pid in self.processes() if pid != parent and listens(pid)}
        return [of_rank[str(r)] for r in range(2) if str(r) in of_rank]

    def left(self) -> list[str]:
        """What is still there after some seconds and should not be."""
        until = time.monotonic() + GRACE
        while (found := self._left_now()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _left_now(self) -> list[str]:
        """Processes, temporary files, names in shared memory, half a result."""
        found = [f"process {pid} {line[-80:]!r}" for pid, line in self.processes().items()]
        found += [f"tmp/{p.name}" for p in (self.folder / "tmp").iterdir() if not p.name.startswith(TORCHS)]
        found += [f"/dev/shm/{name}" for name in set(shared_names()) - self.before]
        found += [f"out/{p.name}" for p in (self.folder / "out").iterdir() if p != self.output]
        return found + [f"half of {p.name}" for p in self.folder.rglob("*") if p.suffix in (".json", ".toml") and not whole(p)]


def shared_names() -> list[str]:
    return [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("fourfold", "torch"))]


def whole(path: Path) -> bool:
    """Whether a file can be read."""
    if "torchelastic" in str(path):
        return True
    try:
        (json.loads if path.suffix == ".json" else tomllib.loads)(path.read_text())
    except ValueError:
        return False
    return True


def variable(pid: int, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if item.startswith(f"{name}=".encode()):
                return item.partition(b"=")[2].decode()
    return None


def listens(pid: int) -> bool:
    """Whether a process has said what SIGTERM shall do: before, Python itself is still starting."""
    with contextlib.suppress(OSError):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fault led to; `wrong` is empty if all is right."""

    fault: Fault
    moment: float
    seconds: float  # from the signal to the end
    code: int
    line: str
    wrong: tuple[str, ...]


def inject(fault: Fault, moment: float) -> Outcome | None:
    """Run the command and send the signal so many seconds after its target is there; None if that was too late."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    run = Run(fault=fault, folder=folder)
    process = run.start()
    try:
        if not _send(run, process, moment):
            return None
        begun = time.monotonic()
        out, err = run.output_of(process)
        spent = time.monotonic() - begun
        lines, left = [line for line in err.splitlines() if line.startswith("fourfold: ")], run.left()
        if 0 not in fault.expected[0] and out.endswith("}\n") and not lines and not left:
            return None  # the answer had been given; torchrun waits for ever for a rank that is stopped after its work
        wrong = (*_mistakes(fault, process.returncode, lines, err), *left)
        return Outcome(fault=fault, moment=moment, seconds=spent, code=process.returncode, line=" / ".join(lines), wrong=wrong)
    finally:
        run.end(process)
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _send(run: Run, process: subprocess.Popen[str], moment: float) -> bool:
    """Send the signal at its moment; a stopped parent goes on after a while."""
    while (pid := run.target(process.pid)) is None:
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    time.sleep(moment)
    if process.poll() is not None:
        return False
    try:
        os.kill(pid, SIGNALS[run.fault.kind])
        if run.fault.kind == "stop" and "rank" not in run.fault.target:
            time.sleep(PAUSE)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def _mistakes(fault: Fault, code: int, lines: list[str], err: str) -> Iterator[str]:
    codes, said = fault.expected
    if code not in codes:
        yield f"exit code {code}, not {codes}: {err[-1500:]}"
    if said is None and lines:
        yield f"a line where none belongs: {lines}"
    if said is not None and (len(lines) != 1 or not re.match(f"fourfold: {said}", lines[0])):
        yield f"{lines}, not one line with {said!r}: {err[-1500:]}"
    if "internal error" in err:
        yield f"an internal error: {err[-1500:]}"
    if "Traceback" in err and not fault.torchrun:  # torchrun has one of its own
        yield f"a traceback: {err[-1500:]}"


def drawn(fault: Fault, duration: float, random_: random.Random) -> Outcome:
    """The fault at a random moment of a command that takes so long; a few draws until one comes in time."""
    for attempt in range(DRAWS):
        moment = random_.uniform(0, duration) / (1 + attempt)
        found = inject(fault, moment)
        if found is not None:
            return found
    return Outcome(fault=fault, moment=moment, seconds=0, code=0, line="", wrong=(f"{DRAWS} signals changed nothing",))


def sixty() -> list[Fault]:
    """Every kind of signal to every kind of process in every command, and twelve more to ranks of ours."""
    targets = [(target, 1) for target in TARGETS] + [("rank", 0)]
    return [Fault(command=c, target=t, kind=k, rank=r) for c in COMMANDS for t, r in targets for k in SIGNALS]


def duration(fault: Fault) -> float:
    """Seconds the command takes when nothing happens, from the moment its target is there."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        run = Run(fault=fault, folder=Path(folder))
        process = run.start()
        while run.target(process.pid) is None and process.poll() is None:
            time.sleep(0.01)
        begun = time.monotonic()
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
        return time.monotonic() - begun


def main(say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose words contain this")
    asked = parser.parse_args()
    random_ = random.Random(asked.seed)
    durations: dict[tuple[str, bool, bool], float] = {}
    faults = [fault for fault in sixty() if asked.only in str(fault)]
    bad = 0
    for fault in faults:
        key = (fault.command, fault.torchrun, "rank" in fault.target)
        if key not in durations:
            durations[key] = duration(fault)
        found = drawn(fault, durations[key], random_)
        bad += bool(found.wrong)
        say(f"{'WRONG' if found.wrong else 'right':5}  {fault!s:40} at {found.moment:5.2f} s  ended in {found.seconds:5.2f} s  "
            f"exit {found.code:3}  {found.line[:90]}")  # fmt: skip
        for problem in found.wrong:
            say(f"       {problem}")
    say(f"{len(faults)} faults, seed {asked.seed}: {len(faults) - bad} right, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
