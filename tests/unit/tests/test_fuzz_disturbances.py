"""The plans of random disturbances: a seed is a plan."""

from __future__ import annotations

from fuzz.disturbances import PAUSED, plan_of
from support.elastic_kinds import KINDS


def test_a_seed_is_a_plan() -> None:
    plans = [plan_of(seed) for seed in range(300)]
    assert plans == [plan_of(seed) for seed in range(300)]
    assert len({str(plan) for plan in plans}) == len(plans)


def test_there_are_always_slots_for_two() -> None:
    for plan in map(plan_of, range(300)):
        assert 4 <= plan.workers <= 6
        for slots in (plan.slots, *(each.slots for each in plan.disturbances if each.kind == "slots")):
            assert 2 <= sum(number for _, number in slots) <= plan.workers


def test_all_ways_to_train_occur() -> None:
    assert {plan_of(seed).kind for seed in (1, 2, 3)} == set(KINDS)


def test_all_kinds_occur() -> None:
    kinds = {each.kind for seed in range(100) for each in plan_of(seed).disturbances}
    assert kinds == {"kill", "stop", "slots", "meeting", "pause"}
    pauses = [each for seed in range(100) for each in plan_of(seed).disturbances if each.kind == "pause"]
    assert {each.whom for each in pauses} == set(PAUSED)
    assert all(1 <= each.pause_s <= 10 for each in pauses)
