"""What ranks do in a step is what their lists say: a part of the plans that ``make agree`` compares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agreement import IN_SUITE, Case, close_apart, disagreement


@pytest.fixture(scope="module", autouse=True)
def end_ranks_apart() -> Iterator[None]:
    yield
    close_apart()


@pytest.mark.parametrize("case", IN_SUITE, ids=lambda case: case.name)
def test_a_run_does_what_its_lists_say(case: Case) -> None:
    assert not disagreement(case)
