"""The way in and the way out: runs the command and turns whatever happens into one line and an exit code.

0 done; 1 the check failed; 2 bad input or a refusal; 3 a worker failed; 70 a mistake of ours; 130 interrupted. Set
FOURFOLD_TRACEBACK to see where an error came from.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import typer

from fourfold.errors import Error, WorkerFailed

OURS, INTERRUPTED = 70, 130
# The base of typer's usage errors: click's own, or the copy of it that newer typers carry.
UsageProblem = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    from fourfold.cli.app import app

    signal.signal(signal.SIGTERM, _terminated)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler warns of every block older than itself
    try:
        answer = typer.main.get_command(app).main(
            args=None if arguments is None else list(arguments), prog_name="fourfold", standalone_mode=False
        )
        sys.stdout.flush()
        if answer == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            return _line("interrupted", INTERRUPTED)
        return answer if isinstance(answer, int) else 0
    except Exception as error:
        if os.environ.get("FOURFOLD_TRACEBACK"):
            raise
        return _told(error)
    except KeyboardInterrupt:
        return _line("interrupted", INTERRUPTED)


def _told(error: Exception) -> int:
    """Say an error in one line; the result is its exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone: nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, typer.Abort):  # or used to
        return _line("interrupted", INTERRUPTED)
    if isinstance(error, WorkerFailed):
        return _line(_without_traceback(str(error)), error.exit_code)
    if isinstance(error, Error):
        return _line(str(error), error.exit_code)
    if isinstance(error, UsageProblem):
        return _line(f"{error.format_message()} (see fourfold --help)", 2)  # type: ignore[attr-defined]
    line = f"internal error, {type(error).__name__}: {error}; FOURFOLD_TRACEBACK=1 shows where"
    return _line(line, OURS)


def _line(text: str, code: int) -> int:
    if code == INTERRUPTED and os.environ.get("RANK", "0") != "0":  # torchrun ends the others when one has failed
        return code
    print(f"fourfold: {' '.join(text.split())}", file=sys.stderr)
    return code


def _without_traceback(text: str) -> str:
    """What a rank said, without the way to it: the first line and the last."""
    lines = text.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}; FOURFOLD_TRACEBACK=1 shows where"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
