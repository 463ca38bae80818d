"""Where workers run: the hosts of ``-H`` and of host files, and how many workers each takes."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable

from kvstore_hvd.errors import LaunchError, message

__all__ = ["hosts_of_file", "hosts_of_option", "is_here", "refuse_others", "slots_of"]

_ENTRY = re.compile(
    r"(?P<host>[^\s:,=\[\]]+|\[?::1\]?)(?:\s*:\s*(?P<n>-?\d{1,9})|\s+slots\s*=\s*(?P<slots>-?\d{1,9}))?(?:\s+max_slots\s*=\s*\d+)?"
)


def hosts_of_option(text: str) -> list[str]:
    """The entries of ``-H``: ``host`` or ``host:slots``, with commas between them."""
    return [entry.strip() for entry in text.split(",")]


def hosts_of_file(path: str) -> list[str]:
    """The entries of a host file: ``host``, ``host slots=N`` or ``host:N`` in each line, ``#`` before comments."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            message(f"the host file cannot be read: {error}.", fix="give the path of a text file.")
        ) from None
    entries = [line for line in lines if line]
    if not entries:
        raise LaunchError(message(f"the host file '{path}' names no host.", fix="one line: localhost slots=4"))
    return entries


def slots_of(entries: Iterable[str], default: int = 1) -> dict[str, int]:
    """The hosts of these entries, in their order, each with its number of slots; `default` where none is given."""
    slots: dict[str, int] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise LaunchError(message(f"'{entry}' is not HOST:N or 'HOST slots=N'.", fix="for example -H localhost:4"))
        host, count = match["host"].strip("[]").lower(), int(match["n"] or match["slots"] or default)
        if count < 1:
            raise LaunchError(
                message(f"'{entry}': a host takes at least 1 worker.", fix="give it a slot, or omit the host.")
            )
        if host in slots:
            raise LaunchError(message(f"the host '{host}' is named twice.", fix="add its slots up in one entry."))
        slots[host] = count
    return slots


def refuse_others(hosts: Iterable[str]) -> None:
    """Refuse hosts that are not this one."""
    for host in hosts:
        if not is_here(host):
            raise LaunchError(
                message(
                    f"'{host}' is another host; kvhvdrun starts workers on this one only.",
                    fix=f"start on this host, '{socket.gethostname()}': -H localhost:N, or omit -H; several: mpirun.",
                )
            )


def is_here(host: str) -> bool:
    """Whether a name, in small letters, is one of this host: its own, localhost, or an address of the loopback."""
    if host == "localhost":
        return True
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        name = socket.gethostname().lower()
        return host in (name, name.partition(".")[0])
