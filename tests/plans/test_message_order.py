"""The order of messages between stages, played under NCCL's rules: plans by the thousand pass, planted faults are found."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from fourfold.errors import Infeasible
from fourfold.plans import Options, lower_plan, named
from fourfold.plans.lists.order import message_order
from fourfold.plans.lists.order.message_order import check_messages, message_fault, passes_in_one_stream, play, rank_calls
from fourfold.plans.lists.order.stage_calls import Boundary, Call, Compute, Entry, Message, Part, boundaries, pairs
from fourfold.plans.lists.rank_schedule import rank_schedules
from message_plans import FAULTS, SCHEDULES, Drawn, chain, drawn
from small import batch_of, graph_of

CELLS = [("pipeline", ranks, schedule) for ranks in (2, 3, 4) for schedule in SCHEDULES]
CELLS += [("data+pipeline", 3, "1f1b-so"), ("filter+pipeline", 4, "gpipe")]


@pytest.mark.parametrize("block", [block if block < 4 else pytest.param(block, marks=pytest.mark.slow) for block in range(10)])
def test_a_thousand_random_plans_end_with_every_message_at_its_own(block: int) -> None:
    for number in range(100 * block, 100 * block + 100):
        plan = drawn(f"suite {number}")
        assert not message_fault(plan), number
        assert not play(rank_calls(plan)), number


@pytest.mark.parametrize("kind", FAULTS)
def test_every_planted_fault_is_found(kind: str) -> None:
    planted = 0
    for number in range(120):
        faulty = FAULTS[kind](rank_calls(drawn(f"suite {number}")), random.Random(number))
        if faulty is not None:
            planted += 1
            assert play(faulty), number
    assert planted > 90


@pytest.mark.parametrize(("strategy", "ranks", "schedule"), CELLS)
@pytest.mark.parametrize("name", ["vgg16-cifar", "unet3d", "gpt2", "gnmt"])
def test_plans_of_built_in_models_pass(name: str, strategy: str, ranks: int, schedule: str) -> None:
    graph = graph_of(name)
    plan = lower_plan(graph, named(strategy, graph, ranks=ranks, batch=batch_of(name), options=Options(schedule=schedule)))
    assert not message_fault(plan)
    assert not play(rank_calls(plan))


# --- faults by hand: rank, action and what it waits for are named ---


FORTH, BACK = Boundary("F", 0, 1), Boundary("B", 1, 0)
X = Message("x", 0, 8)


def sent(peer: int) -> Call:
    return Call("0>1F0", FORTH, 0, (Part(peer, True, X),))


def taken(peer: int, message: Message = X) -> Call:
    return Call("1<0F0", FORTH, 0, (Part(peer, False, message),))


def stage(giver: int, taker: int) -> list[Entry]:
    """A rank that receives a value from one rank, and after its forward sends a gradient to another."""
    return [taken(giver), Compute("1F0", waits=((FORTH, 0),)), Call("1>0B0", BACK, 0, (Part(taker, True, X),))]


def gradient(giver: int) -> Call:
    return Call("0<1B0", BACK, 0, (Part(giver, False, X),))


def test_two_ranks_that_each_receive_before_they_send_wait_for_each_other() -> None:
    fault = play({0: [gradient(1), Compute("0B0", waits=((BACK, 0),)), sent(1)], 1: stage(0, 0)})
    assert fault.startswith("rank 0 in 0<1B0 waits for ")
    assert all(step in fault for step in ("rank 1 in 1>0B0", "rank 1 in 1F0", "rank 0 in 0>1F0"))


def test_messages_taken_for_others_are_named_on_both_sides() -> None:
    for other in (Message("x", 1, 8), Message("x", 0, 9), Message("y", 0, 8)):
        fault = play({0: [sent(1)], 1: [taken(0, other)]})
        assert "on communicator 0>1F rank 0 in 0>1F0 sends x of micro-batch 0 (8 elements), which rank 1 in 1<0F0" in fault


def test_a_message_without_its_other_side_is_named() -> None:
    fault = play({0: [], 1: [taken(0)]})
    assert "rank 1 in 1<0F0 receives x of micro-batch 0 (8 elements) from rank 0, which never sends it" in fault
    assert "which never receives it" in play({0: [sent(1)], 1: []})
    assert "rank 1 waits in 1F0 for 0>1F 0, which it never posts" in play({1: [Compute("1F0", waits=((FORTH, 0),))]})


def test_a_rank_of_a_stage_that_lacks_a_message_holds_up_the_whole_stage() -> None:
    """Rank 1 of stage (0, 1) waits for rank 2, which waits for what rank 0 sends after their common forward."""
    for meets in (True, False):
        first: list[Entry] = [Compute("0F0", meets=meets), sent(2)]
        second: list[Entry] = [gradient(2), Compute("0F0", meets=meets, waits=((BACK, 0),))]
        assert ("rank 1 in 0<1B0" in play({0: first, 1: second, 2: stage(0, 1)})) == meets


def test_a_plan_whose_lists_wait_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = chain(3, 1, "1f1b-so")
    check_messages(plan)
    rows = list(rank_schedules(plan.plan, plan.cut, loss_stage=2))
    middle = list(rows[1])
    at = {str(task): k for k, task in enumerate(middle)}
    middle.insert(at["1B0"], middle.pop(at["1>2F0"]))  # sent after the wait for its own gradient
    monkeypatch.setitem(plan.__dict__, "_schedules", (rows[0], tuple(middle), rows[2]))
    with pytest.raises(Infeasible, match=r"of 3 stages and 1 micro-batches: rank 1 in .* waits for .*; use") as seen:
        check_messages(plan)
    assert "\n" not in str(seen.value)


def test_lowering_refuses_what_the_check_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("gpt2")
    monkeypatch.setattr(message_order, "play", lambda lists, one_stream=False: "rank 0 waits")
    lower_plan(graph, named("data", graph, ranks=2, batch=4))
    with pytest.raises(Infeasible, match="rank 0 waits"):
        lower_plan(graph, named("pipeline", graph, ranks=2, batch=4))


# --- one stream, communicators, speed ---


def test_only_schedules_that_never_cross_pass_in_one_stream() -> None:
    found = {schedule: passes_in_one_stream(chain(3, 6, schedule)) for schedule in SCHEDULES[:3]}
    assert found == {"gpipe": True, "1f1b-sno": False, "1f1b-so": False}
    assert passes_in_one_stream(chain(2, 1, "1f1b-so"))


def test_every_boundary_has_the_pairs_that_its_messages_have() -> None:
    for number in range(40):
        plan = drawn(f"pairs {number}")
        seen: dict[Boundary, set[tuple[int, int]]] = {}
        for rank, entries in rank_calls(plan).items():
            for entry in (e for e in entries if isinstance(e, Call)):
                ends = {(rank, p.peer) if p.sends else (p.peer, rank) for p in entry.parts}
                seen.setdefault(entry.boundary, set()).update(ends)
        known = {boundary: pairs(plan, boundary) for boundary in boundaries(plan)}
        assert {b: sorted(found) for b, found in seen.items() if found} == {b: found for b, found in known.items() if found}


def test_sets_of_ranks_answer_for_their_ranks() -> None:
    """A swap in the list of a whole stage is found whether sets or ranks are played."""
    plan = chain(2, 4, "1f1b-so", ranks=3)
    row = list(plan.rank_schedule(3))
    at = {str(task): k for k, task in enumerate(row)}
    a, b = at["1<0F0"], at["1<0F1"]
    row[a], row[b] = row[b], row[a]
    swapped: Drawn = replace(plan)
    swapped.__dict__["_schedules"] = (plan.rank_schedule(0), tuple(row))
    assert "takes for" in play(rank_calls(swapped))
    assert "takes for" in message_fault(swapped)


def test_sixteen_stages_and_sixty_four_micro_batches_take_well_under_a_second() -> None:
    plan = chain(16, 64, "1f1b-so", ranks=8)
    _ = plan.rank_schedule(0), message_fault(plan)
    begun = time.process_time()
    assert not message_fault(plan)
    assert time.process_time() - begun < 0.5  # 0.03 to 0.05 s on an idle machine
