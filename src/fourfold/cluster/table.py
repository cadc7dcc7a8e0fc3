"""A table of a TOML file, read key by key with errors that name file, key and reason; and tables written back as text.

The standard library reads TOML and does not write it. What is written here is the little a cluster needs: tables and
arrays of tables that hold texts, numbers, flags and lists of numbers.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fourfold.cluster.parts import Sources
from fourfold.cluster.quantity import Quantity
from fourfold.errors import InvalidInput, nearest

SOURCE = "source"


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its place in a file."""

    file: str
    path: str  # as it is written: device.v100, link 2
    data: Mapping[str, Any]

    def fail(self, key: str, reason: str) -> NoReturn:
        place = f"{self.path}: {key}" if self.path and key else self.path or key
        raise InvalidInput(f"{self.file}: {place}: {reason}")

    def check(self, plain: Iterable[str], quantities: Sequence[Quantity] = ()) -> None:
        """Refuse keys that mean nothing here."""
        plain = list(plain)
        known = {*plain, SOURCE, *(key for q in quantities for key in (*q.keys, f"{q.name}_source"))}
        known |= {f"{key}_source" for key in plain}
        for key in self.data:
            if key not in known:
                self.fail(key, _unknown(key, known, quantities))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.fail(key, f"is {_shown(value)}, a text is needed")
        return value

    def chosen(self, key: str, choices: Sequence[str]) -> str:
        value = self.text(key)
        if value not in choices:
            self.fail(key, f"is {value!r}, it must be one of {', '.join(choices)}{nearest(value, choices)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, f"is {_shown(value)}, true or false is needed")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1, unless the default is less."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"is {_shown(value)}, a whole number is needed")
        if value < 1 and key in self.data:
            self.fail(key, f"is {value}, it must be at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self._number(key, self._value(key, default))

    def amount(self, quantity: Quantity, default: float | None = None) -> float:
        """A quantity in SI, under whichever of its units it was written."""
        key = self._key(quantity)
        if key is None:
            if default is None:
                self.fail(quantity.keys[0], f"is missing; give it in one of {', '.join(quantity.units)}")
            return default
        return self._scaled(quantity, key, self.data[key])

    def amounts(self, quantity: Quantity) -> tuple[float, ...]:
        """A list of quantities, empty if it is not there."""
        key = self._key(quantity)
        values = [] if key is None else self.data[key]
        if not isinstance(values, list):
            self.fail(str(key), f"is {_shown(values)}, a list of numbers is needed")
        return tuple(self._scaled(quantity, str(key), value) for value in values)

    def tables(self, key: str) -> list[Table]:
        """The entries of an array of tables."""
        found = self.data.get(key, [])
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            self.fail(key, f"must be written as [[{key}]]")
        return [Table(self.file, f"{key} {i}", entry) for i, entry in enumerate(found, start=1)]

    def named_tables(self, key: str) -> dict[str, Table]:
        """The tables below a table, by name."""
        found = self.data.get(key, {})
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            self.fail(key, f"must be written as [{key}.<name>]")
        return {name: Table(self.file, f"{key}.{name}", entry) for name, entry in found.items()}

    def sources(self) -> Sources:
        end = f"_{SOURCE}"
        single = tuple(sorted((key.removesuffix(end), self.text(key)) for key in self.data if key.endswith(end)))
        return Sources(whole=self.text(SOURCE, ""), single=single)

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.data and default is None:
            self.fail(key, "is missing")
        return self.data.get(key, default)

    def _key(self, quantity: Quantity) -> str | None:
        found = [key for key in quantity.keys if key in self.data]
        if len(found) > 1:
            self.fail(found[1], f"stands beside {found[0]}; give one of them")
        return found[0] if found else None

    def _scaled(self, quantity: Quantity, key: str, value: Any) -> float:
        number = self._number(key, value)
        if number < 0 or (number == 0 and not quantity.zero):
            self.fail(key, f"is {number:g}, it must {'not be negative' if quantity.zero else 'be positive'}")
        return quantity.si(key, number)

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(key, f"is {_shown(value)}, a number is needed")
        return value


def _unknown(key: str, known: Iterable[str], quantities: Sequence[Quantity]) -> str:
    for quantity in quantities:
        if key == quantity.name:
            return f"has no unit; write {', '.join(quantity.keys[:4])}..."
        if key.startswith(f"{quantity.name}_"):
            return f"has no unit known here; write {', '.join(quantity.keys)}"
    return f"is no key here{nearest(key, known)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return repr(value) if isinstance(value, str | float) else str(value).lower()


def read_table(path: Path) -> Table:
    """A whole file."""
    try:
        return Table(str(path), "", tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: is no UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path}: is no TOML: {error}") from None


def toml_text(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """TOML of nested mappings, lists of mappings and plain values; plain ones come first in each table, empty lists go."""
    lines = [f"{_name(key)} = {_plain(value)}\n" for key, value in data.items() if not _is_nested(value)]
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
    return ".".join(_name(part) for part in path)


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _plain(key)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_plain(entry) for entry in value)}]"
    return repr(value)
