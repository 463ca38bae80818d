"""The gradients of a Trainer's step: looked at once, then summed by one native call in every step.

A loop of `pushpull` over the parameters takes some microseconds for each of them, which a small network notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.store.arrays import bytes_of
from kvstore_hvd.store.keys import Key
from kvstore_hvd.store.usage import Batch


def is_plain(array: Any) -> bool:
    """Whether an array can be one of a `Step`."""
    return mxnet_compat.stype_of(array) == "default" and mxnet_compat.dtype_name(array) in native.DTYPES


class Step:
    """Arrays that are summed in place, one for each key; any number of times, by one store."""

    def __init__(self, gradients: Sequence[tuple[Key, Any, int]]) -> None:
        self._gradients = gradients
        sizes = [(key, bytes_of(array, mxnet_compat.dtype_name(array))) for key, array, _ in gradients]
        #: What to count each time.
        self.batch = Batch("pushpull", sizes)
        self._prepared: native.Step | None = None
        self._prepared_for: object = None

    def prepared(
        self, adapter: native.MXNetAdapter, names: Callable[[Key], tuple[str, str]], version: object
    ) -> native.Step | None:
        """What `native.MXNetAdapter.pushpull_step` takes; None when an array needs a closer look."""
        if self._prepared_for is not version:
            self._prepared = adapter.prepare(
                [(*names(key), mxnet_compat.handle_of(array), priority) for key, array, priority in self._gradients]
            )
            self._prepared_for = version
        return self._prepared
