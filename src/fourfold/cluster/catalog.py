"""Clusters by the text a user gives: a preset, a TOML file, or `local`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fourfold.cluster.cache import calibration_file
from fourfold.cluster.files import load_calibration, load_cluster
from fourfold.cluster.local import local, usable_cores
from fourfold.cluster.spec import Cluster
from fourfold.errors import InvalidInput, nearest

LOCAL = "local"


def preset_names() -> tuple[str, ...]:
    """What is built in, besides `local`."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml")))


@cache
def preset(name: str) -> Cluster:
    """A built-in cluster with all its devices."""
    with as_file(_folder() / f"{name}.toml") as path:
        return load_cluster(path)


def cluster_named(text: str, *, devices: int | None = None) -> Cluster:
    """The cluster a text means, with so many devices in use, or all. `local` is this machine as it was calibrated with so
    many ranks, or an assumption where it was not."""
    if text == LOCAL:
        ranks = devices if devices is not None else usable_cores()
        calibration = calibration_file(ranks)
        return load_calibration(calibration, ranks) if calibration.is_file() else local(devices)
    found = preset(text) if text in preset_names() else _from_file(text)
    return found if devices is None else found.with_size(devices)


@cache
def efficiency_data(device: str) -> Mapping[str, Any] | None:
    """The fitted efficiency curves that come with Fourfold for a kind of device, as their file has them; None if none do."""
    file = next((entry for entry in _folder().iterdir() if entry.name == f"{device}.json"), None)  # a name, never a path
    data: Mapping[str, Any] | None = json.loads(file.read_text()) if file is not None else None
    return data


def _from_file(text: str) -> Cluster:
    path = Path(text)
    if path.suffix != ".toml" and not path.is_file():
        known = (*preset_names(), LOCAL)
        hint = nearest(text, known) or f"; there are {', '.join(known)}, and files that end in .toml"
        raise InvalidInput(f"unknown cluster {text!r}{hint}")
    return load_cluster(path)


def _folder() -> Traversable:
    return files("fourfold.cluster") / "presets"
