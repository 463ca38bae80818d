"""Operations that MXNet's engine refuses on one rank: announced once, as failed; the rest of the call is submitted."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
import support
from kvstore_hvd import errors, mxnet_compat, native
from kvstore_hvd.world import process
from support.pair import World, mx, ramp

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

SOURCE = Path(support.__file__).with_name("refusing_engine.cpp")
REFUSED = "MXNet refused the operation: the test refuses it"


class RefusingEngine:
    """To be given to an adapter as MXNet's library, which `libmxnet` is; `folder` is this process's own."""

    def __init__(self, folder, libmxnet):
        self.path = str(folder / "librefusing.so")
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,--no-as-needed"]
        if hvd.rank() == 0:  # for all
            subprocess.run([str(COMPILER), *flags, "-o", self.path, str(SOURCE), libmxnet, "-ldl"], check=True)
        hvd.barrier()
        self._library = ctypes.CDLL(self.path)

    def refuse(self, after=0, has_taken=False):
        """Refuse one push, after some others; before or after the engine has taken the operation."""
        self._library.refuse(after, int(has_taken))

    @property
    def has_refused(self):
        """Whether the push that `refuse` meant has come."""
        return int(self._library.remaining()) < 0


@pytest.fixture(scope="module")
def refusing(tmp_path_factory, _process):
    folder = str(tmp_path_factory.mktemp("refusing")) if _process.topology.rank == 0 else None
    return RefusingEngine(Path(hvd.broadcast_object(folder)), mxnet_compat.libmxnet_path())


@pytest.fixture
def refused_pair(refusing):
    """Return a world of two in this process, whose rank 0 has an engine that can refuse."""
    world = World()
    world.adapter = native.MXNetAdapter(world.engine, refusing.path, False)
    yield world
    world.close()
    mx.nd.waitall()


@pytest.fixture
def member(world, refusing, monkeypatch):
    """Return this rank's part in the world of all; its stores use the engine that can refuse."""
    member = process.current().member
    mx.nd.waitall()
    adapter = native.MXNetAdapter(member.engine(), refusing.path, False, member._connection._arena)
    monkeypatch.setattr(member, "adapter", adapter)
    yield member
    mx.nd.waitall()


def pushpull(pair, array):
    pair.pushpull("w", [array], [array])


def pushpull_in_place(pair, array):
    assert pair.adapter.pushpull_in_place("w", "'w'", mxnet_compat.handle_of(array), 0, False) == 16


def pushpull_step(pair, array):
    pair.adapter.pushpull_step(pair.adapter.prepare([("w", "'w'", mxnet_compat.handle_of(array), 0)]))


def broadcast(pair, array):
    pair.broadcast("w", array, 1)


ENTRIES = [pushpull, pushpull_in_place, pushpull_step, broadcast]


@pytest.mark.parametrize("has_taken", [False, True], ids=["at-once", "after-taking-it"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_a_refused_operation_is_announced_once(refused_pair, refusing, entry, has_taken):
    """Both ranks are told of it, and the next operation of the name meets the next one of the other rank."""
    pair, root = refused_pair, 1 if entry is broadcast else -1
    array, theirs = mx.nd.array(ramp((4,))), ramp((4,), start=7)
    refusing.refuse(has_taken=has_taken)
    with pytest.raises(errors.InputFailedError, match=REFUSED) as caught:
        entry(pair, array)
    assert refusing.has_refused
    assert str(caught.value).startswith(f"[rank 0/2] {'broadcast' if root == 1 else 'allreduce'} 'w': ")
    with pytest.raises(errors.InputFailedError, match=rf"rank 0: {REFUSED}\n"):
        pair.other.wait(pair.submit("w", theirs, root))
    np.testing.assert_array_equal(array.asnumpy(), ramp((4,)))
    np.testing.assert_array_equal(theirs, ramp((4,), start=7))
    assert pair.adapter.take_unread_error() is None, "the call itself has raised it"
    for number in (1, 2):
        array[:], theirs[:] = number, 10 * number
        entry(pair, array)
        pair.other.wait(pair.submit("w", theirs, root))
        assert array.asnumpy().tolist() == [10 * number + (0 if root == 1 else number)] * 4


@pytest.mark.parametrize("refused", [0, 1, 2, 3])
def test_what_follows_a_refused_group_is_announced(refused_pair, refusing, refused):
    """Of 20 gradients 8, 8 and 3 share an operation, and a large one has its own: those not refused are summed."""
    pair = refused_pair
    sizes = [4] * 19 + [100_000]
    group = [0] * 8 + [1] * 8 + [2] * 3 + [3]
    ours = [mx.nd.full((size,), place + 1) for place, size in enumerate(sizes)]
    step = pair.adapter.prepare(
        [(f"g{place}", f"'g{place}'", mxnet_compat.handle_of(array), -place) for place, array in enumerate(ours)]
    )
    for after in (refused, None):  # the second time nothing is refused
        theirs = [np.full(size, 100, np.float32) for size in sizes]
        if after is None:
            pair.adapter.pushpull_step(step)
        else:
            refusing.refuse(after)
            with pytest.raises(errors.InputFailedError, match=rf"allreduce 'g{group.index(after)}'.*: {REFUSED}"):
                pair.adapter.pushpull_step(step)
        works = [pair.submit(f"g{place}", array) for place, array in enumerate(theirs)]
        for place, work in enumerate(works):
            if group[place] == after:
                with pytest.raises(errors.InputFailedError, match=f"rank 0: {REFUSED}"):
                    pair.other.wait(work)
            else:
                pair.other.wait(work)
            expected = place + 1 + (0 if group[place] == after else 100)
            assert (ours[place].asnumpy() == expected).all()
            ours[place][:] = place + 1


# -- Stores of several workers -------------------------------------------------------------------------------------


def refuse_on(refusing, member, after=0):
    """Have the last rank's engine refuse; returns whether this is that rank."""
    topology = member.topology
    if topology.rank != topology.size - 1:
        return False
    refusing.refuse(after)
    return True


@pytest.mark.needs(2)
@pytest.mark.parametrize("operation", ["pushpull", "broadcast"])
def test_the_other_keys_of_a_call_are_submitted(member, refusing, kv, rank, size, operation):
    """The second of three is refused: the first and the third have their results, in copies as well."""
    values = [mx.nd.full(4, 10 * (place + 1) + rank) for place in range(3)]
    outs = [mx.nd.full(4, -1, dtype="float64") for _ in values]  # another dtype: through a copy
    refused = refuse_on(refusing, member, 1)

    def call():
        getattr(kv, operation)(["a", "b", "c"], values, out=outs)

    if refused:
        with pytest.raises(errors.InputFailedError, match=r"(allreduce|broadcast) 'b': MXNet refused"):
            call()
    else:
        call()
        with pytest.raises(errors.InputFailedError, match=f"rank {size - 1}: {REFUSED}"):
            outs[1].asnumpy()
    ranks = range(size) if operation == "pushpull" else range(1)
    for place, out in enumerate(outs):
        expected = sum(10 * (place + 1) + each for each in ranks)
        if place != 1:
            assert out.asnumpy().tolist() == [expected] * 4
        elif refused:
            assert out.asnumpy().tolist() == [-1] * 4
    call()
    for place, out in enumerate(outs):
        assert out.asnumpy().tolist() == [sum(10 * (place + 1) + each for each in ranks)] * 4


def test_a_refused_reduction_of_a_workers_own_arrays_is_an_error_with_a_fix(refusing):
    local, array = native.LocalReductions(refusing.path, False), mx.nd.ones(4)
    handle = mxnet_compat.handle_of(array)
    refusing.refuse()
    with pytest.raises(errors.InputFailedError, match=r"(?s)MXNet refused a reduction .* the test refuses it.*Fix: "):
        local.reduce([handle], handle, 2.0)
    local.reduce([handle], handle, 2.0)
    assert array.asnumpy().tolist() == [2, 2, 2, 2]
