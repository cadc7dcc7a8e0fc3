"""`fourfold clusters`: its table, its JSON, its errors, and the example of its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import run
from fourfold.cluster import cluster_named, load_cluster, preset_names

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert run(["clusters", *arguments]) == code
    return capsys.readouterr()


@pytest.mark.parametrize("arguments", [[], *([name] for name in (*preset_names(), "local"))])
def test_what_is_printed_fits_a_page(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, *arguments)
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    assert all(name in out for name in arguments or preset_names())
    assert "not stated" not in out


def test_the_record_of_all_has_every_number_in_si_units(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, "--json")
    records = {record["name"]: record for record in json.loads(out)["clusters"]}
    assert set(records) == {*preset_names(), "local"}
    abci = records["abci"]
    assert abci["devices"] == 4352 and abci["device_kinds"][0]["flops_per_second"]["fp32"] == 15.7e12
    assert abci["links"][1]["bandwidth_bytes_per_second"] == 12.5e9 and abci["links"][2]["joins_nodes"] is None
    assert abci["nodes"][0]["devices_per_node"] == 4 and "assumed" in abci["device_kinds"][0]["sources"]["launch"]


def test_the_record_of_one_is_a_list_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, "vcu118", "--json")
    (record,) = json.loads(out)["clusters"]
    assert record["device_kinds"][0]["asynchronous"] is True and record["links"][0]["latency_seconds"] == 1e-6


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, "dgx-h10", code=2)
    assert err == "fourfold: unknown cluster 'dgx-h10'; did you mean 'dgx-h100'?\n"
    (tmp_path / "bad.toml").write_text("version = 1\nname = 3\n")
    _, err = said(capsys, str(tmp_path / "bad.toml"), code=2)
    assert err == f"fourfold: {tmp_path}/bad.toml: name: is 3, a text is needed\n"


def test_the_pages_example_is_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
    path = tmp_path / "lab.toml"
    path.write_text(example)
    lab = load_cluster(path)
    assert lab.capacity == 8 and [link.name for link in lab.links] == ["nvlink", "ethernet"] and lab.ports(0, 1) == 1
    out, _ = said(capsys, str(path))
    assert "not stated" in out  # where the nodes come from


def test_the_pages_lines_of_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["cluster"] == cluster_named("abci", devices=64)


def test_the_page_names_every_preset_key() -> None:
    page = PAGE.read_text()
    for key in (
        "devices_per_node",
        "shared_by",
        "oversubscription",
        "asynchronous",
        "on_chip_MiB",
        "cores",
        "launch_us",
        "kernels",
    ):
        assert f"`{key}`" in page


def test_clusters_does_not_load_torch() -> None:
    script = "import sys; from fourfold.cli.main import run\nsys.exit(run(['clusters', '--json']) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
