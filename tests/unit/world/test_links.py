"""TCP connections between hosts: who is let in, who is not, and what is said of those that are missing. Hosts are
threads, each with a listening socket of its own."""

import contextlib
import dataclasses
import logging
import os
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.world import links
from kvstore_hvd.world.links import connect_hosts, own_addresses
from kvstore_hvd.world.topology import Host, Place, World
from support.patience import patient, until

LONG_S = patient(60.0)
JOBS = iter(range(1_000_000))

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def listeners():
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        for each in made:
            each.setblocking(False)
        yield made


def worlds(listeners, ranks_by_host=((2, 0), (1, 4), (3,)), secrets=(b"s", b"s", b"s"), **fields):
    """Of the first rank of each host, which has local rank 0 and listens for it."""
    places = {rank: (host, place) for host, ranks in enumerate(ranks_by_host) for place, rank in enumerate(ranks)}
    of, local = zip(*(places[rank] for rank in range(len(places))))
    ports = [0 if local_rank else listeners[host].getsockname()[1] for host, local_rank in zip(of, local)]
    addresses = tuple((f"127.0.0.1:{port}",) for port in ports)
    hosts, job = [Host(f"node{host}", str(host)) for host in of], f"job{next(JOBS)}"
    how = {"source": "launcher", "local_rank_of": local}
    return [
        World(Place.of(ranks[0], hosts, **how), job, secret * 32, addresses=addresses, **fields)
        for ranks, secret in zip(ranks_by_host, secrets)
    ]


def connect(listeners, worlds):
    with ThreadPoolExecutor(len(worlds)) as pool:
        futures = [pool.submit(connect_hosts, world, listener) for world, listener in zip(worlds, listeners)]
        return [future.exception(LONG_S) or future.result() for future in futures]


def check_connected(results):
    fds = {(a, b): fd for a, row in enumerate(results) for b, fd in enumerate(row)}
    assert all((fd < 0) == (a == b) for (a, b), fd in fds.items())
    with contextlib.ExitStack() as stack:
        ends = {pair: stack.enter_context(socket.socket(fileno=fd)) for pair, fd in fds.items() if fd >= 0}
        for pair, one in ends.items():
            one.sendall(bytes(pair))
        for pair, one in ends.items():
            one.settimeout(LONG_S)
            assert one.recv(2) == bytes(reversed(pair))


@pytest.mark.parametrize("what", ["meeting", "index"])
def test_attempts_of_another_meeting_do_not_meet(listeners, what, caplog):
    """One host is still at the meeting, or at the process set, before, which the others have given up."""
    late = worlds(listeners)
    now = [dataclasses.replace(world, **{what: 1}) for world in late]
    lost = threading.Event()
    object.__setattr__(late[0], "lost", lambda: "it was given up" if lost.is_set() else "")
    with caplog.at_level(logging.INFO, "kvstore_hvd"), ThreadPoolExecutor(3) as pool:
        former = pool.submit(connect_hosts, late[0], listeners[0])
        others = [pool.submit(connect_hosts, now[host], listeners[host]) for host in (1, 2)]
        until(lambda: former.done() or caplog.text.count("it does not belong to this world") > 3)
        assert all(not each.done() for each in (former, *others))
        lost.set()
        with pytest.raises(LaunchError, match="given up"):
            former.result(LONG_S)
        assert late[0].unreached == []  # it has not tried for long
        check_connected([connect_hosts(now[0], listeners[0]), *(each.result(LONG_S) for each in others)])


def test_a_host_that_has_given_up_comes_again(listeners):
    """To one that still waits for others, which has its first connection."""
    of_all, lost = worlds(listeners), []
    former = dataclasses.replace(of_all[1], lost=lambda: lost and "it gave up")
    waiting = links._Meeting(of_all[0], listeners[0])
    with ThreadPoolExecutor(4) as pool:
        first, gone = pool.submit(waiting.run), pool.submit(connect_hosts, former, listeners[1])
        connection = until(lambda: waiting._found.get(1))
        lost.append(1)
        with pytest.raises(LaunchError, match="it gave up"):
            gone.result(LONG_S)
        again = pool.submit(connect_hosts, of_all[1], listeners[1])
        until(lambda: waiting._found.get(1, connection) is not connection)
        last = pool.submit(connect_hosts, of_all[2], listeners[2])
        check_connected([each.result(LONG_S) for each in (first, again, last)])


@pytest.mark.parametrize("says", [b"", os.urandom(1000), None], ids=["", "?", "x..."])
def test_crowds_of_strangers_hold_nobody_up(listeners, setting, says):
    """More than are let in at a time; they say nothing, or something else, or a byte now and then."""
    setting(KVHVD_START_TIMEOUT="4")  # one of them alone is given longer
    is_over = threading.Event()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        where = [listener.getsockname() for listener in listeners]
        crowd = [stack.enter_context(socket.create_connection(each)) for each in where for _ in range(100)]

        for each in crowd:
            each.sendall(says or b"")

        def trickle():
            while says is None and not is_over.wait(0.2):
                for each in crowd:
                    with contextlib.suppress(OSError):
                        each.send(b"x")

        pool.submit(trickle)
        try:
            check_connected(connect(listeners, worlds(listeners)))
            ended = select.select(crowd, [], [], 0)[0]  # the ones beyond the limit
        finally:
            is_over.set()
    # The first two hosts take in their crowds before the hosts that call them; nobody calls the last one.
    assert len(ended) >= 2 * (100 - links._MOST_STRANGERS)


def test_a_stranger_that_has_read_a_hello_is_refused(listeners, setting):
    """A hello is in clear: a stranger that has read one can neither answer for a host nor call as one."""
    setting(KVHVD_START_TIMEOUT="2")
    of_all = worlds(listeners)
    where = listeners[0].getsockname()
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        place = (f"127.0.0.1:{impostor.getsockname()[1]}",)
        others = of_all[2].addresses
        of_all[2] = dataclasses.replace(of_all[2], addresses=(*others[:2], place, *others[3:]))

        def overhear():
            called = impostor.accept()[0]
            calling = socket.create_connection(where)
            calling.sendall(called.recv(1000))
            called.sendall(os.urandom(64))  # of the length of an answer
            calling.recv(1000)
            calling.sendall(os.urandom(32))
            return called, calling

        overheard = pool.submit(overhear)
        results = connect(listeners, of_all)
        for each in overheard.result(LONG_S):
            each.close()
    assert "rank 3 did not arrive" in str(results[0]), results[0]
    assert f"{place[0]}: another process answers there" in str(results[2]), results[2]


@pytest.mark.parametrize("secret", [b"x", b"s"])
def test_a_host_with_another_secret_and_one_that_calls_another(listeners, setting, secret):
    """The latter for example after two hosts have exchanged their addresses."""
    setting(KVHVD_START_TIMEOUT="1")
    of_all = worlds(listeners, secrets=(b"s", b"s", secret))
    first, second, third = (of_all[0].addresses[rank] for rank in (2, 1, 3))
    if secret == b"s":
        of_all[2] = dataclasses.replace(of_all[2], addresses=(second, first, second, third, first))
    results = connect(listeners, of_all)
    assert all("rank 3 did not arrive within 1 s" in str(each) for each in results[:2]), results
    assert 3 in of_all[0].unreached, "ranks, not places of hosts"
    assert "ranks 0-2, 4 did not arrive" in str(results[2]), results


def test_a_host_that_does_not_come(listeners, setting):
    setting(KVHVD_START_TIMEOUT="1")
    of_all = worlds(listeners)
    listeners[1].close()
    results = connect([listeners[0], listeners[2]], [of_all[0], of_all[2]])
    for text in map(str, results):
        assert "ranks 1, 4 did not arrive within 1 s" in text
        assert "firewall" in text and "KVHVD_NETWORK_INTERFACES" in text
    assert "node1: it has not called node0 at " in str(results[0])
    assert f"node1: node2 has not reached it at {of_all[0].addresses[1][0]}: Connection refused" in str(results[1])
    assert [of_all[host].unreached for host in (0, 2)] == [[1], [1]]


def test_addresses_that_do_not_answer(listeners, setting, monkeypatch):
    """As of an interface that other hosts cannot reach: they cost little the first time, and nothing later."""
    monkeypatch.setattr(links, "_reached", set())
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        for _ in range(4):  # what its backlog does not hold is dropped
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(silent.getsockname())
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        setting(KVHVD_START_TIMEOUT="10")
        for dead in (3, 60):
            of_all = worlds(listeners)
            more = [tuple((*[address] * dead, *each) for each in world.addresses) for world in of_all]
            of_all = [dataclasses.replace(world, addresses=each) for world, each in zip(of_all, more)]
            check_connected(connect(listeners, of_all))


def test_addresses(listeners, setting, monkeypatch):
    port = listeners[0].getsockname()[1]
    assert all(each.endswith(f":{port}") for each in own_addresses(listeners[0]))
    assert len({each.startswith("127.") for each in own_addresses(listeners[0])}) == 1  # of no use beside others
    for chosen in ("lo", "127.0.0.0/8", "127.9.9.9/8", "nothing0,lo"):
        setting(KVHVD_NETWORK_INTERFACES=chosen)
        assert own_addresses(listeners[0]) == [f"127.0.0.1:{port}"]
    monkeypatch.setattr(links, "_listeners", {})
    (address,) = own_addresses()
    with links._listener() as own:  # listens there only
        assert "{}:{}".format(*own.getsockname()) == address
    setting(KVHVD_NETWORK_INTERFACES="nothing0")
    with pytest.raises(LaunchError, match="may use: nothing0"):
        own_addresses(listeners[0])
