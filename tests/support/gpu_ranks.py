"""Ranks as threads of one process, each with an executor for its GPU: a real one, or that of `fake_cuda`."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from fuzz.model import fold, rounded_to_bfloat16
from kvstore_hvd import native
from kvstore_hvd.gpu.executor import Steps
from kvstore_hvd.native import DeviceOperation
from support.patience import patient

_NUMPY = {name: np.dtype(name) for name in native.DTYPES if name != "bfloat16"}
#: Seconds that kernels wait in tests. On a GPU few, which is much there: when all tests fail, some of each kind still
#: have their turn before the time of the machine is over.
PATIENCE_S = 20.0 if os.environ.get("KVHVD_TEST_FAKE_GPU") else 5.0


def device_operation(
    inputs: Sequence[int],
    outputs: Sequence[int],
    count: int,
    dtype: str = "float32",
    op: str = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
    as_half: bool = False,
    root: int = 0,
    parts: Sequence[tuple[int, int, int, int]] = (),
    contributed: int = 0,
) -> DeviceOperation:
    common = (dtype, op, prescale, postscale, as_half, root)
    return DeviceOperation("name", "'name'", inputs, outputs, count, contributed, parts, *common)


class HostArray:
    """Memory with room before and behind, to see what is written beside it."""

    def __init__(self, raw: Any, shift: int = 0) -> None:
        self.nbytes = len(raw)
        self.whole = np.full(len(raw) + 192, 0xEE, np.uint8)
        self._start = -self.whole.ctypes.data % 64 + 64 + shift
        self.address = self.whole.ctypes.data + self._start
        self.whole[self._start : self._start + len(raw)] = raw

    @property
    def content(self) -> Any:
        """Its bytes; fails when something beside them was written."""
        before, content, behind = np.split(self.whole, [self._start, self._start + self.nbytes])
        assert (before == 0xEE).all()
        assert (behind == 0xEE).all(), "written beside the array"
        return content


class Exchange:
    """Lets ranks that are threads tell each other texts, in order: what `agreement.exchange` does."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._texts: dict[tuple[int, int], str] = {}
        self._condition = threading.Condition()

    def of(self, rank: int) -> Callable[[str], list[str]]:
        number = 0

        def share(text: str) -> list[str]:
            nonlocal number
            number += 1
            with self._condition:
                self._texts[number, rank] = text
                self._condition.notify_all()
                keys = [(number, other) for other in range(self._size)]
                if not self._condition.wait_for(lambda: all(key in self._texts for key in keys), 3 * PATIENCE_S):
                    raise RuntimeError(f"rank {rank}: nobody else came to exchange {number}")
                return [self._texts[key] for key in keys]

        return share


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns on each rank; all run at once. Raises what the first of them raised."""
    futures: list[Future[Any]] = [Future() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            futures[rank].set_result(work(rank))
        except BaseException as error:
            futures[rank].set_exception(error)

    for rank in range(size):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    wait(futures, patient(100))
    return [future.result(0) for future in futures]


def finish(steps: Steps) -> None:
    for _ in steps:
        time.sleep(0.0005)


def values_of(raw: Any, dtype: str) -> Any:
    """The elements, as float32 where they are bfloat16."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(_NUMPY[dtype])


def raw_of(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (rounded_to_bfloat16(values).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8)


def samples(rank: int, count: int, dtype: str, seed: int = 0) -> Any:
    """Elements of a rank as raw bytes: small numbers with signs, so that sums are exact in every type but rounding."""
    generator = np.random.default_rng([seed, rank, count])
    if dtype.startswith(("int", "uint")):
        return np.frombuffer(generator.bytes(count * native.ITEM_BYTES[dtype]), np.uint8)
    return raw_of(generator.standard_normal(count).astype(np.float32), dtype)


def combined(parts: Sequence[Any], dtype: str, op: str, prescale: float = 1.0, postscale: float = 1.0) -> Any:
    """The elements that raw contributions give, in rank order, as raw bytes; as the CPU engine has them."""
    op = "sum" if op == "average" else op  # the postscale divides
    values = [values_of(part, dtype) for part in parts]
    return raw_of(fold(dtype, op, values, prescale, postscale, as_half=False), dtype)
