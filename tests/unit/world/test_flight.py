"""Which worker is said to be slow, by made-up figures."""

from types import SimpleNamespace

import pytest

from kvstore_hvd.native import PATIENT, Counts
from kvstore_hvd.world.flight import Observer, slow_worker
from kvstore_hvd.world.topology import Host, Place


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


@pytest.mark.parametrize("completed", [0, 1])
def test_a_worker_without_input_is_not_slow(caplog, completed):
    """Its lateness is that of all which follows what the others do; once it is back, it is a worker like the others."""
    left = SimpleNamespace(name=f"{PATIENT}left", completed=completed)

    def workers(counts_of_all):
        about = {"host": "node", "pid": 7, "doing": "at train.py:1 in main", "operations": [left]}
        return [SimpleNamespace(rank=rank, counts=each, **about) for rank, each in enumerate(counts_of_all)]

    worlds = iter([[counts(0, 0, 0, 0)] * 2, [counts(5, 0, 0), counts(0, 1000, 5)]])
    segment = SimpleNamespace(snapshot=lambda most: SimpleNamespace(workers=workers(next(worlds))))
    place = Place.of(0, [Host.here()] * 2, source="launcher")
    observer = Observer(SimpleNamespace(segment=segment), place, 10)
    observer.look(0.0)
    observer.look(10.0)
    assert ("rank 1 (node, pid 7) came last in 100 % of 1,000 operations" in caplog.text) == bool(completed)
