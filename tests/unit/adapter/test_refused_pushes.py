"""Operations that MXNet's engine refuses: announced once, as failed; what is pushed with them is submitted."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import support
from kvstore_hvd import errors, mxnet_compat, native
from kvstore_hvd.mxnet_compat import handle_of as handle
from support.pair import mx, ramp

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

REFUSED = "MXNet refused the operation: the test refuses it"


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """MXNet's library, for an adapter, with `refuse` and `remaining` of refusing_engine.cpp."""
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
    """Of 20 gradients 8, 8 and 3 share an operation, and a large one has its own: those not refused are summed."""
    pair = refused_pair
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


def test_a_refused_reduction_of_a_workers_own_arrays_is_an_error_with_a_fix(refusing):
    local, array = native.LocalReductions(refusing.path, False), mx.nd.ones(4)
    refusing.refuse(0, False)
    with pytest.raises(errors.InputFailedError, match=r"(?s)MXNet refused a reduction .* the test refuses it.*Fix: "):
        local.reduce([handle(array)], handle(array), 2.0)
    local.reduce([handle(array)], handle(array), 2.0)
    assert array.asnumpy().tolist() == [2, 2, 2, 2]
