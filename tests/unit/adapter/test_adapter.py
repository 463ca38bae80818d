"""The adapter between MXNet's engine and ours, with a second rank in the same process: errors, forks, steps, refusals.
The gradients of a step are one call of the adapter; the second rank submits each by itself."""

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import support
from kvstore_hvd import errors, mxnet_compat, native
from kvstore_hvd.mxnet_compat import handle_of as handle
from support.jobs import variables_of
from support.pair import TIMEOUT_S, mx, ramp
from support.patience import in_child, until

SMALL = 12  # elements


@pytest.mark.parametrize("read", [mx.nd.NDArray.wait_to_read, mx.nd.NDArray.asnumpy, lambda x: (x + 1).asnumpy(), None])
def test_an_error_is_raised_where_its_array_is_read_with_its_class_and_text(pair, read):
    array = mx.nd.array(ramp((4,)))
    pair.pushpull("w", [array], [array])
    work = pair.submit("w", ramp((5,)))
    with pytest.raises(errors.MismatchError) as caught:
        read(array) if read else mx.nd.waitall()
    assert isinstance(caught.value, mx.base.MXNetError)
    assert str(caught.value) == (
        "[rank 0/2] allreduce 'w': ranks disagree on shape.\n"
        "  (4,): rank 0    (5,): rank 1\n"
        "  Nothing was changed. Fix: pass an array of the same shape on every rank."
    )
    with pytest.raises(errors.MismatchError, match="rank 1/2"):
        pair.other.wait(work)
    assert pair.adapter.take_unread_error() is None


@pytest.mark.parametrize("where", ["input", "output", "before the call", "nobody reads"])
def test_a_failed_producer_releases_the_other_ranks(pair, where):
    """MXNet drops an operation while it is pushed if the producer has failed before the call."""
    failed, fine = mx.nd.random.normal(0, -1, (4,)), mx.nd.ones((4,))  # fails when it runs, not when it is called
    if where == "before the call":
        time.sleep(0.3)
    pair.pushpull("w", [fine if where == "output" else failed], [failed if where == "output" else fine])
    theirs = ramp((4,))
    with pytest.raises(errors.InputFailedError, match=r"rank 1/2.*\n.*rank 0: an operation that should have produced"):
        pair.other.wait(pair.submit("w", theirs))
    np.testing.assert_array_equal(theirs, ramp((4,)))
    if where in ("input", "output"):
        with pytest.raises(mx.base.MXNetError, match="scale"):
            fine.asnumpy()
    else:
        error = until(pair.adapter.take_unread_error)
        assert isinstance(error, errors.InputFailedError)
        text = "[rank 0/2] allreduce 'w': an operation that should have produced an input failed.\n"
        assert str(error).startswith(text)
        assert "scale" in str(error)
    assert pair.adapter.take_unread_error() is None


def test_an_output_that_overlaps_another_array_in_part_fails_on_every_rank(pair):
    memory, fact = mx.nd.ones((8,)), "an output overlaps another array in part."
    pair.pushpull("w", [memory[:4]], [memory[4:]])  # neighbours do not overlap
    pair.other.wait(pair.submit("w", ramp((4,))))
    np.testing.assert_array_equal(memory.asnumpy(), [*np.ones(4), *(1 + ramp((4,)))])
    arrays = [memory[:4], memory[1:5]]
    pair.pushpull("w", arrays, arrays)
    with pytest.raises(errors.InputFailedError, match=rf"\n  rank 0: {fact}\n"):
        pair.other.wait(pair.submit("w", ramp((4,))))
    with pytest.raises(errors.InputFailedError, match=fact):
        arrays[0].wait_to_read()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_forked_child_neither_hangs_nor_disturbs(pair, in_flight):
    array = mx.nd.ones((4,))
    if in_flight:
        slow = mx.nd.ones((1000, 1000)) / 1000
        for _ in range(10):
            slow = mx.nd.dot(slow, slow)
        array = slow[0, :4] * 0 + 1
    pair.pushpull("w", [array], [array])
    pair.submit("w", ramp((4,)))
    if not in_flight:
        array.wait_to_read()

    def ask():
        pair.adapter.after_fork_in_child()
        with pytest.raises(errors.ShutdownError, match="forked child"):
            pair.pushpull("v", [array], [array])
        assert pair.adapter.take_unread_error() is None
        assert (mx.nd.ones((2,)) + 1).asnumpy().tolist() == [2, 2]

    in_child(ask)  # the fork waits for MXNet's operations, with the GIL held
    assert array.asnumpy().tolist() == [2, 3, 4, 5]
    pair.pushpull("v", [array], [array])
    pair.submit("v", ramp((4,)))
    assert array.asnumpy().tolist() == [3, 5, 7, 9]


NAIVE = """
from kvstore_hvd import errors
from support.pair import World, mx, ramp
world = World(naive=True)
array = mx.nd.ones((4,))
work = world.submit("w", theirs := ramp((4,)))
world.pushpull("w", [array], [array])
world.other.wait(work)
print(array.asnumpy().tolist(), theirs.tolist())
world.submit("w", ramp((5,)))
try:
    world.pushpull("w", [array], [array])
except errors.MismatchError as error:
    print(str(error).splitlines()[0], world.adapter.take_unread_error())
world.submit("b", ramp((4,), start=5), root=1)
world.broadcast("b", array, 1)
print(array.asnumpy().tolist())
world.close()
"""


def test_an_engine_that_waits_for_each_operation():
    variables = {**variables_of(), "MXNET_ENGINE_TYPE": "NaiveEngine"}
    told = subprocess.check_output([sys.executable, "-c", NAIVE], text=True, timeout=2 * TIMEOUT_S, env=variables)
    assert told.splitlines() == [
        "[2.0, 3.0, 4.0, 5.0] [2.0, 3.0, 4.0, 5.0]",
        "[rank 0/2] allreduce 'w': ranks disagree on shape. None",
        "[5.0, 6.0, 7.0, 8.0]",
    ]


def gradients(number):
    return [mx.nd.ones((SMALL,)) * (i + 1) for i in range(number)]


def test_a_step_is_in_turn_with_single_operations(pair):
    """Operations of one name take part in the order of the calls, in a step or not."""
    (ours,) = gradients(1)
    step = pair.prepare([ours])
    pair.adapter.pushpull_step(step, False)
    pair.pushpull("g0", [ours], [ours])
    pair.adapter.pushpull_step(step, False)
    for factor in (1, 10, 100):
        pair.other.wait(pair.submit("g0", np.full(SMALL, factor, np.float32)))
    assert (ours.asnumpy() == 112).all()


def test_arrays_that_share_memory_are_summed_one_after_the_other(pair):
    """MXNet would wait for ever for an operation that names one memory twice."""
    whole = mx.nd.ones((4, 3))
    pair.adapter.pushpull_step(pair.prepare([whole, whole[1:3], whole]), False)
    theirs = [np.full((4, 3), 1, np.float32), np.full((2, 3), 10, np.float32), np.full((4, 3), 100, np.float32)]
    for work in [pair.submit(f"g{place}", array) for place, array in enumerate(theirs)]:
        pair.other.wait(work)
    assert whole.asnumpy()[:, 0].tolist() == [102, 112, 112, 102]


@pytest.mark.parametrize("is_read", [True, False])
def test_one_that_fails_fails_its_operation_and_is_named(pair, is_read):
    """The first of two, whichever failed first. The others are summed; an error that nobody has read is kept once."""
    ours, theirs = gradients(4), [np.ones(SMALL, np.float32) for _ in range(4)]
    theirs[1] = theirs[2] = np.ones(SMALL + 1, np.float32)
    pair.adapter.pushpull_step(pair.prepare(ours), False)
    for place in (2, 1, 3, 0):
        with pytest.raises(errors.MismatchError) if place in (1, 2) else contextlib.nullcontext():
            pair.other.wait(pair.submit(f"g{place}", theirs[place]))
    if is_read:
        with pytest.raises(errors.MismatchError, match=r"allreduce 'g1': ranks disagree on shape"):
            ours[0].wait_to_read()
        assert [array.asnumpy()[0] for array in ours] == [2, 2, 3, 5]
    else:
        unread = until(pair.adapter.take_unread_error)
        assert isinstance(unread, errors.MismatchError)
        assert "'g1'" in str(unread)
    assert pair.adapter.take_unread_error() is None
    mx.nd.waitall()


def test_a_failed_input_fails_all_of_its_operation(pair):
    ours = gradients(2)
    square = mx.nd.ones((3, 3))
    mx.nd.linalg.potrf(mx.nd.zeros((3, 3)) - 1, out=square)  # not positive definite
    pair.adapter.pushpull_step(pair.prepare([ours[0], square, ours[1]]), False)
    for place, size in enumerate([(SMALL,), (3, 3), (SMALL,)]):
        array = np.ones(size, np.float32)
        with pytest.raises(errors.InputFailedError, match=r"input \(or that of .* grouped with, 'g0' to 'g2'\) failed"):
            pair.other.wait(pair.submit(f"g{place}", array))
        assert (array == 1).all()
    unread = until(pair.adapter.take_unread_error)
    assert isinstance(unread, errors.InputFailedError)
    assert str(unread).startswith("[rank 0/2] allreduce 'g0': an operation that should have produced an input (or that")
    assert "potrf" in str(unread)
    assert pair.adapter.take_unread_error() is None


def test_what_needs_a_closer_look_is_not_prepared(pair):
    with mx.util.np_shape(True):
        empty = mx.np.zeros((0, 3))
    for odd in (mx.nd.sparse.zeros("row_sparse", (2, 3)), empty, mx.np.ones((2,), dtype=bool)):
        assert pair.prepare([*gradients(2), odd]) is None
    pair.adapter = native.MXNetAdapter(pair.engine, mxnet_compat.libmxnet_path(), True)  # NaiveEngine
    assert pair.prepare(gradients(2)) is None


COMPILER = shutil.which(os.environ.get("CXX", "g++"))
REFUSED = "MXNet refused the operation: the test refuses it"


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """MXNet's library, for an adapter, with `refuse` and `remaining` of refusing_engine.cpp."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    path = str(tmp_path_factory.mktemp("refusing") / "librefusing.so")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,--no-as-needed", "-o", path]
    source = Path(support.__file__).with_name("refusing_engine.cpp")
    subprocess.run([str(COMPILER), *flags, str(source), mxnet_compat.libmxnet_path(), "-ldl"], check=True)
    library = ctypes.CDLL(path)
    library.path = path
    return library


@pytest.fixture
def refused_pair(pair, refusing):
    """A world of two in this process, whose rank 0 has an engine that can refuse."""
    pair.adapter = native.MXNetAdapter(pair.engine, refusing.path, False)
    return pair


ENTRIES = {
    "pushpull": lambda pair, array: pair.pushpull("w", [array], [array]),
    "pushpull_in_place": lambda pair, array: pair.adapter.pushpull_in_place("w", "'w'", handle(array), 0, False),
    "pushpull_step": lambda pair, array: pair.adapter.pushpull_step(
        pair.adapter.prepare([("w", "'w'", handle(array), 0)])
    ),
    "broadcast": lambda pair, array: pair.broadcast("w", array, 1),
}


@pytest.mark.parametrize("has_taken", [False, True], ids=["at-once", "after-taking-it"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_refused_operation_is_announced_once(refused_pair, refusing, entry, has_taken):
    """Both ranks are told of it, and the next operation of the name meets the next one of the other rank."""
    pair, root = refused_pair, 1 if entry == "broadcast" else -1
    array, theirs = mx.nd.array(ramp((4,))), ramp((4,), start=7)
    refusing.refuse(0, has_taken)
    with pytest.raises(errors.InputFailedError, match=REFUSED) as caught:
        ENTRIES[entry](pair, array)
    assert refusing.remaining() < 0
    assert str(caught.value).startswith(f"[rank 0/2] {'broadcast' if root == 1 else 'allreduce'} 'w': ")
    with pytest.raises(errors.InputFailedError, match=rf"rank 0: {REFUSED}\n"):
        pair.other.wait(pair.submit("w", theirs, root))
    np.testing.assert_array_equal(array.asnumpy(), ramp((4,)))
    np.testing.assert_array_equal(theirs, ramp((4,), start=7))
    assert pair.adapter.take_unread_error() is None, "the call itself has raised it"
    for number in (1, 2):
        array[:], theirs[:] = number, 10 * number
        ENTRIES[entry](pair, array)
        pair.other.wait(pair.submit("w", theirs, root))
        assert array.asnumpy().tolist() == [10 * number + (0 if root == 1 else number)] * 4


@pytest.mark.parametrize("refused", [0, 1, 2, 3])
def test_what_follows_a_refused_group_is_announced(refused_pair, refusing, refused):
    """Of 20 gradients 8, 8 and 3 share an operation, and a large one has its own: those not refused are summed. The
    other rank waits for each sum before it submits the next one, in another order: none may wait for another's."""
    pair, order = refused_pair, range(19, -1, -1)
    sizes = [4] * 19 + [100_000]
    group = [0] * 8 + [1] * 8 + [2] * 3 + [3]
    ours = [mx.nd.full((size,), place + 1) for place, size in enumerate(sizes)]
    step = pair.prepare(ours)
    for after in (refused, None):  # the second time nothing is refused
        theirs = [np.full(size, 100, np.float32) for size in sizes]
        if after is None:
            pair.adapter.pushpull_step(step)
        else:
            refusing.refuse(after, False)
            with pytest.raises(errors.InputFailedError, match=rf"allreduce 'g{group.index(after)}'.*: {REFUSED}"):
                pair.adapter.pushpull_step(step)
        if after is None:
            del step  # what is under way needs it no more
            gc.collect()
        for place in order:
            work = pair.submit(f"g{place}", theirs[place])
            if group[place] == after:
                with pytest.raises(errors.InputFailedError, match=f"rank 0: {REFUSED}"):
                    pair.other.wait(work)
            else:
                pair.other.wait(work)
        for place in order:
            assert (ours[place].asnumpy() == place + 1 + (0 if group[place] == after else 100)).all()
            ours[place][:] = place + 1


def test_a_refused_reduction_of_a_workers_own_arrays_is_an_error_with_a_fix(refusing):
    local, array = native.LocalOperations(refusing.path, False), mx.nd.ones(4)
    refusing.refuse(0, False)
    with pytest.raises(errors.InputFailedError, match=r"(?s)MXNet refused the local .* the test refuses it.*Fix: "):
        local.reduce([handle(array)], handle(array), 2.0)
    local.reduce([handle(array)], handle(array), 2.0)
    assert array.asnumpy().tolist() == [2, 2, 2, 2]
