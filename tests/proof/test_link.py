"""Links keep their promises in every order of messages of 3 hosts, 2 operations and a fault, see link.pml."""

import shutil

import pytest

from proof import link

pytestmark = [
    pytest.mark.alike,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("cc")), reason="no spin, or no C compiler"),
]


@pytest.mark.parametrize("kind", ["WHOLE", "LAZY", "SLICED"])
def test_every_execution(kind):
    result = link.verify(kind)
    print(f"{kind}: {result.states} states")
    assert not result.errors, result.trace
    assert result.states > 1_000_000


def test_an_operation_may_end_differently_on_two_hosts():
    """As it must without a further message for each operation: the one that was under way, on a host that failed."""
    assert "fail" in link.verify("ALIKE").trace
