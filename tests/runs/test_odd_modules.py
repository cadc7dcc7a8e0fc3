"""Odd modules trained by each strategy give the numbers of plain PyTorch, or are refused in one line that names the reason.

Every row runs by data; filter and pipeline take turns from row to row, and the other of them is marked slow.
"""

from __future__ import annotations

from functools import cache

import pytest

from odd_modules import ROWS, STRATEGIES, Outcome, fault, outcome, verified, verify_fault

FEW = [row for row in ROWS.values() if row.verify]
DATA, *OTHERS = STRATEGIES
CELLS = [
    pytest.param(name, strategy, marks=[] if strategy in (DATA, OTHERS[k % len(OTHERS)]) else [pytest.mark.slow])
    for k, name in enumerate(ROWS)
    for strategy in STRATEGIES
]


@cache
def trained(name: str, strategy: str) -> Outcome:
    return outcome(ROWS[name], strategy)


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_an_odd_module_trains_as_plain_pytorch_does_or_is_refused_by_name(name: str, strategy: str) -> None:
    found = trained(name, strategy)
    assert not fault(ROWS[name], found), f"{found}; {fault(ROWS[name], found)}"


@pytest.mark.parametrize("name", [row.name for row in FEW])
def test_verify_says_of_an_odd_module_what_plain_pytorch_says(name: str) -> None:
    said = verified(ROWS[name])
    assert not verify_fault(trained(name, "data"), said), f"{said}; {verify_fault(trained(name, 'data'), said)}"


def test_the_table_has_forty_rows_and_more() -> None:
    assert len(ROWS) >= 40
