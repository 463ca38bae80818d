"""Links: native threads, one on each host, that exchange what the workers of a host have reduced.

Under MPI a link calls a few functions of the library that mpi4py has loaded, by their addresses. Without MPI it has TCP
connections to all other links, in clear. Python sends no messages itself: it would wait for the interpreter lock, for
milliseconds beside a busy program.

How hosts connect by TCP: every worker listens on a port of its own, and the launcher gives all workers the addresses
of all. Of two hosts, the later one calls the earlier one. Both ends prove by HMAC-SHA256 over fresh nonces of both that
they know the job's secret. The proof names the world and both hosts, so a connection of one world never serves another.
A stranger is a caller that has proved nothing: it has a thread of its own and a few seconds, and past 64 strangers the
oldest connection is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import ipaddress
import itertools
import os
import secrets
import select
import socket
import struct
import threading
import time

from kvstore_hvd import log, native
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.config import config
from kvstore_hvd.errors import HorovodInternalError, LaunchError, message
from kvstore_hvd.world.meeting import MAC_BYTES, NONCE_BYTES, POLL_S, accept, check_wanted, mac
from kvstore_hvd.world.topology import FIX_OF_LATE, World

_FUNCTIONS = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Cancel", "MPI_Iprobe", "MPI_Get_count")
# MPI tags of one world, see transport.hpp.
_TAGS = 4
# Worlds of one meeting: that of all, and 511 joins of process sets. Tags return after 15 meetings or more (MPI promises
# 32,767 tags; today's libraries have 2^29).
_WORLDS = 512

_SIOCGIFADDR = 0x8915
_HELLO = struct.Struct(f"!8sII{NONCE_BYTES}s{MAC_BYTES}s")  # magic, calling and called host, nonce, world
_MAGIC = b"KVHVDtcp"
# Time for one handshake.
_HANDSHAKE_S = 5.0
# Time between two calls of one host.
_RETRY_S = 0.05
# Time for the first call of an address; it doubles at each call: another address of the host may answer sooner.
_FIRST_S = 0.3
_MOST_STRANGERS = 64


def start_link(world: World, segment: native.Segment) -> None:
    """On local rank 0 of each host of a world on several: start the host's link, and wait for those of the others."""
    if world.topology.host_count == 1:
        return
    compression = config().link_compression
    transport = _mpi_transport(world) if world.communicator is not None else native.tcp_transport(connect_hosts(world))
    link = native.Link(
        segment,
        transport,
        config().timeout_s,
        config().link_timeout_s,
        f"{native.abi()} {compression} {config().thresholds}",
        native.DTYPES[{"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[compression]],
    )
    try:
        _await_links(world, link)
    except BaseException:
        link.give_up()
        raise


def _mpi_transport(world: World) -> native.Transport:
    topology = world.topology
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        fact = "MPI was initialised without MPI_THREAD_MULTIPLE, which several hosts need."
        fix = "call init() before MPI is initialised, or leave mpi4py.rc.thread_level as it is ('multiple')."
        raise LaunchError(message(fact, **topology.prefix, fix=fix))
    library = ctypes.CDLL(MPI.__file__)
    addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS}
    byte, communicator = (int(MPI._handleof(each)) & 0xFFFFFFFFFFFFFFFF for each in (MPI.BYTE, world.communicator))
    most_tags = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // _TAGS
    return native.mpi_transport(
        {**addresses, "byte": byte},
        communicator,
        # Under MPI the lowest rank of a host has its local rank 0.
        [topology.all_ranks[ranks[0]] for ranks in topology.ranks_by_host.values()],
        (world.meeting * _WORLDS + world.index % _WORLDS) % most_tags * _TAGS,
    )


def _await_links(world: World, link: native.Link) -> None:
    topology, limit_s = world.topology, config().start_timeout_s
    deadline = Deadline(limit_s)
    try:
        while missing := link.missing():
            check_wanted(world)
            if deadline.left() <= 0:
                hosts = dict.fromkeys(topology.hosts[rank] for rank in missing)
                details = [f"{host}: {topology.rank_list(topology.ranks_by_host[host])}" for host in hosts]
                raise topology.late(missing, limit_s, details)
            time.sleep(deadline.wait_s(POLL_S))
    except HorovodInternalError as error:
        fact, _, fix = str(error).partition("\n  Fix: ")
        raise LaunchError(message(f"{fact}.", **topology.prefix, fix=f"{fix}." if fix else fix)) from error


# -- TCP ----------------------------------------------------------------------------------------------------------

# Addresses, without ports, that have answered: they are called first.
_reached: set[str] = set()
# The listening socket of this process, by process id: a forked child closes its parent's, and makes its own.
_listeners: dict[int, socket.socket] = {}


def _listener(address: str = "") -> socket.socket:
    """The listening socket of this process; the first call chooses its address, '' for all."""
    owner = os.getpid()
    if owner not in _listeners:
        _listeners[owner] = listener = socket.create_server((address, 0), backlog=128)
        listener.setblocking(False)
        os.register_at_fork(after_in_child=listener.close)
    return _listeners[owner]


def own_addresses(listener: socket.socket | None = None) -> list[str]:
    """Where other hosts reach this process: ``ADDRESS:PORT`` of each interface that the job may use. IPv4."""
    chosen = config().network_interfaces.replace(",", " ").split()
    every: list[tuple[str, str]] = []  # name and address of each interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                every.append((name, socket.inet_ntoa(answer[20:24])))
    usable = [address for name, address in every if any(_is_in(each, name, address) for each in chosen)]
    if not chosen:
        addresses = [address for _, address in every]
        usable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback] or addresses
    if not usable:
        has = ", ".join(f"{name} {address}" for name, address in every) or "none with an IPv4 address"
        fact = f"{socket.gethostname()} has none of the network interfaces that the job may use: {', '.join(chosen)}."
        fix = "--network-interfaces takes names and networks of all hosts: eth0,10.0.0.0/8; or omit it."
        raise LaunchError(message(fact, details=[f"it has: {has}"], fix=fix))
    # One address: nothing listens at others.
    port = (listener or _listener(usable[0] if len(usable) == 1 else "")).getsockname()[1]
    return [f"{address}:{port}" for address in usable]


def _is_in(wanted: str, name: str, address: str) -> bool:
    try:
        return wanted == name or ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def connect_hosts(world: World, listener: socket.socket | None = None) -> list[int]:
    """Sockets to the leaders of all other hosts, by host, -1 for this one. Collective over the leaders of hosts."""
    return _Meeting(world, listener or _listener()).run()


class _Meeting:
    def __init__(self, world: World, listener: socket.socket) -> None:
        topology = world.topology
        self._world, self._listener = world, listener
        self._hosts = list(topology.ranks_by_host)
        self._own = self._hosts.index(topology.host)
        self._name = mac(world.secret, b"world", f"{world.job}/{world.meeting}/{world.index}".encode())
        self._lock = threading.Lock()  # of all that follows
        self._found: dict[int, socket.socket] = {}
        self._strangers: list[socket.socket] = []  # the oldest first
        self._faults: dict[int, dict[str, str]] = {}  # by host and address
        self._is_over = False

    @property
    def _absent(self) -> list[int]:
        return [host for host in range(len(self._hosts)) if host != self._own and host not in self._found]

    def run(self) -> list[int]:
        deadline, calls = Deadline(config().start_timeout_s), select.poll()
        calls.register(self._listener, select.POLLIN)
        for host in range(self._own):
            threading.Thread(target=self._call, args=(host,), daemon=True).start()
        try:
            while self._absent:
                check_wanted(self._world)
                if deadline.left() <= 0:
                    raise self._missing()
                calls.poll(1000 * deadline.wait_s(POLL_S))
                for _ in range(_MOST_STRANGERS):  # before the next look at the clock
                    connection = accept(self._listener)
                    if connection is None:
                        break
                    with self._lock:
                        self._strangers.append(connection)
                        if len(self._strangers) > _MOST_STRANGERS:
                            with contextlib.suppress(OSError):  # the stranger has gone
                                self._strangers.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
        except BaseException:
            with self._lock:
                self._is_over = True  # later connections are closed
                if deadline.left() < config().start_timeout_s / 2:  # a shorter attempt proves nothing
                    self._world.unreached.extend(map(self._leader, self._absent))
                for connection in self._found.values():
                    connection.close()
            raise
        with self._lock:
            self._is_over = True
        return [-1 if host == self._own else self._found[host].detach() for host in range(len(self._hosts))]

    def _keep(self, host: int, connection: socket.socket) -> None:
        with self._lock:
            # A second connection: the other end has given up the first one, and has called again.
            former = connection if self._is_over else self._found.pop(host, None)
            if former is not connection:
                connection.settimeout(None)
                self._found[host] = connection
        if former is not None:
            former.close()

    def _leader(self, host: int) -> int:
        topology = self._world.topology
        ranks = topology.ranks_by_host[self._hosts[host]]
        return topology.all_ranks[min(ranks, key=topology.local_rank_of.__getitem__)]

    def _call(self, host: int) -> None:
        """Call another host until it answers, at each of its addresses in turn."""
        addresses = [address.rpartition(":") for address in self._world.addresses[self._leader(host)]]
        addresses.sort(key=lambda address: address[0] not in _reached)
        faults = self._faults[host] = {}
        for number, (name, colon, port) in enumerate(itertools.cycle(addresses)):
            if self._is_over:
                return
            limit_s = min(_HANDSHAKE_S, _FIRST_S * 2 ** min(number // len(addresses), 9))
            with contextlib.ExitStack() as on_failure:
                try:
                    connection = on_failure.enter_context(socket.create_connection((name, int(port)), limit_s))
                    self._prove(connection, host)
                except OSError as error:
                    faults[name + colon + port] = error.strerror or str(error)
                    time.sleep(_RETRY_S)
                else:
                    on_failure.pop_all()
                    _reached.add(name)
                    self._keep(host, connection)
                    return

    def _prove(self, connection: socket.socket, host: int) -> None:
        until = time.monotonic() + _HANDSHAKE_S
        hello = _HELLO.pack(_MAGIC, self._own, host, secrets.token_bytes(NONCE_BYTES), self._name)
        connection.sendall(hello)
        nonce, proof = _receive(connection, NONCE_BYTES, until), _receive(connection, MAC_BYTES, until)
        if not hmac.compare_digest(proof, mac(self._world.secret, b"called", hello, nonce)):
            raise ConnectionError("another process answers there")
        connection.sendall(mac(self._world.secret, b"calling", hello, nonce))

    def _answer(self, connection: socket.socket) -> None:
        until = time.monotonic() + _HANDSHAKE_S
        try:
            hello = _receive(connection, _HELLO.size, until)
            magic, host, called, _, name = _HELLO.unpack(hello)
            is_of_world = magic == _MAGIC and called == self._own < host < len(self._hosts)
            if not (is_of_world and hmac.compare_digest(name, self._name)):
                raise ConnectionError("it does not belong to this world")
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(nonce + mac(self._world.secret, b"called", hello, nonce))
            proof = _receive(connection, MAC_BYTES, until)
            if not hmac.compare_digest(proof, mac(self._world.secret, b"calling", hello, nonce)):
                raise ConnectionError("it does not know the secret of the job")
        except OSError as error:
            log.logger.info("refused a connection: %s", error)
            connection.close()
        else:
            self._keep(host, connection)
        finally:
            with self._lock:
                if connection in self._strangers:
                    self._strangers.remove(connection)

    def _missing(self) -> LaunchError:
        topology, own = self._world.topology, self._hosts[self._own]
        ranks = [rank for host in self._absent for rank in topology.ranks_by_host[self._hosts[host]]]
        details = []
        for host in self._absent:
            faults = [f"{address}: {text}" for address, text in list(self._faults.get(host, {}).items())]
            how = f"{own} has not reached it at {'; '.join(faults) or 'any address'}"
            if host > self._own:
                how = f"it has not called {own} at {' or '.join(own_addresses(self._listener))}"
            details.append(f"{self._hosts[host]}: {how}")
        fact = f"{topology.rank_list(ranks)} did not arrive within {config().start_timeout_s:g} s."
        fix = f"{FIX_OF_LATE} See whether a firewall keeps workers of these hosts from connecting to each other, too; "
        fix += "KVHVD_NETWORK_INTERFACES chooses interfaces."
        return LaunchError(message(fact, **topology.prefix, details=details, fix=fix))


def _receive(connection: socket.socket, count: int, until: float) -> bytes:
    """Receive this many bytes; `until` is a time of the monotonic clock."""
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(count - len(received))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        received += more
    return received
