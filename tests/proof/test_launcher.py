"""The launcher keeps its promises in all histories of workers on 2 hosts with so many faults."""

import pytest

from proof.launcher import Bounds, prove

pytestmark = [pytest.mark.alike, pytest.mark.timeout(7200)]

USUAL = [Bounds(1, 1), Bounds(2, 0), Bounds(0, 2)]
# In this order two processes take equally long.
HISTORIES = [USUAL[1], USUAL[2], USUAL[0], Bounds(1, 1, min_np=1, max_np=2)]
DEEP = [
    *(bounds._replace(cooldown_s=10.0) for bounds in USUAL),
    *(bounds._replace(min_np=1) for bounds in USUAL),
    *(Bounds(*faults, min_np=1, max_np=2) for faults in ((2, 1), (1, 2), (3, 0))),
]
# Workers here train once, and end well only when they have finished. Others are in tests/unit/launch/test_jobs.py.
ELSEWHERE = {("finished", "ready"), ("finished", "synced")}
ELSEWHERE |= {(phase, "success") for phase in ("starting", "entered", "ready", "member")}


def check(bounds):
    result, untaken = prove(bounds)
    print(f"{bounds}: {result}")
    assert not result.fault, f"{bounds}\n{result.fault}"
    return untaken


@pytest.mark.parametrize("bounds", HISTORIES, ids=str)
def test_histories(bounds):
    untaken = check(bounds)
    assert bounds != Bounds(1, 1) or untaken == ELSEWHERE, "transitions that no history takes"


@pytest.mark.slow
@pytest.mark.parametrize("bounds", DEEP, ids=str)
def test_deep(bounds):
    check(bounds)
