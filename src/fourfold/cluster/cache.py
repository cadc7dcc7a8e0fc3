"""Where measurements of this machine are kept between runs: calibrations, and tables of kernel times.

The folder is FOURFOLD_CACHE if that is set, else `fourfold` in the user's cache. Everything in it can be deleted: it is then
measured again.
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from fourfold.errors import InvalidInput


def cache_folder() -> Path:
    """The folder; it need not exist yet."""
    chosen = os.environ.get("FOURFOLD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold"


def calibration_file(ranks: int) -> Path:
    """Where the calibration of this machine with so many ranks lies, once it was made."""
    return cache_folder() / "clusters" / f"{_slug(platform.node())}-{ranks}.toml"


def kernels_file(name: str) -> Path:
    """Where the table of kernel times with a name lies."""
    return cache_folder() / "kernels" / f"{_slug(name)}.json"


def pace_file(name: str) -> Path:
    """Where the pace lies at which times of a machine with a name are told."""
    return cache_folder() / "paces" / f"{_slug(name)}.json"


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader, or an interruption, never meets half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(beside, path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the cache; empty if there is no such file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}; delete it, it will be measured again") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is no JSON object; delete it, it will be measured again")
    return data


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")
