"""The meeting that hands out the segment: who comes, stays away, and has no business there. Ranks are threads."""

import dataclasses
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.world import meeting
from kvstore_hvd.world.meeting import mac, share_segment, socket_name
from kvstore_hvd.world.topology import Host, Place, World
from support.patience import patient

LONG_S = patient(60.0)
JOBS = iter(range(1_000_000))

pytestmark = pytest.mark.timeout(90)


def worlds(size, secret=b"s" * 32, elsewhere=0):
    """Of the workers of this host; others have the lowest ranks."""
    job = f"test-{os.getpid()}-{next(JOBS)}"
    hosts = [dataclasses.replace(Host.here(), identity="elsewhere")] * elsewhere + [Host.here()] * size
    ranks = range(elsewhere, elsewhere + size)
    return [World(Place.of(rank, hosts, source="launcher"), job, secret) for rank in ranks]


def memory(payloads=()):
    return os.memfd_create("test", os.MFD_CLOEXEC)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(64) as executor:
        yield executor


def start(pool, world, create=memory, timeout_s=LONG_S, version="", payload=""):
    return pool.submit(share_segment, world, create, version=version, payload=payload, timeout_s=timeout_s)


def connect(name, kind=socket.SOCK_SEQPACKET):
    while True:
        stranger = socket.socket(socket.AF_UNIX, kind)
        stranger.settimeout(LONG_S)
        try:
            stranger.connect(name)
            return stranger
        except ConnectionRefusedError:
            stranger.close()
            threading.Event().wait(0.002)


def same_file(*futures):
    descriptors = [future.result(LONG_S) for future in futures]
    inodes = {(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in descriptors}
    for fd in descriptors:
        os.close(fd)
    return len(inodes) == 1


@pytest.mark.parametrize("size", [2, 33])
def test_all_ranks_get_the_same_memory(pool, size):
    calls = []

    def create(told):
        calls.append(told)
        return memory()

    futures = [start(pool, world, create, payload=f"of {rank} é") for rank, world in enumerate(worlds(size))]
    descriptors = [future.result(LONG_S) for future in futures]
    assert len(set(descriptors)) == size
    assert not any(os.get_inheritable(fd) for fd in descriptors)
    assert same_file(*futures)
    (told,) = calls
    assert sorted(told) == sorted(f"of {rank} é" for rank in range(size)), "one is made, of what all tell"


def test_a_leader_without_descriptors_waits_for_them(pool, monkeypatch, scarce):
    monkeypatch.setattr(meeting, "_socket", lambda: scarce.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    assert same_file(*(start(pool, world) for world in worlds(2)))
    scarce.check()


@pytest.mark.parametrize("present", [(0,), (1, 2)])
def test_a_world_that_is_lost_is_waited_for_no_longer(pool, present):
    """Whoever waits, for the server or in it, goes at once, with the reason."""
    lost = [""]
    group = [dataclasses.replace(world, lost=lambda: lost[0]) for world in worlds(3)]
    early = [start(pool, group[rank]) for rank in present]
    threading.Event().wait(0.1)
    assert not any(future.done() for future in early)
    lost[0] = "worker 2 was killed."
    for future in early:
        with pytest.raises(LaunchError, match=r"need not meet any more: worker 2 was killed\."):
            future.result(5.0)


@pytest.mark.parametrize("garbage", [b"", b"KVHVD\x01" + bytes(200), bytes(65536)], ids=["silence", "magic", "long"])
def test_a_stranger_changes_nothing(pool, garbage):
    first, second = worlds(2)
    leader = start(pool, first)
    strangers = [connect(socket_name(first)) for _ in range(5)]
    for stranger in strangers[:-1]:
        if garbage:
            stranger.send(garbage)
    # The strangers are still connected: nobody waits for them.
    assert same_file(leader, start(pool, second))
    for stranger in strangers:
        received, descriptors, _, _ = socket.recv_fds(stranger, 65536, 4)
        assert (len(received), descriptors) == (38, [])  # the challenge, and nothing else
        stranger.close()


def test_a_peer_with_another_secret_is_no_peer(pool, monkeypatch):
    first, second = worlds(2, elsewhere=1)
    name = socket_name(first)
    monkeypatch.setattr(meeting, "socket_name", lambda world: name)  # it found the name out
    wrong = dataclasses.replace(second, secret=b"x" * 32)
    leader = start(pool, first)
    intruder = start(pool, wrong, timeout_s=0.3)
    with pytest.raises(LaunchError, match=r"\[rank 2/3\] rank 1 did not arrive"):
        intruder.result(LONG_S)
    assert not leader.done()
    assert same_file(leader, start(pool, second))


def test_a_process_of_another_user_is_not_heard(pool, monkeypatch):
    """Nor is it believed as the server."""
    first, second = worlds(2)
    leader = start(pool, first, timeout_s=patient(10))
    user = os.geteuid() + 1
    monkeypatch.setattr(meeting, "peer_process", lambda connection: (1, user))
    with connect(socket_name(first)) as peer:
        assert peer.recv(100) == b""
    with pytest.raises(LaunchError, match="another process answers in its place"):
        start(pool, second, timeout_s=0.5).result(LONG_S)
    monkeypatch.undo()
    assert same_file(leader, start(pool, second))


@pytest.mark.parametrize("is_mute", [False, True])
def test_a_server_with_another_secret_is_not_believed(pool, is_mute):
    """One that never speaks does not hang its peer."""
    second = worlds(2)[1]
    before = set(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(socket_name(second))
        impostor.listen(16)
        follower = start(pool, second, timeout_s=0.5)
        accepted, _ = impostor.accept()
        if not is_mute:
            accepted.send(b"KVHVD\x01" + bytes(32))
            accepted.recv(4096)
            trap = memory()
            socket.send_fds(accepted, [b"\x01" + bytes(32)], [trap])
            os.close(trap)
        answer = "rank 0 did not arrive within" if is_mute else "another process answers in its place"
        with pytest.raises(LaunchError, match=answer):
            follower.result(LONG_S)
        accepted.close()
    assert set(os.listdir("/proc/self/fd")) == before  # what it was sent is not kept


def hello(peer, world, rank, pid, nonce):
    body = meeting._MAGIC + bytes(32) + meeting._HELLO.pack(rank, pid)
    peer.send(body + mac(world.secret, b"client", nonce, body))


def test_replayed_hello_is_refused(pool):
    first, second = worlds(2)
    leader = start(pool, first)
    with connect(socket_name(first)) as one, connect(socket_name(first)) as other:
        nonce = one.recv(100)[6:]
        other.recv(100)
        hello(other, second, 1, 1, nonce)  # right for the first connection, sent on the second
        assert other.recv(100) == b""
    assert same_file(leader, start(pool, second))


def test_missing_ranks_are_named_on_every_rank_that_came(pool):
    four = worlds(4, elsewhere=2)
    leader = start(pool, four[0], timeout_s=0.5)
    second = start(pool, four[1])
    told = r"(?s)^\[rank 2/6\] ranks 4-5 did not arrive within 0.5 s.*arrived: ranks 2-3.*KVHVD_START_TIMEOUT"
    with pytest.raises(LaunchError, match=told):
        leader.result(LONG_S)
    with pytest.raises(LaunchError, match=r"(?s)^\[rank 3/6\] the start failed.*ranks 4-5 did not.*Fix: .*KVHVD_ST"):
        second.result(LONG_S)


def test_a_peer_that_ends_meanwhile_is_named_at_once(pool):
    three = worlds(3, elsewhere=1)
    leader = start(pool, three[0])
    with connect(socket_name(three[0])) as peer:
        hello(peer, three[0], 2, 4711, peer.recv(100)[6:])
    with pytest.raises(LaunchError, match=r"rank 3 \(pid 4711\) ended while"):
        leader.result(LONG_S)


def test_two_processes_of_one_rank(pool):
    three = worlds(3, elsewhere=1)
    leader = start(pool, three[0])
    twins = [start(pool, three[1]), start(pool, three[1])]
    failed = next(as_completed(twins, patient(10)))
    with pytest.raises(LaunchError, match="rank 2 has already joined from another process"):
        failed.result()
    with pytest.raises(LaunchError, match="another process is this rank of the job already"):
        start(pool, three[0]).result(LONG_S)
    assert same_file(leader, *[twin for twin in twins if twin is not failed], start(pool, three[2]))


def test_versions_that_differ_are_named_on_every_rank(pool):
    three = worlds(3, elsewhere=1)
    futures = [start(pool, world, version=version) for world, version in zip(three, ["1.0", "1.1", "1.0"])]
    for future in futures:
        with pytest.raises(LaunchError, match=r"(?s)different versions.*1\.0: ranks 1, 3.*1\.1: rank 2"):
            future.result(LONG_S)


def test_the_name_does_not_show_job_or_secret():
    world = worlds(2)[0]
    name = socket_name(world)
    assert name.startswith(b"\0")  # abstract: no file
    assert not [each for each in (world.job.encode(), world.secret) if each in name]
    assert b"s" * 32 not in repr(world).encode()
    others = [dataclasses.replace(world, **each) for each in ({"meeting": 1}, {"job": "j"}, {"secret": b"x" * 32})]
    assert len({name, *map(socket_name, others)}) == 4
