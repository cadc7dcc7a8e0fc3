"""Cluster files: round trips, units in keys, a source beside every number, refusals that name file, key and reason."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cluster import (
    Cluster,
    Curve,
    Device,
    Link,
    Measured,
    Nodes,
    Sources,
    Waits,
    cluster_named,
    cluster_text,
    load_cluster,
    local,
    preset,
    preset_names,
    save_cluster,
)  # fmt: skip
from fourfold.cluster.table import toml_text
from fourfold.errors import Error, InvalidInput

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "src" / "fourfold" / "cluster" / "presets"
PLAIN_NUMBERS = {"version"}  # say nothing about a machine

GOOD = """
version = 1
name = "two"
[device.gpu]
kind = "gpu"
memory_GiB = 16
bandwidth_GBps = 900
rate_fp32_TFLOPs = 15.7
[[nodes]]
count = 2
device = "gpu"
devices_per_node = 4
[[link]]
name = "nvlink"
nodes = 1
latency_us = 20
bandwidth_GBps = 50
[[link]]
name = "ethernet"
latency_us = 50
bandwidth_Gbps = 25
shared_by = 4
"""
CURVE = """
[[measured]]
collective = "all_reduce"
level = "nvlink"
ranks = 4
size_bytes = [1024, 1048576]
time_us = [50, 400.5]
spread_us = [2, 10]
[[waits]]
level = "ethernet"
ranks = 2
groups = 2
computing_ms = [3, 12]
time_ms = [1.5, 3]
"""


def read(text: str, tmp_path: Path) -> Cluster:
    (tmp_path / "c.toml").write_text(text)
    return load_cluster(tmp_path / "c.toml")


def through_file(cluster: Cluster, tmp_path: Path) -> Cluster:
    save_cluster(cluster, tmp_path / "again.toml")
    return load_cluster(tmp_path / "again.toml")


def test_units_are_converted_once(tmp_path: Path) -> None:
    found = read(GOOD + CURVE, tmp_path)
    (gpu,) = found.kinds
    assert (gpu.memory, gpu.bandwidth, gpu.rate("fp32")) == (16 * 2**30, 900e9, 15.7e12)
    assert [(link.latency, link.bandwidth) for link in found.links] == [(20e-6, 50e9), (50e-6, 25e9 / 8)]
    (curve,) = found.measured.curves
    assert (curve.sizes, curve.seconds, curve.spreads) == ((1024, 2**20), (50e-6, 400.5e-6), (2e-6, 10e-6))
    assert found.size == found.capacity == 8


@pytest.mark.parametrize("name", [*preset_names(), "local"])
def test_every_preset_survives_its_file(name: str, tmp_path: Path) -> None:
    cluster = cluster_named(name)
    assert through_file(cluster, tmp_path) == cluster


def test_how_many_devices_are_in_use_survives_the_file(tmp_path: Path) -> None:
    assert through_file(preset("abci").with_size(6), tmp_path).size == 6


positive = st.floats(1e-9, 1e18)
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), max_size=20)


@given(amounts=st.lists(positive, min_size=7, max_size=7), rising=st.sets(positive, min_size=2, max_size=5), text=texts)
def test_any_numbers_and_texts_survive_exactly(tmp_path_factory, amounts: list[float], rising: set[float], text: str) -> None:
    memory, bandwidth, rate, launch, latency, speed, over = amounts
    sources = Sources(whole=text, single=(("bandwidth", text),))
    curve = Curve(collective="send", level=text, ranks=2, sizes=tuple(sorted(rising)), seconds=tuple(rising), source=text)
    waits = Waits(level=text, ranks=2, computing=tuple(sorted(rising)), seconds=tuple(rising), source=text)
    cluster = Cluster(
        name=text,
        about=text,
        kinds=(Device(name=text, kind="fpga", memory=memory, bandwidth=bandwidth, rates=(("bf16", rate),), launch=launch,
                      asynchronous=True, on_chip=memory, sources=sources),),
        nodes=(Nodes(count=2, device=text, devices=1),),
        links=(Link(name=text, latency=latency, bandwidth=speed, oversubscription=1 + over, sources=sources),),
        measured=Measured(curves=(curve,), waits=(waits,), kernels=text),
        size=1,
    )  # fmt: skip
    assert through_file(cluster, tmp_path_factory.getbasetemp()) == cluster


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("memory_GiB = 16", "memory = 16"), r"device\.gpu: memory: has no unit; write memory_GiB, "),
        (("memory_GiB = 16", "memory_Gib = 16"), r"device\.gpu: memory_Gib: has no unit known here; write memory_GiB, "),
        (("memory_GiB = 16", "memory_GiB = 16\nmemory_GB = 17"), r"memory_GB: stands beside memory_GiB; give one"),
        (("memory_GiB = 16", ""), r"device\.gpu: memory_GiB: is missing; give it in one of GiB, "),
        (("memory_GiB = 16", "memory_GiB = -16"), r"device\.gpu: memory_GiB: is -16, it must be positive"),
        (("memory_GiB = 16", "memory_GiB = 0"), r"device\.gpu: memory_GiB: is 0, it must be positive"),
        (("memory_GiB = 16", 'memory_GiB = "16"'), r"device\.gpu: memory_GiB: is '16', a number is needed"),
        (("memory_GiB = 16", "memory_GiB = nan"), r"memory_GiB: is nan, a number is needed"),
        (("memory_GiB = 16", "memory_GiB = true"), r"memory_GiB: is true, a number is needed"),
        (("memory_GiB = 16", "memroy_GiB = 16"), r"memroy_GiB: is no key here; did you mean 'memory_GiB'"),
        (("rate_fp32_TFLOPs = 15.7", "rate_fp32 = 15.7"), r"rate_fp32: has no unit; write rate_fp32_TFLOPs"),
        (("rate_fp32_TFLOPs = 15.7", ""), r"device 'gpu' has no rate"),
        (('kind = "gpu"', 'kind = "gpus"'), r"kind: is 'gpus', it must be one of gpu, cpu, fpga; did you mean 'gpu'"),
        (('device = "gpu"', 'device = "gpv"'), r"nodes 1: device: names 'gpv', .*did you mean 'gpu'"),
        (("count = 2", "count = 2.5"), r"nodes 1: count: is 2\.5, a whole number is needed"),
        (("count = 2", "count = 0"), r"nodes 1: count: is 0, it must be at least 1"),
        (("latency_us = 20", "latency_us = -1"), r"link 1: latency_us: is -1, it must not be negative"),
        (("latency_us = 20", ""), r"link 1: latency_us: is missing"),
        (("shared_by = 4", "sharedby = 4"), r"link 2: sharedby: is no key here; did you mean 'shared_by'"),
        (("nodes = 1\n", "nodes = 1\ndevices = 4\n"), r"link 'nvlink' joins 4 devices and 1 nodes"),
        (("version = 1", "version = 2"), r"version: is 2, this Fourfold reads 1"),
        (("version = 1", ""), r"version: is missing"),
        (('name = "two"', 'nam = "two"'), r"nam: is no key here; did you mean 'name'"),
        (('name = "two"', 'name = "two"\nin_use = 9'), r"has 8 devices, 9 are asked for"),
        (("[[nodes]]", "[nodes]"), r"nodes: must be written as \[\[nodes\]\]"),
        (("[device.gpu]", "[device]"), r"device: must be written as \[device\.<name>\]"),
        (("count = 2", "count = "), r"is no TOML: .*line 10"),
        (("ranks = 4", "ranks = 1"), r"at least 2"),
        (('level = "nvlink"', 'level = "nvlnk"'), r"measured 1: level: names 'nvlnk', which is no link; did you mean 'nvlink'"),
        (("time_us = [50, 400.5]", "time_us = [50]"), r"2 sizes, 1 times"),
        (("time_us = [50, 400.5]", "time_us = 50"), r"measured 1: time_us: is 50, a list of numbers is needed"),
        (('level = "ethernet"', 'level = "ether"'), r"waits 1: level: names 'ether', which is no link; did you mean"),
        (("computing_ms = [3, 12]", "computing = [3, 12]"), r"waits 1: computing: has no unit; write computing_"),
        (("computing_ms = [3, 12]", "computing_ms = [12, 3]"), r"computing times must be positive and rise"),
        (("computing_ms = [3, 12]", "computing_ms = [3]"), r"1 computing times and 2 times"),
        (("ranks = 2", "ranks = 1"), r"waits of 2 groups of 1 ranks over ethernet; at least 2 ranks"),
        (("[[waits]]", CURVE[CURVE.index("[[waits]]") :] + "[[waits]]"), r"waits of 2 groups of 2 ranks .* given twice"),
        (('"all_reduce"', '"allreduce"'), r"collective: is 'allreduce', .*did you mean 'all_reduce'"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_reason(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    text = (GOOD + CURVE).replace(*change)
    assert text != GOOD + CURVE
    with pytest.raises(Error, match=rf"c\.toml: .*{words}") as caught:
        read(text, tmp_path)
    assert str(caught.value).count("c.toml") == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.toml: cannot be read"):
        cluster_named(str(tmp_path / "none.toml"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"b\.toml: is no UTF-8"):
        cluster_named(str(tmp_path / "b.toml"))
    with pytest.raises(InvalidInput, match=r"unknown cluster 'dgx-h10'; did you mean 'dgx-h100'"):
        cluster_named("dgx-h10")


def numbers_without_source(table: dict[str, object]) -> list[str]:
    """The numeric keys of a table that neither their own source nor the table's covers."""
    out = []
    for key, value in table.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in PLAIN_NUMBERS:
            own = [k for k in table if k.endswith("_source") and key.startswith(k.removesuffix("_source"))]
            if not own and not table.get("source"):
                out.append(key)
    return out


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    data = tomllib.loads((PRESETS / f"{name}.toml").read_text())
    assert data["name"] == name and data["about"]
    for table in (data, *data["device"].values(), *data["nodes"], *data["link"]):
        assert not numbers_without_source(table)


@pytest.mark.parametrize("name", [*preset_names(), "local"])
def test_no_source_speaks_of_a_quantity_that_is_not_there(name: str) -> None:
    cluster = cluster_named(name)
    text = cluster_text(cluster)
    for part in (*cluster.kinds, *cluster.nodes, *cluster.links):
        for quantity, _ in part.sources.single:
            assert re.search(rf"^{quantity}(_\w+)? = ", text, re.M) or quantity == "oversubscription"


def test_presets_travel_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["fourfold"]
    for path in PRESETS.iterdir():
        inside = path.relative_to(ROOT / "src" / "fourfold").as_posix()
        assert any(fnmatch(inside, pattern) for pattern in patterns), inside


def test_written_text_is_what_the_standard_library_reads() -> None:
    plain = {"a b": 'tab\t, quote ", \\, \x7f, \x01, 麒', "n": 1.5, "t": True, "l": [1, 2.5]}
    data = {**plain, "x": {"y": {"z": 1}}, "r": [{"k": 1}, {"k": 2}]}
    assert tomllib.loads(toml_text(data)) == data


def test_numbers_are_written_in_the_shortest_unit() -> None:
    text = cluster_text(preset("abci"))
    assert "latency_us = 20\n" in text and "memory_GiB = 15.78\n" in text and "bandwidth_GBps = 900\n" in text
    assert "not calibrated" in cluster_text(local(2))
