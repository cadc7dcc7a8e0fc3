"""Pictures: drawn into the file asked for, refused in one line where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.cli.main import run

SMALL = "gpt2,layers=2,width=48,heads=6,length=16,vocabulary=101"


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_steps_and_scaling_are_drawn(tmp_path: Path, ending: str, start: bytes) -> None:
    step, curves = tmp_path / f"step.{ending}", tmp_path / f"curves.{ending}"
    where = ["--cluster", "ethernet-10g", "--batch", "8"]
    assert run(["plan", SMALL, *where, "--devices", "2", "--strategy", "pipeline", "--plot", str(step)]) == 0
    few = ["--strategy", "data", "--strategy", "filter"]
    assert run(["simulate", SMALL, *where, "--devices", "1,2,4", *few, "--plot", str(curves)]) == 0
    assert step.read_bytes().startswith(start) and curves.read_bytes().startswith(start)


def test_an_ending_nobody_draws_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", SMALL, "--devices", "2", "--strategy", "pipeline", "--batch", "8", "--plot", str(tmp_path / "a.gif")]
    assert run(asked) == 2
    assert "its ending is '.gif'; use .png, .svg, .pdf" in capsys.readouterr().err
