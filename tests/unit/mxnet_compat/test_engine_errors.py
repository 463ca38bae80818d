"""Errors on their way through MXNet's engine: they keep their class and text."""

import ctypes
import pickle
import re

import pytest

from kvstore_hvd import errors, mxnet_compat
from kvstore_hvd.mxnet_compat.hooks import in_one_line
from support.fake_store import V2, mx

_kept = []


class _Complete(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
        ("engine", ctypes.c_void_p),
        ("parameter", ctypes.c_void_p),
    )


def fail_in_engine(target, text):
    """Push an operator that writes `target` and fails with this text, as the native adapter does."""
    error = ctypes.create_string_buffer(16)  # a std::runtime_error, which is all that a dmlc::Error is
    construct = ctypes.CDLL("libstdc++.so.6")._ZNSt13runtime_errorC1EPKc
    construct(error, ctypes.c_char_p(text.encode()))

    def run(*arguments):
        done = _Complete.from_address(arguments[-2])  # (context, [on_start,] on_complete, parameter)
        done.call(done.engine, done.parameter, ctypes.addressof(error))

    callback = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (4 if V2 else 3))(run)
    _kept.extend([error, callback])
    handle = ctypes.c_void_p(mxnet_compat.handle_of(target))
    context = (ctypes.c_int32 * 2)(1, 0)
    push = mx.base._LIB.MXEnginePushAsyncND
    mx.base.check_call(
        push(callback, None, None, context, None, 0, ctypes.byref(handle), 1, None, 0, b"test", ctypes.c_bool(False))
    )


@pytest.mark.skipif(mxnet_compat.engine_is_naive(), reason="NaiveEngine drops errors of operators")
@pytest.mark.parametrize("read", ["wait_to_read", "asnumpy", "downstream", "waitall"])
def test_errors_keep_class_and_text(world, read):
    details = ["(256, 784): ranks 0-2", "(128, 784): rank 3", "  indented: deeper"]
    text = errors.message("ranks disagree on shape.", rank=0, size=4, details=details, fix="build: the same.")
    for cls in filter(lambda each: isinstance(each, type), map(vars(errors).get, errors.__all__)):
        if not issubclass(cls, errors.KVHvdError):
            continue
        x = mx.nd.ones((4,))
        x.wait_to_read()
        fail_in_engine(x, f"{cls.__name__}: {cls(text)}")
        with pytest.raises(cls) as caught:
            if read == "waitall":
                mx.nd.waitall()
            elif read == "downstream":
                (x + 1).asnumpy()
            else:
                getattr(x, read)()
        assert isinstance(caught.value, mx.base.MXNetError)
        assert str(caught.value) == text
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (cls, text)
        del x
        mx.nd.waitall()


def test_an_error_of_mxnet_in_one_line():
    """MXNet puts a stack trace before its text."""
    with pytest.raises(mx.base.MXNetError) as caught:
        mx.nd.random.normal(0, -1, (2,)).wait_to_read()
    assert str(caught.value).startswith("Traceback")
    assert re.match("MXNetError: .*scale", in_one_line(caught.value))
