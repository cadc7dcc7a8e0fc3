"""Where measurements of this machine and captured graphs are kept between runs.

The folder is FOURFOLD_CACHE if that is set, else `fourfold` in the user's cache. Everything in it can be deleted: it is then
measured or captured again. Its files are data with a format version and a content hash; where either is off they count as
missing, but for calibrations, which are refused with what to do: they take minutes to measure, and plans depend on them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import InvalidInput
from fourfold.files import json_text, parse_json, read_text, write_file

MOST_CACHED = 64 * 2**20  # bytes of a cache file: graphs hold the bytes of their constants
MOST_CACHED_BRACKETS = 4_000_000


def cache_folder() -> Path:
    """The folder; it need not exist yet."""
    chosen = os.environ.get("FOURFOLD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold"


def calibration_file(ranks: int, gpus: str = "") -> Path:
    """Path of this machine's calibration with a number of ranks on its processors or, if they are named, on GPUs."""
    name = f"{platform.node()}-{ranks}" + (f"-{gpus}" if gpus else "")
    return cache_folder() / "clusters" / f"{_slug(name)}.toml"


def kernels_file(name: str) -> Path:
    """Path of a table of kernel times."""
    return cache_folder() / "kernels" / f"{_slug(name)}.json"


def pace_file(name: str) -> Path:
    """Path of the reference-speed file of a machine."""
    return cache_folder() / "paces" / f"{_slug(name)}.json"


def read_cached(path: Path, version: int) -> dict[str, Any] | None:
    """The content of a cache file; None if it is missing or its version or content hash is wrong. That is no error: the content
    is measured or captured again."""
    try:
        data = parse_json(read_text(path, most=MOST_CACHED), brackets=MOST_CACHED_BRACKETS)
    except (OSError, InvalidInput, ValueError):
        return None
    if not isinstance(data, dict) or data.pop("version", None) != version or data.pop("hash", None) != content_hash(data):
        return None
    return data


def write_cached(path: Path, version: int, content: Mapping[str, Any]) -> None:
    """Write a cache file, with its version and the hash of its content; not one that is too large to be read."""
    text = json_text({"version": version, "hash": content_hash(content), **content})
    if len(text) <= MOST_CACHED:
        write_with_folders(path, text)


def write_with_folders(path: Path, text: str) -> None:
    """Write a file and create its folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
    write_file(path, text)


def content_hash(content: Mapping[str, Any]) -> str:
    """The same for the same content, however it is laid out in its file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _slug(text: str) -> str:
    """A text as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")
