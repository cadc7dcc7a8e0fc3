"""Quantities as text for people: one decimal and the unit that keeps the number short.

Inside, everything is SI (seconds, bytes, FLOPs) and unrounded; this is for the eye only. Nothing here reads
text back.
"""

from collections.abc import Sequence
from math import isfinite

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_COUNTS = ("", "k", "M", "B", "T")  # people count parameters in billions, not in giga


def bytes_text(size: float) -> str:
    """Bytes in powers of 1024: `bytes_text(1536)` is '1.5 KiB'."""
    return _scaled(size, 1024, _BINARY)


def count_text(count: float) -> str:
    """How many: `count_text(1_200_000)` is '1.2 M'."""
    return _scaled(count, 1000, _COUNTS)


def flops_text(flops: float) -> str:
    """Work, not a rate: `flops_text(4.1e9)` is '4.1 GFLOP'."""
    return _scaled(flops, 1000, [f"{prefix}FLOP" for prefix in _DECIMAL])


def seconds_text(seconds: float) -> str:
    """A duration: '12.5 us', '348.0 ms', '1.3 s', '3 min 20 s', '2 h 05 min'."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds == 0 or not isfinite(seconds):
        return f"{seconds:g} s"
    if round(seconds, 1) < 60:
        # Counted in nanoseconds, so that one rule picks the unit.
        return _scaled(seconds * 1e9, 1000, ("ns", "us", "ms", "s"))
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02d} min"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """The value in the first unit in which it prints below `base`, or else in the last."""
    if not isfinite(value):
        return f"{value:g} {units[0]}".rstrip()
    power = 0
    while round(abs(value), 1) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = 0 if power == 0 and value == round(value) else 1
    return f"{value:.{digits}f} {units[power]}".rstrip()
