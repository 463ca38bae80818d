"""Which worker is said to be slow, by made-up figures."""

import pytest

from kvstore_hvd.native import Counts
from kvstore_hvd.world.flight import slow_worker


def counts(waited_s, last, behind_s, compared=1000):
    """Of one worker in ten seconds."""
    zero = Counts(*[0] * len(Counts._fields))
    return zero._replace(waited_ns=waited_s * 1e9, compared=compared, last=last, behind_ns=behind_s * 1e9)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([counts(5, 10, 0.1), counts(0.1, 980, 5), counts(4, 10, 0.1)], (1, 0.4)),
        # Late to one of ten sums that all workers wait for: who comes last in the others, by little, is chance.
        ([counts(5, 300, 0.1), counts(5, 300, 0.1), counts(0.1, 400, 5)], (2, 0.5)),
        # As late as the other one; often and by little.
        ([counts(2, 450, 2.3), counts(1.8, 550, 2.6)], None),
        ([counts(0.4, 0, 0), counts(0.1, 1000, 5)], None),  # the gradients of a backward pass: the wait was hidden
        ([counts(2, 5, 3, 10), counts(0, 5, 0, 10)], None),  # too few
        ([counts(0, 0, 0)], None),
    ],
)
def test_slow_worker(workers, expected):
    assert slow_worker(dict(enumerate(workers)), 10) == expected
