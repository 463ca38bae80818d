"""`hvd.init(process_sets=[...])`, again and again: equal sets are used again, and an error changes nothing."""

import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet import process_sets

mx = pytest.importorskip("mxnet")


@pytest.fixture
def fresh(rank, size):
    """Return nothing; outside of a world before and inside of one without sets after."""
    hvd.shutdown()
    yield
    hvd.shutdown()
    hvd.init(comm=list(range(size)))


def total(process_set=hvd.global_process_set):
    return hvd.allreduce(mx.nd.ones((2,)) * (hvd.rank() + 1), op=hvd.Sum, process_set=process_set).asnumpy()[0]


def sum_of(ranks):
    return sum(each + 1 for each in ranks)


@pytest.mark.needs(2)
def test_twice_with_equal_sets(fresh, rank, size):
    """Other objects with the same ranks stand for the same sets, beside the former ones and new ones."""
    first = [hvd.ProcessSet([0]), hvd.ProcessSet(range(1, size))]
    hvd.init(process_sets=iter(first))
    numbers = [each.process_set_id for each in first]
    for again in ([hvd.ProcessSet(list(reversed(range(1, size)))), hvd.ProcessSet([0])], list(reversed(first))):
        hvd.init(process_sets=again)
        assert [each.process_set_id for each in again] == numbers[::-1]
        for each in (*first, *again):
            assert each.included() is (rank in each.ranks)
            assert each.size() == len(each.ranks)
            if each.included():
                assert total(each) == sum_of(each.ranks)
    assert process_sets.process_sets() == [hvd.global_process_set, *first]
    assert process_sets.process_set_by_id(numbers[0]) is first[0]
    hvd.init()
    hvd.init(process_sets=[])
    assert [each.process_set_id for each in first] == numbers
    if size > 2:
        new, known = hvd.ProcessSet([0, 1]), first[0]
        hvd.init(process_sets=[known, new])
        assert (known.process_set_id, new.process_set_id) == (1, 3)
        if new.included():
            assert total(new) == sum_of([0, 1])


@pytest.mark.needs(2)
def test_all_objects_end_together(fresh, size):
    """With the set, and with the world; a reset keeps all, for the set of the next world."""
    hvd.init(process_sets="dynamic")
    first, second = hvd.add_process_set([0]), hvd.ProcessSet([0])
    hvd.init(process_sets=[second])
    kvstore_hvd.reset()
    for each in (first, second):
        assert each.included() is (hvd.rank() == 0)
        if hvd.rank() == 0:
            assert total(each) == 1
    assert first.process_set_id == second.process_set_id == 1
    assert hvd.remove_process_set(second) is True
    assert first.process_set_id is second.process_set_id is None
    hvd.init(process_sets=[first, hvd.ProcessSet([1])])
    hvd.shutdown()
    assert first.process_set_id is None
    hvd.init(process_sets=[second])
    assert second.included() is (hvd.rank() == 0)


def test_after_an_error_it_can_be_repeated(fresh, rank, size):
    """A ValueError on every worker, with the world joined and no set added: the next call may be right."""
    for ranks, text in (
        ([[0], [0]], r"process_sets has the set of rank 0 twice"),
        ([[0], [1, 99]], r"names rank 99, but there are \d workers"),
        ([[0], []], r"is empty"),
        ([[]], r"is empty"),
        ([range(size)], r"exists already: ProcessSet\(process_set_id=0"),
    ):
        sets = [hvd.ProcessSet(each) for each in ranks]
        with pytest.raises(ValueError, match=text if size > 1 else "exists already|twice|is empty|names rank"):
            hvd.init(process_sets=sets)
        assert hvd.is_initialized()
        assert [each.process_set_id for each in sets] == [None] * len(sets)
        assert process_sets.process_sets() == [hvd.global_process_set]
        assert total() == sum_of(range(size))
    if size > 1:
        for own in ([[rank]], [[each] for each in range(1 + (rank > 0))]):  # ranks are no parts of anything
            text = r"(name different|disagree on the number of) process sets(.|\n)*: rank 0\n"
            with pytest.raises(kvstore_hvd.MismatchError, match=text):
                hvd.init(process_sets=[hvd.ProcessSet(each) for each in own])
        right = hvd.ProcessSet([0])
        hvd.init(process_sets=[right])
        assert right.process_set_id == 1
        if right.included():
            assert total(right) == 1


def test_what_is_no_list_of_sets():
    for wrong in (5, [[0]], "static"):
        with pytest.raises(ValueError, match="process_sets is"):
            hvd.init(process_sets=wrong)


def test_dynamic_process_sets(fresh):
    """Sets may be added once `init` says so (or the environment: `test_settings_before_init`), until `shutdown`."""
    hvd.init(process_sets="dynamic")
    hvd.shutdown()
    hvd.init()
    for call in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(hvd.global_process_set)):
        with pytest.raises(ValueError, match=r"cannot be added or removed(.|\n)*HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            call()
