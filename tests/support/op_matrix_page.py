"""The op matrix as a page: ``python tests/support/op_matrix_page.py`` tries every cell and writes docs/op-matrix.md and the
results.

The results file is what the tests hold every new run to; the page is made from it and from the cases alone, so a test can
check that the page is current without running anything.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matrix_axes
import matrix_layers
import matrix_losses
import matrix_shapes
import matrix_windows
from matrix import Case, Cell, judged
from ranks import close_pools

FILES = (matrix_windows, matrix_layers, matrix_losses, matrix_shapes, matrix_axes)
CASES: tuple[Case, ...] = tuple(case for file in FILES for case in file.CASES)
RESULTS = Path(__file__).with_name("op_matrix.json")
PAGE = Path(__file__).parents[2] / "docs" / "op-matrix.md"
COLUMNS = ("batch", "filter", "channel", "domain:0", "domain:1", "domain:2", *matrix_axes.PAIRS)
TITLES = {
    "conv": "Convolutions", "pool": "Pooling", "interpolation": "Interpolation", "padding": "Padding", "norm": "Norms",
    "product": "Products", "lookup": "Look-ups", "recurrent": "Recurrent layers", "softmax": "Softmax",
    "attention": "Attention", "loss": "Losses", "shape": "Shapes", "pointwise": "Pointwise", "reduction": "Reductions",
    "thin": "Fewer than ranks", "axes": "Two axes",
}  # fmt: skip

HEAD = """# The op matrix

Every op below ran divided over two and three (some four) ranks, in float64, and gave what eager PyTorch gives on one: the
outputs, the gradients of inputs and parameters, and the running buffers, to 1e-9. **ok** also means that the op ran on its
own shard and that no rank received more than its rule allows, forward or backward: a halo of a window's reach under a domain
split, nothing under a batch split, its share where rows change place, the input once under a filter split, the sum of the
result under a channel split. (The few numbers per row that norms, softmaxes and losses join inside their kernels are not
counted.) **whole** is right too, but a divided input was gathered first: the note says why. An empty field: no such split.

`tests/support/matrix*.py` hold the cases. `tests/ops/test_op_matrix.py` tries every case in every column again, on one of its
rank counts, with `-m slow` on all. This page is made by `python tests/support/op_matrix_page.py`.
"""


def record(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    return {c.key: [c.status, c.forward, c.backward, c.limit] for c in cells}


def save(results: Mapping[str, list[Any]], path: Path = RESULTS) -> None:
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items())
    path.write_text("{\n" + lines + "\n}\n")


def load(path: Path = RESULTS) -> dict[str, list[Any]]:
    return dict(json.loads(path.read_text()))


def page(cases: Sequence[Case], results: Mapping[str, list[Any]]) -> str:
    """The page's text; statuses come from the results, nothing is run."""
    families: dict[str, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        families[case.family][case.row].append(case)
    tried = sum(len(c.columns) * len(c.ranks) for c in cases)
    parts = [HEAD, f"{len(cases)} cases, {tried} cells.\n"]
    parts += [_table(TITLES[family], families[family], results) for family in TITLES if family in families]
    return "\n".join(parts)


def _table(title: str, rows: Mapping[str, list[Case]], results: Mapping[str, list[Any]]) -> str:
    columns = [c for c in COLUMNS if any(c in case.columns for cases in rows.values() for case in cases)]
    lines = [f"## {title}\n", f"| op | cases | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    notes: list[str] = []
    for row, cases in rows.items():
        fields = [_field(cases, column, results, notes) for column in columns]
        lines.append(f"| {row} | {len(cases)} | {' | '.join(fields)} |")
    return (
        "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1)), ""]) if notes else "\n".join([*lines, ""])
    )


def _field(cases: Sequence[Case], column: str, results: Mapping[str, list[Any]], notes: list[str]) -> str:
    """The worst status of a row's cases in one column, with a note for what is not ok."""
    statuses: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        for ranks in case.ranks if column in case.columns else ():
            status = str(results.get(f"{case.name} | {column} | {ranks}", ["not run"])[0])
            if case.name not in statuses[status]:
                statuses[status].append(case.name)
    if not statuses:
        return ""
    texts = ["ok"] if "ok" in statuses else []
    for status, names in statuses.items():
        if status != "ok":
            why = {case.columns[column].why for case in cases if case.name in names}
            note = f"{', '.join(names)}: {'; '.join(sorted(why - {''})) or status}"
            if note not in notes:
                notes.append(note)
            texts.append(f"{status} ({notes.index(note) + 1})")
    return ", ".join(texts)


def main() -> int:
    cells: list[Cell] = []
    for family in TITLES:
        cells += judged([case for case in CASES if case.family == family])
        print(f"{TITLES[family]}: {len(cells)} cells so far", flush=True)
    close_pools()
    expected = {f"{case.name} | {name}": column.expect for case in CASES for name, column in case.columns.items()}
    bad = [c for c in cells if c.status != expected[f"{c.case} | {c.column}"]]
    for cell in bad:
        print(f"{cell.status}: {cell.key}: {cell.detail}", file=sys.stderr)
    order = {case.name: k for k, case in enumerate(CASES)}
    save(record(sorted(cells, key=lambda c: (order[c.case], c.ranks))))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(CASES, load()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
