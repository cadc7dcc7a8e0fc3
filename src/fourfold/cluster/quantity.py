"""Numbers in files carry their unit in the key: `memory_GiB`, `latency_us`. This is the one place that converts them.

Reading multiplies once. Writing picks the unit with the shortest number of those that read back to exactly the same float;
the SI unit always does.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

_KILO, _KIBI = Fraction(1000), Fraction(1024)
_BYTES = {
    "GiB": _KIBI**3,
    "MiB": _KIBI**2,
    "KiB": _KIBI,
    "TB": _KILO**4,
    "GB": _KILO**3,
    "MB": _KILO**2,
    "kB": _KILO,
    "bytes": Fraction(1),
}
_SECONDS = {"us": 1 / _KILO**2, "ms": 1 / _KILO, "ns": 1 / _KILO**3, "s": Fraction(1)}
_BYTES_PER_SECOND = {  # B is a byte, b is a bit
    "GBps": _KILO**3,
    "TBps": _KILO**4,
    "MBps": _KILO**2,
    "Gbps": _KILO**3 / 8,
    "Mbps": _KILO**2 / 8,
    "Bps": Fraction(1),
}
_FLOPS = {"TFLOPs": _KILO**4, "PFLOPs": _KILO**5, "GFLOPs": _KILO**3, "FLOPs": Fraction(1)}  # per second
_DIGITS = 12  # of a number that a person might have written


@dataclass(frozen=True, slots=True)
class Quantity:
    """A name and the units it may be written in, the usual one first; the last has factor 1."""

    name: str
    units: dict[str, Fraction]
    zero: bool = False  # whether 0 is a value

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{unit}" for unit in self.units)

    def factor(self, key: str) -> Fraction:
        """What one of the unit that a key names is in SI."""
        return self.units[key.removeprefix(f"{self.name}_")]

    def si(self, key: str, number: float) -> float:
        """What a written number means. Rounded once, so that 5 us is the same float as 5e-6."""
        return float(Fraction(repr(number)) * self.factor(key))

    def key_and_numbers(self, *values: float) -> tuple[str, list[float]]:
        """The key and the numbers that stand for SI values, all in one unit."""
        exact = {self.keys[-1]: list(values)}
        for key, factor in zip(self.keys, self.units.values(), strict=True):
            scaled = [_short(value / float(factor)) for value in values]
            if all(self.si(key, number) == value for number, value in zip(scaled, values, strict=True)):
                exact[key] = scaled
        return min(exact.items(), key=lambda entry: len(str(entry[1])))


def _short(number: float) -> float:
    rounded = float(f"{number:.{_DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


MEMORY = Quantity("memory", _BYTES)
ON_CHIP = Quantity("on_chip", _BYTES, zero=True)
BANDWIDTH = Quantity("bandwidth", _BYTES_PER_SECOND)
LATENCY = Quantity("latency", _SECONDS, zero=True)
LAUNCH = Quantity("launch", _SECONDS, zero=True)
PACE = Quantity("pace", _SECONDS, zero=True)
SIZE = Quantity("size", {"bytes": Fraction(1)})
TIME = Quantity("time", _SECONDS)
SPREAD = Quantity("spread", _SECONDS, zero=True)
COMPUTING = Quantity("computing", _SECONDS)


def update(optimizer: str) -> Quantity:
    """Bytes of parameters that one rank updates in a second."""
    return Quantity(f"update_{optimizer}", _BYTES_PER_SECOND)


def rate(precision: str) -> Quantity:
    """Peak work per second in one precision."""
    return Quantity(f"rate_{precision}", _FLOPS)
