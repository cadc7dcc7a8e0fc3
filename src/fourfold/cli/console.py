"""What a command says while it works and when it is done.

With `--json`, stdout carries one object and nothing else: whatever a user's factory prints goes to stderr, from C or by a
process of its own too. Progress goes to stderr, and only to a terminal. Under torchrun only the first rank speaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what is written to stdout to stderr: by Python, by C, and by processes started meanwhile."""
    _flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()
        os.dup2(own, 1)
        os.close(own)


def _flush() -> None:
    """Write out what Python and C hold back for stdout; what it cannot take is said when the answer is written."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The output of one command."""

    json: bool

    @property
    def silent(self) -> bool:
        return os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" in os.environ

    def answer(self, record: dict[str, Any], text: Callable[[], Any]) -> None:
        """The result: the record for scripts, or the text for people."""
        if self.silent:
            return
        if self.json:
            json.dump(record, sys.stdout, allow_nan=False)
            sys.stdout.write("\n")
        else:
            from fourfold.report.text import console

            console().print(text())

    def line(self, text: str) -> None:
        """A line for people, at once. A full disk does not end the work: it is named when the command is done."""
        if not self.json and not self.silent:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                raise
            except OSError:
                return

    def note(self, text: str) -> None:
        """A line that people should see beside the result, on stderr, with --json too."""
        if not self.silent:
            print(f"fourfold: {' '.join(text.split())}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def counting(self, text: str) -> Iterator[Callable[[str, int, int], None]]:
        """A bar that fills: the value takes the words, how many are done, and of how many."""
        with _stdout_to_stderr() if self.json or self.silent else contextlib.nullcontext():
            if self.silent or not sys.stderr.isatty():
                yield lambda words, done, of: None
                return
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
                task = progress.add_task(text, total=None)
                yield lambda words, done, of: progress.update(task, description=words, completed=done, total=of)

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[Callable[[str], None]]:
        """Shows that something is going on; the value changes the words."""
        with _stdout_to_stderr() if self.json or self.silent else contextlib.nullcontext():
            if self.silent or not sys.stderr.isatty():
                yield lambda words: None
                return
            from rich.console import Console
            from rich.live import Live
            from rich.spinner import Spinner

            spinner = Spinner("dots", text=text)
            # Lines for people pass above the spinner where both are one terminal; a file or a pipe gets them itself.
            shared = sys.stdout.isatty()
            with Live(spinner, console=Console(stderr=True), transient=True, redirect_stdout=shared, redirect_stderr=False):
                yield lambda words: spinner.update(text=words)
