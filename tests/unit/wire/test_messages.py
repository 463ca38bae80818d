"""The messages of an elastic job: which are allowed, and that everything else is refused."""

import json

import pytest

from kvstore_hvd.wire import WireError
from kvstore_hvd.wire.messages import DAEMON, LAUNCHER_TO_DAEMON, LAUNCHER_TO_WORKER, WORKER, check

HOST = ["localhost", "boot-1"]
GOOD = [
    (DAEMON, {"t": "started", "worker": 0, "pid": 17}),
    (DAEMON, {"t": "not_started", "worker": 3, "text": "no such file"}),
    (DAEMON, {"t": "exited", "worker": 3, "code": -9, "lines": ["a", ""]}),
    (DAEMON, {"t": "from", "worker": 3, "message": {"t": "finished"}}),
    (DAEMON, {"t": "beat"}),
    (LAUNCHER_TO_DAEMON, {"t": "start", "worker": 1, "command": ["a"], "environment": {"A": ""}, "cores": [0, 1]}),
    (LAUNCHER_TO_DAEMON, {"t": "to", "worker": 1, "message": {"t": "leave", "text": ""}}),
    (LAUNCHER_TO_DAEMON, {"t": "signal", "worker": None, "signal": 15, "ended": True}),
    (LAUNCHER_TO_DAEMON, {"t": "end", "text": "done"}),
    (WORKER, {"t": "enter", "host": HOST}),
    (WORKER, {"t": "ready", "generation": -1, "cause": "start", "text": ""}),
    (WORKER, {"t": "joined", "generation": 0}),
    (WORKER, {"t": "synced", "generation": 3}),
    (LAUNCHER_TO_WORKER, {"t": "place", "rank": 0, "size": 1, "hosts": [HOST], "places": [0]}),
    (
        LAUNCHER_TO_WORKER,
        {"t": "world", "generation": 0, "rank": 1, "size": 2, "hosts": [HOST, HOST], "places": [1, 0], "job": "j"},
    ),
    (LAUNCHER_TO_WORKER, {"t": "void", "generation": 0, "text": "worker 3 died"}),
    (LAUNCHER_TO_WORKER, {"t": "updated", "number": 1, "result": 3}),
    (LAUNCHER_TO_WORKER, {"t": "refused", "text": "too many resets"}),
]
OTHER_VALUES = (None, True, -2, 1.5, 1 << 60, "x", b"", [], [1], [None], ["a", "b", "c"], {}, {"a": 1})


@pytest.mark.parametrize(("table", "message"), GOOD, ids=lambda value: value.get("t") if "t" in value else "")
def test_fields_that_are_missing_superfluous_or_wrong(table, message):
    assert check(json.loads(json.dumps(message)), table) == message["t"]
    with pytest.raises(WireError, match="has not the fields"):
        check({**message, "more": 1}, table)
    for field in message:
        with pytest.raises(WireError):
            check({name: value for name, value in message.items() if name != field}, table)
        refused = 0
        for value in OTHER_VALUES:
            try:
                check({**message, field: value}, table)
            except WireError as error:
                refused += 1
                assert len(str(error)) < 300
        # Some of the values may be right for this field, but never most of them.
        assert refused >= len(OTHER_VALUES) - 3, field


def test_what_is_refused_is_named_in_short():
    for kind in ("start ", None, ["start"]):
        with pytest.raises(WireError, match="unknown type"):
            check({"t": kind}, LAUNCHER_TO_DAEMON)
    with pytest.raises(WireError, match="has generation True"):
        check({"t": "joined", "generation": True}, WORKER)
    with pytest.raises(WireError) as caught:
        check({"t": "joined", "generation": "x" * 100_000}, WORKER)
    assert len(str(caught.value)) < 200
