"""Result files: JSON with one row a line, numbers of six digits, so that they stay small and a diff shows rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.files import write_file

RESULTS = Path(__file__).parent / "results"
SPECS = ("operands", "results")
DIGITS = 6  # significant ones: two repetitions differ in the third


def write_record(path: Path, data: Mapping[str, Any]) -> None:
    """Write a record whole."""
    write_file(path, record_text(data))


def record_text(data: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and for each item of a list."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items()) + "\n}\n"


def kernel_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Timed kernels as a table that names its columns once, tensors as "2x3:float32"."""
    columns = [key for key in rows[0] if not key.endswith("_extra")]
    return {"columns": columns, "rows": [[_cell(key, row.get(key)) for key in columns] for row in rows]}


def kernel_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kernels of such a table, as `fourfold.oracle.prices.fitting` reads them."""
    return [{key: _read(key, cell) for key, cell in zip(record["columns"], row, strict=True)} for row in record["rows"]]


def _cell(key: str, value: Any) -> Any:
    if key in SPECS:
        return " ".join(f"{'x'.join(map(str, shape))}:{dtype}" for shape, dtype in value)
    return "".join("g" if wanted else "-" for wanted in value) if key == "gradients" else value


def _read(key: str, cell: Any) -> Any:
    if key in SPECS:
        parts = (text.split(":") for text in cell.split())
        return [[[int(size) for size in shape.split("x") if size], dtype] for shape, dtype in parts]
    return [mark == "g" for mark in cell] if key == "gradients" else cell


def _lines(value: Any) -> str:
    if isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in value):
        return "[\n" + ",\n".join(_compact(item) for item in value) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
