"""One rank of a program that makes settings itself, after its imports; its first argument stands for horovod.mxnet.

Prints what took effect, as JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from typing import Any

import mxnet as mx

import kvstore_hvd
from kvstore_hvd.errors import ConfigError

OURS = ("HOROVOD_LOG_LEVEL", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_TIMELINE", "HOROVOD_STALL_CHECK_TIME_SECONDS")


class Said(logging.Handler):
    """Keeps what our package says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def world(hvd: Any, said: Said, **variables: str) -> dict[str, Any]:
    """Join a world with these settings, and leave it; returns what was seen there."""
    for name in OURS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    said.texts.clear()
    hvd.init()
    seen: dict[str, Any] = {"rank": hvd.rank(), "size": hvd.size()}
    try:
        hvd.add_process_set([0])
        seen["sets"] = "dynamic"
    except ValueError:
        seen["sets"] = "fixed"
    hvd.allreduce(mx.nd.ones(2), name="x").wait_to_read()
    hvd.shutdown()
    seen["debug"] = any("left the world" in text for text in said.texts)
    return seen


def main() -> None:
    hvd = importlib.import_module(sys.argv[1])
    said = Said()
    logging.getLogger(kvstore_hvd.__name__).addHandler(said)
    timeline = os.path.join(sys.argv[2], "timeline.json")
    seen = [
        world(hvd, said, HOROVOD_LOG_LEVEL="debug", HOROVOD_DYNAMIC_PROCESS_SETS="1", HOROVOD_TIMELINE=timeline),
        world(hvd, said, HOROVOD_LOG_LEVEL="error"),
    ]
    try:
        world(hvd, said, HOROVOD_STALL_CHECK_TIME_SECONDS="soon")
        refused = ""
    except ConfigError as error:
        refused = str(error)
    seen.append(world(hvd, said))
    os.write(1, (json.dumps({"worlds": seen, "refused": refused}) + "\n").encode())


if __name__ == "__main__":
    main()
