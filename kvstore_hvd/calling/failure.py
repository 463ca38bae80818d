"""What a worker tells of an exception that its function has raised."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass
from types import TracebackType

from kvstore_hvd.errors import PeerLostError
from kvstore_hvd.mxnet_compat.engine_errors import in_one_line

__all__ = ["Failure", "failure_of"]


@dataclass(frozen=True)
class Failure:
    """Why a worker has no result."""

    # `fact` is a sentence, `trace` the traceback as Python shows it. `is_secondary`: another worker's end was the
    # cause. `pickled` is the exception itself, where it can be pickled.

    fact: str
    trace: str = ""
    is_secondary: bool = False
    pickled: bytes = b""
    fix: str = ""

    def error(self) -> BaseException | None:
        """The exception itself, where it has survived the way; its text is in `trace` in any case."""
        if self.pickled:
            with contextlib.suppress(Exception):  # its class may need arguments that it has not kept
                error = pickle.loads(self.pickled)
                if isinstance(error, BaseException):
                    return error
        return None


def failure_of(error: BaseException, trace: TracebackType | None, what: str, fix: str = "") -> Failure:
    """Describe an exception."""
    import cloudpickle

    last = in_one_line(error)
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
    return Failure(
        fact=f"{what} {last}{'' if last.endswith('.') else '.'}",
        trace="".join(traceback.format_exception(type(error), error, trace)).rstrip(),
        is_secondary=isinstance(error, PeerLostError),
        pickled=pickled,
        fix=fix,
    )
