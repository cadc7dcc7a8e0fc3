"""The way in and the way out: runs the command and turns whatever happens into one line and an exit code.

0 done; 1 the check failed; 2 bad input or a refusal; 3 a worker failed; 70 a mistake of ours; 130 interrupted. Set
FOURFOLD_TRACEBACK to see where an error came from. Under torchrun one rank of a host says what is wrong, and names the rank.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NoReturn

from fourfold.errors import Error, InvalidInput, WorkerFailed
from fourfold.runtime.host.peers import claim_failure_report, exit_with_torchrun, lost_rank, started_by_torchrun

OURS, INTERRUPTED = 70, 130
LATER_SECONDS = 0.05  # until an interrupt is tried again
IMPORT_SECONDS = 20.0  # that an import may take to end before it is interrupted nevertheless
GRACE_SECONDS = 3.0  # for a rank to end by itself; torchrun gives it thirty
_signals: list[str] = []  # the names of those that asked this process to end


class Stdout(io.FileIO):
    """Stdout that remembers why it could not write: whoever it raised at may go on, or not know whose error it is."""

    trouble: ClassVar[OSError | None] = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            Stdout.trouble = error
            raise


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    code = run(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # too late to change anything
    if _signals:  # Python would end by SIGINT if the interrupt came within an exec, and half-loaded libraries may not end well
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    _signals.clear()
    Stdout.trouble = None
    try:
        _handle_signals()
        _prepare_standard_files()
        if started_by_torchrun():
            _end_under_torchrun()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler warns of every block older than itself
        code = _command(arguments)
        with contextlib.suppress(BrokenPipeError):  # the reader of our output has gone: the result is still the result
            sys.stdout.flush()
        if isinstance(Stdout.trouble, BrokenPipeError):
            _give_up_stdout()
            return code
        return code if Stdout.trouble is None else _report_error(Stdout.trouble)
    except KeyboardInterrupt:
        return _report_interrupt()
    except SystemExit as error:
        if Stdout.trouble is not None:  # what typer makes of a pipe that nobody reads
            return _report_error(Stdout.trouble)
        return _print_line(f"the model's code called sys.exit({error.code!r}); it shall return instead", InvalidInput.exit_code)
    except Exception as error:
        if os.environ.get("FOURFOLD_TRACEBACK"):
            raise
        return _report_error(error)


def _command(arguments: Sequence[str] | None) -> int:
    import typer

    from fourfold.cli.app import app

    answer = typer.main.get_command(app).main(
        args=None if arguments is None else list(arguments), prog_name="fourfold", standalone_mode=False
    )
    if answer == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        raise KeyboardInterrupt
    return answer if isinstance(answer, int) else 0


def _handle_signals() -> None:
    """Let signals that ask for an end raise; one that the caller has chosen to ignore stays so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise; but not within an import: what torch's libraries run while they are loaded aborts the process on an exception."""
    _signals.append(signal.Signals(number).name)
    if _importing(frame) and len(_signals) == 1:  # whoever asks again means it
        last = time.monotonic() + IMPORT_SECONDS
        signal.signal(signal.SIGALRM, partial(_interrupt_later, last))
        signal.setitimer(signal.ITIMER_REAL, LATER_SECONDS)
        return
    raise KeyboardInterrupt


def _interrupt_later(last: float, number: int, frame: FrameType | None) -> None:
    if not _importing(frame) or time.monotonic() > last:
        raise KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, LATER_SECONDS)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_under_torchrun() -> None:
    """End with torchrun, and when it asks for an end: a rank that waits for another in C++ runs no handler of Python's, and
    would be killed without a word. A thread that hears of signals at once gives it some seconds."""
    exit_with_torchrun()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_signal, args=(reader,), name="fourfold-signals", daemon=True).start()


def _end_after_signal(reader: int) -> None:
    while os.read(reader, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
        continue
    time.sleep(GRACE_SECONDS)
    os._exit(_report_interrupt())


def _prepare_standard_files() -> None:
    """Open what was closed before us (`>&-`), or the next file opened would be taken for it; writing to stdout fails then."""
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, mode)  # takes the lowest number that is free
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if sys.stdout is sys.__stdout__:  # None, too, where it was closed; pytest has put its own there
        encoding, errors = (sys.stdout.encoding, sys.stdout.errors) if sys.stdout is not None else ("utf-8", "strict")
        buffer = io.BufferedWriter(Stdout(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, encoding, errors, line_buffering=os.isatty(1))


def _report_error(error: Exception) -> int:
    """Print an error in one line; the result is its exit code."""
    import typer

    if isinstance(error, BrokenPipeError) and error is Stdout.trouble:  # the reader of our output has gone: nothing to say
        _give_up_stdout()
        return 0
    if _signals or isinstance(error, typer.Abort):  # what a KeyboardInterrupt became on its way
        return _report_interrupt()
    if isinstance(error, WorkerFailed):
        return _print_line(_without_traceback(str(error)), error.exit_code)
    if isinstance(error, Error):
        return _print_line(str(error), error.exit_code)
    if error is Stdout.trouble:
        _give_up_stdout()
        return _print_line(f"cannot write to stdout: {error.strerror}", InvalidInput.exit_code)
    # The base of typer's usage errors: click's own, or the copy of it that newer typers carry.
    usage = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    if isinstance(error, usage):
        return _print_line(f"{error.format_message()} (see fourfold --help)", InvalidInput.exit_code)  # type: ignore[attr-defined]
    line = f"internal error, {type(error).__name__}: {error}; FOURFOLD_TRACEBACK=1 shows where"
    return _print_line(line, OURS)


def _give_up_stdout() -> None:
    """Let what stdout still holds go nowhere, or Python tries once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _report_interrupt() -> int:
    """An end that was asked for; under torchrun, which ends the others when one has failed, the failure that led to it."""
    if not started_by_torchrun():
        return _print_line("interrupted", INTERRUPTED)
    lost = lost_rank(wait=0)
    if lost is not None:
        return _print_line(str(lost), lost.exit_code)
    return _print_line(f"interrupted: rank {os.environ['RANK']} got {_signals[0] if _signals else 'a signal'}", INTERRUPTED)


def _print_line(text: str, code: int) -> int:
    if claim_failure_report():
        print(f"fourfold: {' '.join(text.split())}", file=sys.stderr)
    return code


def _without_traceback(text: str) -> str:
    """What a rank said, without the way to it: the first line and the last."""
    lines = text.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}; FOURFOLD_TRACEBACK=1 shows where"
