"""Files, read and written whole. Reading stops at a stated size and at stated bounds of a JSON's shape, before anything of it
is built. Writing leaves the new file or the old one, never half of either.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from fourfold.errors import InvalidInput
from fourfold.units import bytes_text

MOST_BYTES = 16 * 2**20
"""Of a JSON file. A plan for 100,000 ranks has 3 MiB, a record of 400,000 steps 8 MiB; what Python makes of a file may take 40
times its size, so that even a hostile one stays below 1 GiB."""
MOST_BRACKETS = 400_000  # lists and objects: two of these each
DEEPEST = 32  # lists and objects inside one another
LARGEST_WHOLE = 2**63 - 1
_TEXTS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKETS = re.compile(r"[][{}]")


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """A file's text; one that is too large, or no UTF-8, is refused."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise InvalidInput(f"{path}: has more than {bytes_text(most)}; no such file is that large")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: is no UTF-8 text") from None


def parse_json(text: str, *, brackets: int = MOST_BRACKETS) -> Any:
    """What a JSON text says, more strictly than the standard library reads it; a `ValueError` says what is wrong.

    Refused: NaN, Infinity and numbers beyond 64 bits, an object with one key twice, and texts that nest or count beyond the
    bounds, before any of it is built.
    """
    _check_shape(text, brackets)
    hooks: dict[str, Any] = {"parse_int": _whole, "parse_float": _number, "parse_constant": _constant}
    return json.loads(text, object_pairs_hook=_object, **hooks)


def json_text(data: Any, *, indent: int | None = None) -> str:
    """Data as a JSON file holds it."""
    return json.dumps(data, indent=indent, allow_nan=False) + "\n"


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader, an interruption or a full disk never meets or leaves half of it.

    The bytes go to a file beside it, to the disk, and only then take the name. Links are followed, and mode and owner stay, as
    an ordinary write would have it. What is no plain file, as /dev/stdout, is written to directly.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        if _is_special(path):
            _write_directly(path, content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    """A device, a pipe, or another name for what a process has open."""
    if str(path).startswith(("/dev/std", "/dev/fd/", "/proc/")):
        return True
    with suppress(FileNotFoundError):
        return not stat.S_ISREG(path.stat().st_mode)
    return False


def _write_directly(path: Path, content: bytes) -> None:
    """Through stdout or stderr itself, where that is meant: what else is printed there comes after it, not over it."""
    with open(_descriptor(path.stat()) or path, "wb") as file:
        file.write(content)


def _descriptor(there: os.stat_result) -> int | None:
    """A new descriptor of stdout or stderr, if the file is what they write to."""
    for number in (1, 2):
        with suppress(OSError):  # a closed one
            if os.path.samestat(there, os.fstat(number)):
                return os.dup(number)
    return None


def _replace(path: Path, content: bytes) -> None:
    before = path.stat() if path.exists() else None
    if before is not None and not os.access(path, os.W_OK):  # a rename would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with _new_file_beside(path) as (name, file):
        if before is not None:
            _keep_owner(file, before)
        while content:
            content = content[os.write(file, content) :]
        os.fsync(file)
        os.replace(name, path)
    with suppress(OSError):  # a file system whose folders cannot be synchronised; the name is there already
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _new_file_beside(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file in the same folder, of the mode a new file has; removed unless it was renamed."""
    name = path.with_name(f".fourfold-{os.getpid()}-{secrets.token_hex(4)}")
    file = None
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        yield name, file
    finally:
        if file is not None:
            os.close(file)
        with suppress(FileNotFoundError):
            name.unlink()


def _keep_owner(file: int, before: os.stat_result) -> None:
    """Give a file the owner and mode of the one that it will replace."""
    mine = os.fstat(file)
    if (mine.st_uid, mine.st_gid) != (before.st_uid, before.st_gid):
        with suppress(PermissionError):  # of another user: an ordinary user cannot give files away
            os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, stat.S_IMODE(before.st_mode))


def _check_shape(text: str, most: int) -> None:
    plain = _TEXTS.sub("", text)
    count = sum(map(plain.count, "[]{}"))
    if count > most:
        raise ValueError(f"it has more than {most // 2:,} lists and objects")
    depth = 0
    for found in _BRACKETS.finditer(plain):
        depth += 1 if found[0] in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"lists and objects nest more than {DEEPEST} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
    return out


def _whole(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no whole number")
    if len(text) > 20 or abs(int(text)) > LARGEST_WHOLE:
        raise ValueError(f"the number {text[:20]}{'...' if len(text) > 20 else ''} does not fit 64 bits")
    return int(text)


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:20]}{'...' if len(text) > 20 else ''} is too large")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
