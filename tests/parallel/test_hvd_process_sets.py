import contextlib
import pickle
import re

import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import DivergedError
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.store import divergence
from kvstore_hvd.world import process
from kvstore_hvd.world.member import SetMember
from support.patience import until

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.sizes


def test_sets_without_a_world_know_their_ranks():
    assert hvd.ProcessSet([2, 0]) == hvd.ProcessSet([0, 2])
    assert hvd.ProcessSet([2, 0]).ranks == [0, 2]
    assert hvd.ProcessSet([0]) != hvd.ProcessSet([1])
    assert {hvd.ProcessSet([2, 0])} == {hvd.ProcessSet([0, 2])}
    new = hvd.ProcessSet([0, 1])
    new.ranks.append(7)
    assert new.ranks == [0, 1]
    assert (new.process_set_id, new.size(), new.rank(), new.included()) == (None, None, None, None)
    for wrong in (3, "01", [0, 0], [None], [1.5]):
        with pytest.raises(ValueError, match="ProcessSet: "):
            hvd.ProcessSet(wrong)


@pytest.mark.needs(2)
def test_disjoint_sets(dynamic, rank, size):
    """Even and odd ranks by themselves, under the same names; roots are ranks among all. The rest is in `fuzz`."""
    even, odd = (hvd.add_process_set(range(first, size, 2)) for first in (0, 1))
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert mine.included() and not other.included()
    assert (mine.rank(), other.rank()) == (rank // 2, -1)
    assert even.size() == (size + 1) // 2
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.included(), everybody.size(), everybody.rank()) == (0, True, size, rank)
    ranks = {0: list(range(size)), even.process_set_id: even.ranks, odd.process_set_id: odd.ranks}
    assert process_sets.get_process_set_ids_and_ranks() == ranks
    copy = pickle.loads(pickle.dumps(even))
    assert (copy == even, copy.process_set_id) == (True, None)
    x = mx.nd.full((7,), rank)
    for _ in range(3):
        assert hvd.allreduce(x, op=hvd.Sum, process_set=mine, name="x").asnumpy().tolist() == [sum(mine.ranks)] * 7
    assert hvd.broadcast(x, mine.ranks[-1], process_set=mine).asnumpy()[0] == mine.ranks[-1]
    with pytest.raises(ValueError, match=rf"there is no rank .* in ProcessSet(.|\n)*\b{mine.ranks[-1]}\.$"):
        hvd.broadcast(x, other.ranks[0], process_set=mine)


def test_rules(dynamic, rank, size):
    """Removal; what cannot be added is in `test_hvd_init_sets` and in random programs."""
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    if size > 1:
        first = hvd.add_process_set(hvd.ProcessSet([0]))
        with pytest.raises(ValueError, match="exists already"):
            hvd.add_process_set([0])
        number = first.process_set_id
        inner = first._world("this test") if rank == 0 else None
        assert hvd.remove_process_set(first) is True
        if inner is not None:  # what a store of the set would ask
            with pytest.raises(
                kvstore_hvd.ShutdownError, match=r"its process set was removed\.\n  Fix: create the Trainer"
            ):
                inner.check()
        assert first.process_set_id is None
        assert hvd.remove_process_set(first) is False
        with pytest.raises(ValueError, match="is not registered"):
            hvd.allreduce(mx.nd.ones((2,)), process_set=first)
        assert hvd.add_process_set(first).process_set_id > number
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == size


def test_a_set_that_a_running_job_does_not_have_is_refused_once(dynamic, rank, size):
    """As when a newcomer's `init` names one: it learns so as it is taken in, and not again in later worlds."""
    few = hvd.add_process_set([0]) if size > 1 else None
    process_sets._registry().requested.append(hvd.ProcessSet(range(size)))
    with pytest.raises(kvstore_hvd.InvalidRequestError, match="not one of the process sets of the running job"):
        process_sets.rejoin()
    kvstore_hvd.reset()
    process_sets.rejoin()
    assert process_sets.process_sets() == [hvd.global_process_set, *([few] if few else [])]


@pytest.mark.needs(2)
def test_a_set_with_a_rank_that_does_not_exist_any_more(dynamic, rank, size):
    """As when its last member has left an elastic job: nobody waits for it, and the set says so when it is used."""
    registry, gone = process_sets._registry(), hvd.ProcessSet([0, size])
    number = registry.next_number
    entry = process_sets._Registered(number, SetMember([0, size], number), gone)
    gone._registered = registry.sets[number] = entry
    registry.next_number = number + 1 if rank == 0 else 1  # the others are new
    process_sets.rejoin()
    assert process_sets.process_sets() == [hvd.global_process_set, gone]
    assert hvd.add_process_set([0]).process_set_id == number + 1
    with pytest.raises(kvstore_hvd.InvalidRequestError, match="has ranks that do not exist any more"):
        hvd.allreduce(mx.nd.ones((2,)), process_set=gone)


@pytest.mark.needs(2)
def test_a_set_that_one_member_cannot_join_is_nobodys(dynamic, rank, size, monkeypatch):
    join = SetMember.join_within

    def join_and_fail(member, *arguments):
        join(member, *arguments)
        if rank == 1:
            raise OSError(12, "no memory is left")

    few = hvd.ProcessSet([1] if size == 2 else [0, 1])
    text = (
        rf"\[rank {rank}/{size}\] process set .* could not be made\.\n  rank 1: OSError: .*no memory is left\n  Fix: "
    )
    with monkeypatch.context() as patched:
        patched.setattr(SetMember, "join_within", join_and_fail)
        with pytest.raises(kvstore_hvd.errors.LaunchError, match=text):
            hvd.add_process_set(few)
    assert few.process_set_id is None
    assert not process_sets._registry().sets
    hvd.add_process_set(few)
    if few.included():
        assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum, process_set=few).asnumpy()[0] == few.size()


@pytest.mark.needs(3)
def test_errors_name_the_set_and_its_ranks_among_all(dynamic, rank, size):
    few = hvd.add_process_set([0, size - 1])
    if few.included():
        place = f"rank 1/2 in process set {few.process_set_id}" if rank else f"process set {few.process_set_id}"
        who = re.escape(f"[rank {rank}/{size}, {place}] ")
        x = mx.nd.ones((rank + 1,))
        sums = hvd.allreduce(x, name="sums", process_set=few, op=hvd.Sum)
        shapes = rf"\n  \(1,\): rank 0 +\({size},\): rank {size - 1}\n"
        with pytest.raises(kvstore_hvd.MismatchError, match=f"{who}allreduce 'sums': ranks disagree on shape.{shapes}"):
            sums.wait_to_read()
        with pytest.raises(kvstore_hvd.MismatchError, match=rf"{who}reducescatter 'parts': (.|\n)*: rank {size - 1}\n"):
            hvd.reducescatter(x, name="parts", process_set=few)
        with pytest.raises(ValueError, match=f"{who}alltoall 'all': "):
            hvd.alltoall(x, mx.nd.array([5, 5]), name="all", process_set=few)
        roots = rf"'object': ranks disagree on the root.\n  root 0: rank 0\n  root {size - 1}: rank {size - 1}\n"
        with pytest.raises(kvstore_hvd.MismatchError, match=roots):
            hvd.broadcast_object(1, rank, name="object", process_set=few)
        hvd.allreduce(x, name="unread", process_set=few)
    with pytest.raises(kvstore_hvd.MismatchError, match="'unread'") if few.included() else contextlib.nullcontext():
        hvd.remove_process_set(few)
    assert few.process_set_id is None
    hvd.barrier()


@pytest.mark.needs(3)
def test_an_abort_ends_the_waits_of_sets(dynamic, rank, size):
    few = hvd.add_process_set([0, 1])
    if few.included():
        inner = few._world("test")
        if rank == 1:
            waiting = hvd.allreduce(mx.nd.ones((2,)), name="x", process_set=few)  # rank 0 never comes
        if rank == 0:
            until(lambda: inner.engine().missed(1))
            process.current().abort("this is a test")
        until(inner.engine().health)
        if rank == 1:
            with pytest.raises(kvstore_hvd.errors.TransportError, match="this is a test"):
                waiting.wait_to_read()
    kvstore_hvd.reset()
    if few.included():
        assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum, process_set=few).asnumpy().tolist() == [2, 2]


@pytest.mark.needs(3)
def test_verify_within_a_set(dynamic, rank, size):
    few = hvd.add_process_set([0, 1])
    parameters = [("weight", mx.nd.full((3,), min(rank, 1) if few.included() else 7))]
    if few.included():
        with pytest.raises(DivergedError, match="rank 1"):
            divergence.compare(parameters, "mine", "", few._world("verify"))
        divergence.compare([("weight", mx.nd.ones((3,)))], "mine", "", few._world("verify"))
    hvd.remove_process_set(few)
