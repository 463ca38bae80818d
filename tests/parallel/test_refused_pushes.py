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


def handle(array):
    return mxnet_compat.handle_of(array)


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
    refusing.refuse(has_taken=has_taken)
    with pytest.raises(errors.InputFailedError, match=REFUSED) as caught:
        ENTRIES[entry](pair, array)
    assert refusing.has_refused
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
    """Of 20 gradients 8, 8 and 3 share an operation, and a large one has its own: those not refused are summed."""
    pair = refused_pair
    sizes = [4] * 19 + [100_000]
    group = [0] * 8 + [1] * 8 + [2] * 3 + [3]
    ours = [mx.nd.full((size,), place + 1) for place, size in enumerate(sizes)]
    step = pair.adapter.prepare(
        [(f"g{place}", f"'g{place}'", handle(array), -place) for place, array in enumerate(ours)]
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


@pytest.mark.needs(2)
def test_the_other_keys_of_a_call_are_submitted(refusing, kv, rank, size, monkeypatch):
    """The second of three is refused by the last rank's engine: the others have their results, in copies as well."""
    member, is_last = process.current().member, rank == size - 1
    adapter = native.MXNetAdapter(member.engine(), refusing.path, False, member._connection._arena)
    monkeypatch.setattr(member, "adapter", adapter)
    values = [mx.nd.full(4, 10 * (place + 1) + rank) for place in range(3)]
    sums = [sum(10 * (place + 1) + each for each in range(size)) for place in range(3)]
    outs = [mx.nd.full(4, -1, dtype="float64") for _ in values]  # another dtype: through a copy
    if is_last:
        refusing.refuse(1)
    text = r"allreduce 'b': MXNet refused" if is_last else f"rank {size - 1}: {REFUSED}"
    with pytest.raises(errors.InputFailedError, match=text):
        kv.pushpull(["a", "b", "c"], values, out=outs)
        outs[1].asnumpy()
    assert [outs[place].asnumpy().tolist() for place in (0, 2)] == [[sums[place]] * 4 for place in (0, 2)]
    assert not is_last or outs[1].asnumpy().tolist() == [-1] * 4
    kv.pushpull(["a", "b", "c"], values, out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[each] * 4 for each in sums]
    mx.nd.waitall()


def test_a_refused_reduction_of_a_workers_own_arrays_is_an_error_with_a_fix(refusing):
    local, array = native.LocalReductions(refusing.path, False), mx.nd.ones(4)
    refusing.refuse()
    with pytest.raises(errors.InputFailedError, match=r"(?s)MXNet refused a reduction .* the test refuses it.*Fix: "):
        local.reduce([handle(array)], handle(array), 2.0)
    local.reduce([handle(array)], handle(array), 2.0)
    assert array.asnumpy().tolist() == [2, 2, 2, 2]
