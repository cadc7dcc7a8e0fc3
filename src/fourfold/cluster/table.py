"""The tables of a cluster file, whose numbers carry their unit in the key; and tables written back as TOML text.

The standard library reads TOML and does not write it. What is written here is the little a cluster needs: tables and
arrays of tables that hold texts, numbers, flags and lists of numbers.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.cluster.parts import Sources
from fourfold.cluster.quantity import Quantity
from fourfold.errors import InvalidInput
from fourfold.files import read_text
from fourfold.table import Table

SOURCE = "source"
MOST_BYTES = 2**20  # of a file; a calibration of 16 ranks has 50 KiB
DOTS_IN_A_LINE, DOTS = 1_000, 65_536
LONGEST_REASON = 300  # characters of what Python's reader says, which repeats keys
POINTS = 1_000  # of a curve
TINIEST, LARGEST = 1e-15, 1e24  # SI; beyond them times would be infinite or zero


@dataclass(frozen=True, slots=True)
class ClusterTable(Table):
    """A table of a cluster file: numbers may carry their unit, and a `source` stand beside them."""

    def check_keys(self, plain: Iterable[str], quantities: Sequence[Quantity] = ()) -> None:
        """Refuse keys that mean nothing here."""
        plain = list(plain)
        known = {*plain, SOURCE, *(key for q in quantities for key in (*q.keys, f"{q.name}_source"))}
        known |= {f"{key}_source" for key in plain}
        for key in self.data:
            if key not in known:
                self.fail(key, _unit_hint(key, quantities) or self._unknown(key, known))

    def amount(self, quantity: Quantity, default: float | None = None) -> float:
        """A quantity in SI, under whichever of its units it was written."""
        key = self._key(quantity)
        if key is None:
            if default is None:
                self.fail(quantity.keys[0], f"is missing; give it in one of {', '.join(quantity.units)}")
            return default
        return self._to_si(quantity, key, self.data[key])

    def amounts(self, quantity: Quantity) -> tuple[float, ...]:
        """A list of quantities, empty if it is not there."""
        key = self._key(quantity)
        if key is None:
            return ()
        return tuple(self._to_si(quantity, key, value) for value in self.entries(key, "numbers", POINTS))

    def sources(self) -> Sources:
        end = f"_{SOURCE}"
        single = tuple(sorted((key.removesuffix(end), self.text(key, lines=True)) for key in self.data if key.endswith(end)))
        return Sources(whole=self.text(SOURCE, "", lines=True), single=single)

    def _list_error(self, key: str, found: Any) -> str:
        return f"must be written as [[{key}]]"

    def _table_error(self, key: str, found: Any) -> str:
        return f"must be written as [{key}.<name>]"

    def _key(self, quantity: Quantity) -> str | None:
        found = [key for key in quantity.keys if key in self.data]
        if len(found) > 1:
            self.fail(found[1], f"stands beside {found[0]}; give one of them")
        return found[0] if found else None

    def _to_si(self, quantity: Quantity, key: str, value: Any) -> float:
        number = self._number(key, value)
        if number < 0 or (number == 0 and not quantity.zero):
            self.fail(key, f"is {number:g}, it must {'not be negative' if quantity.zero else 'be positive'}")
        if number and not TINIEST <= number * float(quantity.factor(key)) <= LARGEST:
            self.fail(key, f"is {number:g}, which is beyond any machine; check its unit")
        return quantity.si(key, number)


def _unit_hint(key: str, quantities: Sequence[Quantity]) -> str:
    """What is wrong with a key that is a quantity's but for its unit; nothing, if it is not."""
    for quantity in quantities:
        if key == quantity.name:
            return f"has no unit; write {', '.join(quantity.keys[:4])}..."
        if key.startswith(f"{quantity.name}_"):
            return f"has no unit known here; write {', '.join(quantity.keys)}"
    return ""


def read_table(path: Path) -> ClusterTable:
    """A whole file."""
    try:
        text = read_text(path, most=MOST_BYTES)
        _check_dots(text)
        return ClusterTable(str(path), "", tomllib.loads(text))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise InvalidInput(f"{path}: is no TOML that a cluster needs: its values nest too deep") from None
    except ValueError as error:  # TOML's own errors, and numbers with thousands of digits
        raise InvalidInput(f"{path}: is no TOML: {str(error)[:LONGEST_REASON]}") from None


def _check_dots(text: str) -> None:
    """Refuse dotted keys without end: Python's reader takes kilobytes for every dot, and the square of those in one key."""
    lines = [line.count(".") for line in text.splitlines()]
    if max(lines, default=0) > DOTS_IN_A_LINE or sum(lines) > DOTS:
        raise ValueError(f"it has more than {DOTS_IN_A_LINE:,} dots in a line, or {DOTS:,} in all")


def toml_text(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """TOML of nested mappings, lists of mappings and plain values; plain ones come first in each table, empty lists go."""
    lines = [f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in data.items() if not _is_nested(value)]
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            head = f"\n[{_dotted(here)}]\n" if any(not _is_nested(v) for v in value.values()) else ""
            lines.append(head + toml_text(value, here))
        elif _is_nested(value):
            lines += [f"\n[[{_dotted(here)}]]\n{toml_text(entry, here)}" for entry in value]
    return "".join(lines)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value))


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(_toml_key(part) for part in path)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(entry) for entry in value)}]"
    return repr(value)
