"""The launcher keeps its promises in all histories of workers on 2 hosts with so many faults."""

import pytest

from proof.launcher import Bounds, prove

pytestmark = [pytest.mark.alike, pytest.mark.timeout(7200)]

# One fault; two faults with 2 workers for 3 slots; two faults with 3 workers.
USUAL = [Bounds(1, 0), Bounds(0, 1), Bounds(1, 1, max_np=2), Bounds(1, 1), Bounds(2, 0), Bounds(0, 2)]
DEEP = [
    *(Bounds(*faults, cooldown_s=10.0) for faults in ((1, 1), (2, 0), (0, 2))),
    *(Bounds(*faults, min_np=1) for faults in ((1, 1), (2, 0), (0, 2))),
    *(Bounds(*faults, min_np=1, max_np=2) for faults in ((2, 1), (1, 2), (3, 0))),
]
# Workers here train once, and end well only when they have finished. Others are in tests/unit/launch/test_jobs.py.
ELSEWHERE = {("finished", "ready"), ("finished", "synced")}
ELSEWHERE |= {(phase, "success") for phase in ("starting", "entered", "ready", "member")}


@pytest.mark.parametrize("bounds", [*USUAL, *(pytest.param(each, marks=pytest.mark.slow) for each in DEEP)], ids=str)
def test_every_history(bounds):
    result, untaken = prove(bounds)
    print(f"{bounds}: {result}")
    assert not result.fault, f"{bounds}\n{result.fault}"
    assert bounds != Bounds(1, 1) or untaken == ELSEWHERE, "transitions that no history takes"
