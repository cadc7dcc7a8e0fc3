"""Every op on every split, 2 to 4 ranks, against eager float64; see `matrix` for what ok means.

Cases of a family run together in one call of the pooled workers, when the first of its tests asks. A case runs in each of its
columns on one of its rank counts, by turns; on all of them in the test marked slow.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fourfold.plans import lower
from matrix import TOLERANCE, Case, Cell, Column, Fn, Prepared, every_pair, judged
from op_matrix_page import CASES, PAGE, load, page

BY_NAME = {case.name: case for case in CASES}
PLACES = {name: place for place, name in enumerate(BY_NAME)}


def pairs_by_turns(case: Case) -> list[tuple[str, int]]:
    """Each column on one rank count; the next column, and the next case, on the next one."""
    counts = case.ranks
    return [(column, counts[(PLACES[case.name] + k) % len(counts)]) for k, column in enumerate(case.columns)]


def assert_as_recorded(cells: list[Cell]) -> None:
    recorded = load()
    for cell in cells:
        assert cell.status == BY_NAME[cell.case].columns[cell.column].expect, f"{cell.key}: {cell.status}, {cell.detail}"
        assert cell.error <= TOLERANCE
        assert [cell.status, cell.forward, cell.backward, cell.limit] == recorded.get(cell.key), (
            f"{cell.key} is not what the results file says; run python tests/support/op_matrix_page.py"
        )


@pytest.fixture(scope="session")
def cells_of(request: pytest.FixtureRequest) -> Callable[[Case], list[Cell]]:
    """Gives the cells of a case; runs all selected cases of its family at once."""
    selected = [item.callspec.params["name"] for item in request.session.items if "name" in getattr(item, "fixturenames", ())
                and getattr(item, "originalname", "") == "test_op_equals_eager_on_every_split"]  # fmt: skip
    done: dict[str, list[Cell]] = {}

    def cells(case: Case) -> list[Cell]:
        if case.name not in done:
            family = [BY_NAME[name] for name in selected if BY_NAME[name].family == case.family]
            found = judged(family, pairs_by_turns)
            done.update({other.name: [cell for cell in found if cell.case == other.name] for other in family})
        return done[case.name]

    return cells


def test_case_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", BY_NAME)
def test_op_equals_eager_on_every_split(name: str, cells_of: Callable[[Case], list[Cell]]) -> None:
    cells = cells_of(BY_NAME[name])
    assert {cell.column for cell in cells} == set(BY_NAME[name].columns)
    assert_as_recorded(cells)


@pytest.mark.slow
@pytest.mark.parametrize("family", dict.fromkeys(case.family for case in CASES))
def test_ops_of_a_family_equal_eager_on_every_split_and_rank_count(family: str) -> None:
    cases = [case for case in CASES if case.family == family]
    cells = judged(cases)
    assert len(cells) == sum(len(every_pair(case)) for case in cases)
    assert_as_recorded(cells)


def test_by_turns_a_case_of_several_columns_is_tried_on_several_rank_counts() -> None:
    for case in CASES:
        tried = pairs_by_turns(case)
        assert [column for column, _ in tried] == list(case.columns)
        assert len({ranks for _, ranks in tried}) == min(len(case.ranks), len(case.columns)), case.name


def test_a_wrong_number_and_a_gathered_tensor_are_seen() -> None:
    case = Case(
        row="", name="sorted", op=lambda: Fn(lambda m, x: x.sort(1)[0]), shapes=((2, 4),), columns={"filter": Column(dim=1)}
    )
    item = Prepared(case)
    program = lower(item.graph, item.plan(case.columns["filter"], 2))
    assert item.cell("filter", 2, program, item.alone).status == "whole"
    next(iter(item.alone.gradients.values()))[0, 0] += 1e-6
    assert item.cell("filter", 2, program, item.alone).status == "wrong"


def test_every_row_of_the_peers_table_is_ok_in_every_column() -> None:
    rows = {
        "conv 3 pad 1", "conv 3 stride 2", "conv 3 pad 0", "conv 3 dilation 2", "conv 4 stride 2 (even kernel)",
        "transposed conv k2 s2", "transposed conv k3", "batch norm", "group norm", "instance norm", "max pool 3 stride 2 pad 1",
        "bilinear upsample", "global average pool", "reflect / circular padding", "conv 3 reflect padding",
        "conv 3 circular padding", "width 15 (uneven)", "stride 2 on odd shards 9+9", "halo wider than a neighbour's shard",
    }  # fmt: skip
    recorded = load()
    assert rows <= {case.row for case in CASES}
    for case in CASES:
        if case.row in rows:
            wanted = [f"{case.name} | {column} | {ranks}" for column in case.columns for ranks in case.ranks]
            assert [recorded[key][0] for key in wanted] == ["ok"] * len(wanted), case.name


def test_page_says_what_the_results_say() -> None:
    assert PAGE.read_text() == page(CASES, load()), "docs/op-matrix.md is stale; run python tests/support/op_matrix_page.py"


def test_what_runs_whole_says_why() -> None:
    for case in CASES:
        assert all(column.why for column in case.columns.values() if column.expect != "ok"), case.name
