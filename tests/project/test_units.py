"""Quantities as text: the unit keeps the number short, and rounding never shows 1024 KiB."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.units import bytes_text, count_text, flops_text, seconds_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (91.3 * 2**30, "91.3 GiB"),
        (-(2**20), "-1.0 MiB"),
        (2**70, "1048576.0 PiB"),
        (float("inf"), "inf B"),
    ],
)
def test_bytes_come_in_powers_of_1024(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (999, "999"), (1_200_000, "1.2 M"), (25_557_032, "25.6 M"), (6.7e9, "6.7 B"), (0.5, "0.5")],
)
def test_counts_come_in_powers_of_1000(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(("flops", "text"), [(0, "0 FLOP"), (4.1e9, "4.1 GFLOP"), (2.5e12, "2.5 TFLOP"), (3e18, "3.0 EFLOP")])
def test_flops_carry_their_prefix(flops: float, text: str) -> None:
    assert flops_text(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-10, "0.5 ns"),
        (12.5e-6, "12.5 us"),
        (0.348, "348.0 ms"),
        (1.3, "1.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (-0.002, "-2.0 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds_read_as_a_person_says_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("almost", "text"),
    [(bytes_text(2**20 - 1), "1.0 MiB"), (count_text(999_999), "1.0 M"), (seconds_text(0.99999), "1.0 s")],
)
def test_rounding_up_moves_to_the_next_unit(almost: str, text: str) -> None:
    assert almost == text


@given(st.floats(min_value=0, max_value=2**59))
def test_every_size_prints_below_the_next_unit(size: float) -> None:
    number = re.fullmatch(r"([0-9.]+) (B|[KMGTP]iB)", bytes_text(size))
    assert number is not None
    assert float(number[1]) < 1024


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_printed_seconds_stay_within_their_rounding(seconds: float) -> None:
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    parts = re.findall(r"([0-9.]+) (ns|us|ms|s|min|h)\b", seconds_text(seconds))
    smallest = scale[parts[-1][1]]
    read = sum(float(number) * scale[unit] for number, unit in parts)
    assert read == pytest.approx(seconds, rel=1e-9, abs=0.51 * smallest)
