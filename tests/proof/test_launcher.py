"""The launcher keeps its promises in all histories of 3 workers on 2 hosts with so many faults."""

import pytest

from proof.launcher import Bounds, prove

pytestmark = [pytest.mark.alike, pytest.mark.timeout(7200)]

ONE, TWO = [(1, 0), (0, 1)], [(1, 1), (2, 0), (0, 2)]
# Workers here train once, and end well only when they have finished. Others are in tests/unit/launch/test_jobs.py.
ELSEWHERE = {("finished", "ready"), ("finished", "synced")}
ELSEWHERE |= {(phase, "success") for phase in ("starting", "entered", "ready", "member")}
DEEP = [Bounds(*faults, cooldown_s=10.0) for faults in TWO]


def check(bounds):
    result, untaken = prove(bounds)
    print(f"{bounds}: {result}")
    assert not result.fault, f"{bounds}\n{result.fault}"
    return untaken


@pytest.mark.parametrize("faults", [*ONE, *TWO], ids="{0[0]}-{0[1]}".format)
def test_every_history(faults):
    untaken = check(Bounds(*faults))
    assert faults != (1, 1) or untaken == ELSEWHERE, "transitions of kvstore_hvd/launch/phases.py that none has taken"


@pytest.mark.slow
@pytest.mark.parametrize("bounds", DEEP, ids=str)
def test_every_history_in_depth(bounds):
    check(bounds)
