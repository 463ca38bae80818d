"""The launcher keeps its promises in all histories of 3 workers on 2 hosts with so many faults."""

import pytest

from proof.launcher import Bounds, prove

pytestmark = pytest.mark.alike

DEEP = [Bounds(2, cooldown_s=10.0), Bounds(3)]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "bounds", [Bounds(1), Bounds(2), *(pytest.param(each, marks=pytest.mark.slow) for each in DEEP)], ids=str
)
def test_every_history(bounds):
    result = prove(bounds)
    print(f"{bounds}: {result}")
    assert not result.fault, f"{bounds}\n{result.fault}"
