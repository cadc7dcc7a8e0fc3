"""Temporary files without a name: the system removes them even if a process is killed.

The file stays open here, and other processes of this user open it by this process's entry in /proc. Where there is no
/proc (macOS) it has a name, and is removed when it is closed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fourfold.errors import InvalidInput

_PROC = Path("/proc/self/fd")
_REMEDY = "set TMPDIR to a folder with room"


def temporary_file(folder: str | Path | None = None) -> IO[bytes]:
    """An open file, by default in TMPDIR; it is gone when it is closed."""
    try:
        if _PROC.is_dir():
            return tempfile.TemporaryFile(dir=folder)
        return tempfile.NamedTemporaryFile(dir=folder, prefix="fourfold-")
    except OSError as error:
        raise InvalidInput(f"cannot make a temporary file: {error.strerror or error}; {_REMEDY}") from error


def path_of(file: IO[bytes]) -> str:
    """Where other processes open the file, as long as it is open here."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}" if _PROC.is_dir() else file.name


@contextlib.contextmanager
def temporary_paths(count: int, folder: str | Path | None = None) -> Iterator[list[Path]]:
    """Paths of empty files that are gone afterwards."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(temporary_file(folder)) for _ in range(count)]
        yield [Path(path_of(file)) for file in files]


@contextlib.contextmanager
def explain_write_errors(what: str) -> Iterator[None]:
    """Around torch.save to a temporary file: a full disk in one line. Torch's own writer gives no reason."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the disk is full or over its quota"
        place = f"a temporary file in {tempfile.gettempdir()}"
        raise InvalidInput(f"cannot write {what} to {place}: {reason}; {_REMEDY}") from error
