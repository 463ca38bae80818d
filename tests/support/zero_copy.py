"""What tests of gradients in shared memory ask the engine and MXNet, and how they compare with staged ones."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import config
from kvstore_hvd.world import process
from support.arrays import Array, assert_equal_on_all_ranks, assert_same_bits
from support.gluon import parameters


def address(array: Any) -> int:
    """Return where the array's elements lie. Waits for them."""
    import mxnet as mx

    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def arena() -> Any:
    return None if process.current().member.is_alone else process.current().member.arena


def lies_in_arena(array: Any) -> bool:
    present = arena()
    return present is not None and present.contains(address(array))


def are_in_arena(net: Any) -> list[bool]:
    return [lies_in_arena(g) for p in parameters(net) if p.grad_req != "null" for g in p.list_grad()]


def bytes_in_place() -> int:
    """Return how many bytes of this worker were reduced without staging memory, in this world. Waits for all of it."""
    import mxnet as mx

    mx.nd.waitall()
    return 0 if process.current().member.is_alone else process.current().member.engine().bytes_in_place


def gradient_bytes(net: Any) -> int:
    return sum(
        int(np.prod(p.shape)) * np.dtype(p.list_grad()[0].dtype).itemsize
        for p in {id(p): p for p in parameters(net)}.values()  # tied ones have several names in MXNet 2
        if p.grad_req != "null"
    )


@contextlib.contextmanager
def settings(**variables: str) -> Iterator[None]:
    """Change variables of the environment, and have the configuration read again, before and after."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            config.reload()
            yield
    finally:
        config.reload()


def zero_copy(on: bool) -> contextlib.AbstractContextManager[None]:
    """Turn zero copy on or off for gradients that are made or moved inside."""
    return settings(KVHVD_ZERO_COPY="1" if on else "0")


def both(run: Callable[[], list[Array]], own: bool = False) -> int:
    """Run a training staged and in place; fails unless the bits are the same. Returns the bytes reduced in place. What
    `run` returns must be equal on all workers as well, unless it has values of each worker's `own`."""
    with zero_copy(False):
        before = bytes_in_place()
        staged = run()
        assert bytes_in_place() == before
    before = bytes_in_place()
    direct = run()
    reduced = bytes_in_place() - before
    assert len(staged) == len(direct)
    for one, other in zip(staged, direct):
        assert np.isfinite(one).all()
        assert_same_bits(other, one)
    for i, value in enumerate([] if own else direct):
        assert_equal_on_all_ranks(value, f"value {i}")
    return reduced


def meet_again() -> None:
    """Leave the world, and meet in a fresh one, when everybody is done with the present one."""
    import mxnet as mx

    mx.nd.waitall()
    kvstore_hvd.barrier()
    kvstore_hvd.reset()
