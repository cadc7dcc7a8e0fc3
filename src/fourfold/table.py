"""A table of a file, read key by key. Each value must have its type and lie within its bounds; unknown keys are refused.

This is the one reader of plans, run records and clusters. Errors name the file, the place, the key and the reason. It knows
neither JSON nor TOML: both become dicts and lists before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

from fourfold.errors import InvalidInput, nearest
from fourfold.files import LARGEST_WHOLE

LONGEST = 10_000  # characters of a text
NAME = 200  # of a name
MOST = 100_000  # entries of a list
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NO_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its place in a file."""

    file: str
    path: str  # as it is written: device.v100, link 2
    data: Mapping[str, Any]

    def fail(self, key: str, reason: str) -> NoReturn:
        place = f"{self.path}: {key_text(key)}" if self.path and key else self.path or key_text(key)
        raise InvalidInput(f"{self.file}: {place}: {reason}")

    def check(self, known: Collection[str]) -> None:
        """Refuse unknown keys."""
        for key in self.data:
            if key not in known:
                self.fail(key, self._unknown(key, known))

    def text(self, key: str, default: str | None = None, *, most: int = LONGEST, lines: bool = False) -> str:
        """A text of one line, or of several where they are allowed."""
        return self._text(key, self._value(key, default), most, lines)

    def chosen(self, key: str, choices: Sequence[str]) -> str:
        value = self.text(key)
        if value not in choices:
            self.fail(key, f"is {value_text(value)}, it must be one of {', '.join(choices)}{nearest(value, choices)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"is {value_text(value)}, true or false is needed")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_WHOLE) -> int:
        """A whole number within bounds; the default may lie outside."""
        value = self._value(key, default)
        return self._whole(key, value, least, most) if key in self.data else value

    def number(self, key: str, default: float | None = None, *, least: float = -math.inf, most: float = math.inf) -> float:
        value = self._number(key, self._value(key, default))
        if not least <= value <= most:
            self.fail(key, f"is {value:g}, it must be {f'at least {least:g}' if value < least else f'at most {most:g}'}")
        return value

    def texts(self, key: str, *, most: int = MOST) -> tuple[str, ...]:
        """A list of texts, empty if it is not there."""
        return tuple(self._text(key, value, LONGEST) for value in self.entries(key, "texts", most))

    def integers(self, key: str, *, least: int = 0, most: int = LARGEST_WHOLE, count: int = MOST) -> tuple[int, ...]:
        """A list of whole numbers, empty if it is not there."""
        return tuple(self._whole(key, value, least, most) for value in self.entries(key, "whole numbers", count))

    def entries(self, key: str, of: str, most: int = MOST) -> list[Any]:
        """A list of so many entries at most, empty if it is not there."""
        found = self.data.get(key, [])
        if not isinstance(found, list):
            self.fail(key, f"is {value_text(found)}, a list of {of} is needed")
        self._check_count(key, found, most)
        return found

    def tables(self, key: str, *, most: int = MOST) -> list[Self]:
        """The entries of a list of tables, empty if it is not there."""
        found = self.data.get(key, [])
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            self.fail(key, self._list_error(key, found))
        self._check_count(key, found, most)
        return [replace(self, path=self._place(f"{key} {i}"), data=entry) for i, entry in enumerate(found, start=1)]

    def named_tables(self, key: str, *, most: int = MOST) -> dict[str, Self]:
        """The tables below a table, by name."""
        found = self.data.get(key, {})
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            self.fail(key, self._table_error(key, found))
        self._check_count(key, found, most)
        return {
            self._text(key, name, NAME): replace(self, path=self._place(f"{key}.{name}"), data=entry)
            for name, entry in found.items()
        }

    def table(self, key: str) -> Self:
        """The table under a key, empty if it is not there."""
        found = self.data.get(key, {})
        if not isinstance(found, dict):
            self.fail(key, self._table_error(key, found))
        return replace(self, path=self._place(key), data=found)

    def names(self, *, most: int = MOST) -> tuple[str, ...]:
        """The keys, where any name may be one."""
        self._check_count("", self.data, most)
        return tuple(self._text("", key, NAME) for key in self.data)

    def _place(self, below: str) -> str:
        return f"{self.path}.{below}" if self.path else below

    def _unknown(self, key: str, known: Collection[str]) -> str:
        return f"is no key here{nearest(key, known)}"

    def _list_error(self, key: str, found: Any) -> str:
        whole = isinstance(found, list)
        return "has entries that are no objects" if whole else f"is {value_text(found)}, a list of objects is needed"

    def _table_error(self, key: str, found: Any) -> str:
        return "has entries that are no objects" if isinstance(found, dict) else f"is {value_text(found)}, an object is needed"

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.data and default is None:
            self.fail(key, "is missing")
        return self.data.get(key, default)

    def _check_count(self, key: str, found: Collection[Any], most: int) -> None:
        if len(found) > most:
            self.fail(key, f"has {len(found):,} entries, at most {most:,} are read")

    def _text(self, key: str, value: Any, most: int, lines: bool = False) -> str:
        if not isinstance(value, str):
            self.fail(key, f"is {value_text(value)}, a text is needed")
        if len(value) > most:
            self.fail(key, f"is a text of {len(value):,} characters, at most {most:,} are read")
        if found := (_UNPRINTABLE if lines else _NO_LINE).search(value):
            self.fail(key, f"has the character U+{ord(found[0]):04X}, which no text may have")
        return value

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"is {value_text(value)}, a whole number is needed")
        if not least <= value <= most:
            self.fail(key, f"is {value_text(value)}, it must be {f'at least {least}' if value < least else f'at most {most}'}")
        return value

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"is {value_text(value)}, a number is needed")
        if (isinstance(value, int) and abs(value) > LARGEST_WHOLE) or not math.isfinite(value):
            self.fail(key, f"is {value_text(value)}, a number is needed")
        return value


def value_text(value: Any) -> str:
    """A value in an error's line: short, and printable whatever it holds."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return repr(value) if len(value) <= NAME else f"{value[:NAME]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return "a number beyond 64 bits"
    return "null" if value is None else repr(value) if isinstance(value, float) else str(value).lower()


def key_text(key: str) -> str:
    return key if len(key) <= NAME and key.isprintable() else value_text(key)
