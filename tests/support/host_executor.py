"""An executor for tests: its "device" is the host, and what crosses between workers goes through the CPU engine."""

from typing import Any

from kvstore_hvd import native
from kvstore_hvd.gpu.executor import Batch, Executor, Steps


class HostExecutor(Executor):
    """Carries out batches with the engine's own operations on the same addresses."""

    def __init__(self, engine: native.Engine) -> None:
        self.engine = engine
        self.kinds: list[str] = []  # of the batches
        self.is_aborted = self.is_closed = False
        self.hangs = False  # at the next batch, until it is aborted

    def abort(self) -> None:
        self.is_aborted = True

    def end(self, limit_s: float) -> bool:
        self.abort()
        return True  # nothing is enqueued on a device

    def close(self) -> None:
        self.is_closed = True

    def start(self, collective: str, batch: Batch) -> Steps:
        number = len(self.kinds)
        self.kinds.append(collective)
        works = []
        for place, one in enumerate([] if self.hangs else batch):
            name, op = f"host/{number}/{place}", "sum" if one.op == "average" else one.op
            more: Any = {"parts": one.parts, "contributed": one.contributed, "as_half": one.as_half}
            where = one.inputs, one.outputs, (one.count,), one.dtype, op, one.prescale, one.postscale, one.root
            works.append(self.engine.submit(native.Request(collective, name, one.label, *where, **more)))
        return self._steps(works, self.hangs)

    def _steps(self, works: list[Any], hangs: bool) -> Steps:
        while hangs or not all(work.done for work in works):
            if hangs and self.is_aborted:
                raise RuntimeError("aborted")
            yield
        for work in works:
            if work.error is not None:
                raise work.error
