"""Uneven inputs: workers that have none follow the others, with hooks of the program's own."""

import contextlib
import warnings

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.join import Join, Joinable, context
from support.joinables import Counter, Nothing


@pytest.mark.parametrize("count", [lambda r: 5, lambda r: 3 + 7 * r, lambda r: 6 * (r == 0)])
def test_uneven_inputs(rank, size, count):
    """Every iteration sums what the workers that are still there have; all see the same number of iterations."""
    counter = Counter()
    counts = [count(r) for r in range(size)]
    with Join([counter], color="red"):
        for number in range(counts[rank]):
            counter.count(100 * rank + number)
    expected = [
        sum(100 * r + number for r, count in enumerate(counts) if number < count) for number in range(max(counts))
    ]
    assert counter.sums == expected
    assert counter.was_last == (counts[rank] == max(counts))
    assert counter.arguments == {"color": "red"}
    # Outside, nothing waits for those that are not there.
    assert not counter._join
    assert Join.notify_join_context(counter) is None


def test_two_joinables_again_and_nested(rank, size):
    """Hooks run in order, contexts can follow each other, and one inside another has workers of its own. The outer one
    goes on behind it, also for a joinable that is in both."""
    first, second = Counter("first"), Counter("second")
    for times in range(2):
        with Join([first, second]):
            for _ in range(2 + rank + times):
                first.count(1)
                second.count(2)
                with Join([first], enable=False):
                    assert Join.notify_join_context(first) is None
            # Only workers that still have input are here: the inner context must not need the others.
    for counter, value in ((first, 1), (second, 2)):
        assert counter.sums == [
            value * sum(step < 2 + r + times for r in range(size))
            for times in range(2)
            for step in range(size + 1 + times)
        ]
    with Join([first]):
        for _ in range(3):  # the same on all workers
            first.count(0)
            with Join([second]):
                for _ in range(rank):
                    second.count(1)
    assert second.sums[-1:] == ([1] if size > 1 else second.sums[-1:])


def test_an_exception_frees_the_others(rank, size):
    """They do not wait for a worker that left, and are told which one and why, be its text UTF-8 or not."""
    counter = Counter()
    if size == 1:
        with pytest.raises(ValueError, match="no such caf\udce9"), Join([counter]):
            raise ValueError("no such caf\udce9")
        return
    last = size - 1
    with contextlib.suppress(ValueError), Join([counter], enable=False):
        if rank == last:
            raise ValueError  # there nobody waits
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size
    told = HorovodInternalError, rf"rank {last} left a Join context with ValueError: no such caf\\udce9"
    error, text = (ValueError, "no such caf\udce9") if rank == last else told
    with pytest.raises(error, match=text), Join([counter]):
        for number in range(5):
            if rank == last and number == 2:
                raise ValueError("no such caf\udce9")
            counter.count(1)
    assert not counter._join
    kvstore_hvd.reset()
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size


def test_a_large_skew_is_told_of(rank, size, monkeypatch):
    """Once, without touching the filters of the program."""
    monkeypatch.setattr(context, "_WARN_AFTER", 5)
    filters = list(warnings.filters)
    counter = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join([counter]):
            for _ in range(3 + 8 * (rank == 0)):
                counter.count(1)
    told = [str(each.message) for each in caught if "uneven input skew" in str(each.message)]
    assert told == ([] if rank == 0 else told[:1])
    assert rank == 0 or f"rank {rank} has at least 5 fewer inputs" in told[0]
    assert warnings.filters == filters


def test_wrong_arguments(rank, size):
    with pytest.raises(ValueError, match=r"^The join context manager requires at least one joinable\n  Fix: "):
        Join([])
    with pytest.raises(ValueError, match=r"^Using join context manager with multiple process groups\n  Fix: "):
        Join([Nothing(), Nothing(group=object())])
    with pytest.raises(TypeError):
        Joinable()
    with pytest.raises(AssertionError, match="constructor calls the ``Joinable`` constructor"):
        Join.notify_join_context(object())
    with Join([Counter()], enable=False):
        pass
