"""The engine: its thresholds (KVHVD_THRESHOLDS), and Ctrl-C while a worker waits for an operation."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from kvstore_hvd import errors, native
from kvstore_hvd.config import config
from kvstore_hvd.errors import ConfigError, InputFailedError, KVHvdError, PeerLostError, TransportError
from kvstore_hvd.world import segment
from support.arrays import request_of
from support.patience import patient, until


def test_changes_replace_defaults_by_name(setting):
    before, after = native.thresholds(), native.thresholds(" one_shot = 4096, direct_chunk=2097152 ")
    assert all(each.least <= each.value <= each.most and each.value % each.unit == 0 for each in before.values())
    changed = {name: threshold.value for name, threshold in after.items() if threshold != before[name]}
    assert changed == {"one_shot": 4096, "direct_chunk": 2097152}
    setting(KVHVD_THRESHOLDS="one_shot=4096")
    assert segment._thresholds() == config().thresholds == "one_shot=4096"
    assert native.Segment.create(2, 0, segment._thresholds()).fd >= 0
    with pytest.raises(ValueError):
        native.Segment.create(2, 0, "one_shoot=1")


def test_a_segment_of_another_build_is_refused():
    made = native.Segment.create(2)
    os.pwrite(made.fd, bytes(8), 0)  # what changes with the layout
    with pytest.raises(ValueError, match="not a segment of this build of kvstore_hvd"):
        native.Segment.attach(made.fd)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("one_shoot=4096", "'one_shoot' does not exist; there are inlined, "),
        ("one_shot=many", "one_shot: 'many' is not a multiple of 64 from 0 to 131072."),
        ("one_shot=100", "one_shot: '100' is not a multiple of 64"),
        ("one_shot=131136", "one_shot: '131136' is not a multiple of 64 from 0 to 131072."),
        ("one_shot=128x", "one_shot: '128x' is not a multiple of 64"),
        ("one_shot=99999999999999999999", "one_shot: '99999999999999999999' is not a multiple of 64"),
        ("direct_chunk=0", "direct_chunk: '0' is not a multiple of 4096 from 4096 "),
        ("one_shot", "'one_shot' is not NAME=BYTES."),
        ("min_part=1048576", "min_part is above max_part."),
    ],
)
def test_wrong_changes_are_refused(setting, changes, says):
    with pytest.raises(ValueError) as refused:
        native.thresholds(changes)
    assert says in str(refused.value)
    # Every worker checks what it was told, before it looks for the others.
    setting(KVHVD_THRESHOLDS=changes)
    with pytest.raises(ConfigError) as error:
        segment._thresholds()
    assert f"KVHVD_THRESHOLDS: {refused.value}" in str(error.value)


def engines_of_two(*more):
    segment = native.Segment.create(2)
    return [native.Engine(segment, rank, patient(30.0), False, *more) for rank in range(2)]


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ("abort", ["caf\udce9"]),
        ("shutdown", ["caf\udce9"]),
        ("end_batch", [0, PeerLostError("caf\udce9")]),
        ("end_batch", [0, errors.TimeoutError("caf\udce9")]),
    ],
)
def test_errors_reach_the_others_whatever_their_texts(how, arguments):
    """A lone surrogate is no UTF-8: the others read its escape."""
    ours, theirs = engines_of_two("h\udcff")
    getattr(ours, how)(*arguments)
    assert "caf\\udce9" in str(theirs.health())
    assert how != "end_batch" or type(theirs.health()) is type(arguments[1])
    theirs.shutdown("it ends")
    ours.shutdown("it ends")
    engines = engines_of_two()  # an input that failed
    told = native.Request("allreduce", "x", "'l\udce9'", (), (), (3,), "float32", failure="caf\udce9")
    works = [engine.submit(told) for engine in engines]
    for engine, work in zip(engines, works):
        with pytest.raises(InputFailedError, match=r"allreduce 'l\\udce9': (.|\n)*caf\\udce9"):
            engine.wait(work)
        engine.shutdown()


def test_ctrl_c_ends_the_wait_for_everything():
    theirs, ours = engines_of_two()
    array = np.ones(3, np.float32)
    ours.submit(request_of(array, "x"))
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        ours.wait_for_all(patient(5))
    assert f"rank 1 (pid {os.getpid()}) was interrupted" in str(theirs.health())
    for engine in (theirs, ours):
        engine.shutdown()


def test_nothing_is_under_way_after_ctrl_c():
    """Then the arrays may be freed: a device that has begun is waited for, and the others are told why."""
    ours, theirs = engines_of_two()
    arrays = [np.ones(3, np.float32) for _ in range(2)]
    requests = [request_of(array, "x", on_device=True) for array in arrays]
    ended = False

    def device():
        nonlocal ended
        batch = ours.take_batch(patient(30.0))
        signal.raise_signal(signal.SIGINT)
        while ours.health() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        ended = True
        ours.end_batch(batch[0])

    work = theirs.submit(requests[1])
    thread = threading.Thread(target=device, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ours.run(requests[0])
    assert ended
    thread.join()
    with pytest.raises(TransportError, match="was interrupted"):
        theirs.wait(work)
    theirs.shutdown()
    ours.shutdown()


def test_hosts_that_cannot_meet_say_why_at_once():
    hosts, names, sockets = [[0], [1]], [("a", 1), ("b", 2)], socket.socketpair()
    links = []
    for host, end in enumerate(sockets):
        segment = native.Segment.create(1, host=host, hosts=hosts, processes=names)
        connections = [end.detach() if other != host else -1 for other in range(2)]
        how = 600.0, 600.0, f"build {host}", native.DTYPES["float32"]
        links.append(native.Link(segment, native.tcp_transport(connections), *how))
    for link in links:
        with pytest.raises(KVHvdError, match="run different versions of kvstore_hvd"):
            until(lambda link=link: not link.missing())
        link.give_up()
