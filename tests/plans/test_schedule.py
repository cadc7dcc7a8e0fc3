"""Schedules are valid, readable, and take the time and memory that BaPipe's table says."""

from __future__ import annotations

import itertools

import pytest

from fourfold.errors import InvalidInput
from fourfold.plans.spec.schedule import SCHEDULES, Schedule, ScheduleCell, check, schedule_named
from fourfold.plans.spec.schedule_timing import makespan

# N=4 stages, M=32 micro-batches, F=1, B=2, SR=0.5: the event-simulated column of BaPipe's schedules
TABLE = [
    ("1f1b-as", "stream", 105.0),
    ("fbp-as", "stream", 117.0),
    ("1f1b-sno", "blocking", 138.5),
    ("1f1b-so", "overlapped", 108.0),
]


@pytest.mark.parametrize(("name", "transfers", "want"), TABLE)
def test_the_mini_batch_time_is_the_simulated_one(name: str, transfers: str, want: float) -> None:
    schedule = schedule_named(name, 4, 32)
    assert makespan(schedule, [1.0] * 4, [2.0] * 4, 0.5, transfers) == want  # type: ignore[arg-type]


def test_overlap_without_the_longer_warm_up_barely_helps() -> None:
    assert makespan(schedule_named("1f1b-sno", 4, 32), [1.0] * 4, [2.0] * 4, 0.5, "overlapped") == 131.0


@pytest.mark.parametrize(("name", "held"), [("1f1b-as", [4, 3, 2, 1]), ("1f1b-sno", [4, 3, 2, 1]), ("1f1b-so", [7, 5, 3, 1]),
                                            ("fbp-as", [8, 6, 4, 2]), ("gpipe", [32] * 4)])  # fmt: skip
def test_micro_batches_in_flight_follow_the_table(name: str, held: list[int]) -> None:
    schedule = schedule_named(name, 4, 32)
    assert [schedule.in_flight(s) for s in range(4)] == held


@pytest.mark.parametrize(("name", "ranks", "batches"), list(itertools.product(SCHEDULES, [1, 2, 3, 4], [1, 2, 3, 4, 12])))
def test_every_schedule_is_valid(name: str, ranks: int, batches: int) -> None:
    if name == "interleaved" and batches % ranks:
        with pytest.raises(InvalidInput, match="multiple"):
            schedule_named(name, ranks, batches)
        return
    check(schedule_named(name, ranks, batches))


def test_a_pipeline_of_one_stage_has_no_bubble() -> None:
    assert makespan(schedule_named("1f1b-sno", 1, 8), [1.0], [2.0], 0.5, "blocking") == 24.0


def test_interleaving_shrinks_the_bubble() -> None:
    plain = makespan(schedule_named("1f1b-sno", 4, 8), [2.0] * 4, [4.0] * 4, 0.0, "overlapped")
    woven = makespan(schedule_named("interleaved", 4, 8), [1.0] * 8, [2.0] * 8, 0.0, "overlapped")
    assert woven < plain


def test_an_action_is_written_stage_kind_micro_batch() -> None:
    assert [str(ScheduleCell(2, "F", 0)), str(ScheduleCell(11, "B", 7))] == ["2F0", "11B7"]
    assert [str(ScheduleCell(1, "FB", 3, 0)), str(ScheduleCell(1, "FB", -1, -1))] == ["1F3B0", "1-"]


def test_a_bad_schedule_prints_as_a_grid_with_the_faulty_row_marked() -> None:
    good = schedule_named("gpipe", 2, 2)
    rows = (good.rows[0], tuple(reversed(good.rows[1])))
    with pytest.raises(InvalidInput, match=r"(?s)rank 1: 1B1 comes before its forward.*> rank 1"):
        check(Schedule(name="bad", stages=2, microbatches=2, rows=rows))
    with pytest.raises(InvalidInput, match="0F1 is missing"):
        check(Schedule(name="bad", stages=2, microbatches=2, rows=(good.rows[0][:1] + good.rows[0][2:], good.rows[1])))


def test_a_schedule_that_waits_for_ever_is_refused() -> None:
    good = schedule_named("1f1b-sno", 2, 2)
    first = (ScheduleCell(0, "F", 0), ScheduleCell(0, "B", 0), ScheduleCell(0, "F", 1), ScheduleCell(0, "B", 1))
    late = (ScheduleCell(1, "F", 0), ScheduleCell(1, "F", 1), ScheduleCell(1, "B", 0), ScheduleCell(1, "B", 1))
    assert good.rows[1] != late
    with pytest.raises(InvalidInput, match="waits for ever"):
        check(Schedule(name="bad", stages=2, microbatches=2, rows=(first, late)))


def test_an_unknown_schedule_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidInput, match="did you mean '1f1b-so'"):
        schedule_named("1f1b-s0", 2, 2)
