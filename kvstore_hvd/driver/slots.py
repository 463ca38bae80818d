"""Places for workers: those of the hosts that are there now, without those where workers crash again and again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Cooldown", "Slot", "Slots"]


@dataclass(frozen=True)
class Slot:
    """A place for one worker: the `index`-th of a host."""

    host: str
    index: int

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


@dataclass(frozen=True)
class Cooldown:
    """For how many seconds a slot is left alone: at least `lower`, at most `upper`."""

    lower: float = 10.0
    upper: float = 300.0

    def seconds(self, count: int, share: float) -> float:
        """For the `count`-th time, counted from 1; `share`, of 0 to 1, keeps slots from coming back all at once."""
        # The exponent is bounded: 2.0 ** 1024 is no float any more.
        return max(self.lower, min(self.upper, self.lower * 2.0 ** min(count, 60) + share * self.lower))


@dataclass
class _Crashes:
    count: int = 0
    until: float = 0.0


class Slots:
    """The slots of all hosts, oldest host first."""

    def __init__(self, cooldown: Cooldown, chance: random.Random | None = None) -> None:
        self._cooldown = cooldown
        self._chance = chance or random.Random()
        self._hosts: dict[str, int] = {}
        self._crashes: dict[Slot, _Crashes] = {}  # of slots that have gone, too: they may come back

    def __contains__(self, slot: Slot) -> bool:
        return slot.index < self._hosts.get(slot.host, 0)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(host, index) for host, count in self._hosts.items() for index in range(count))

    def __len__(self) -> int:
        return sum(self._hosts.values())

    def update(self, hosts: Mapping[str, int]) -> list[tuple[str, str, int]]:
        """Take the hosts that are there now, and how many slots each has."""
        changes = []
        for host, before in list(self._hosts.items()):
            now = hosts.get(host, 0)
            if now < before:
                changes.append(("host_removed", host, now))
            if now > 0:
                self._hosts[host] = now
            else:
                del self._hosts[host]
            if now > before:
                changes.append(("host_added", host, now))
        for host, now in hosts.items():
            if now > 0 and host not in self._hosts:
                self._hosts[host] = now
                changes.append(("host_added", host, now))
        return changes

    def crashed(self, slot: Slot, now: float) -> float:
        """The worker of this slot has crashed; returns for how many seconds the slot gets no other: 0 at first."""
        crashes = self._crashes.setdefault(slot, _Crashes())
        crashes.count += 1
        if crashes.count == 1:
            return 0.0
        seconds = self._cooldown.seconds(crashes.count - 1, self._chance.random())
        crashes.until = now + seconds
        return seconds

    def forgive(self, slot: Slot) -> None:
        """The worker of this slot has lived long: earlier crashes count no more."""
        self._crashes.pop(slot, None)

    def place_of(self, slot: Slot) -> tuple[int, str, int]:
        """What puts slots into their order, those that are gone behind the others."""
        hosts = list(self._hosts)
        return (hosts.index(slot.host) if slot.host in self._hosts else len(hosts), slot.host, slot.index)

    def usable(self, slot: Slot, now: float) -> bool:
        """Whether the slot is there and may get a worker now."""
        return slot in self and self._until(slot) <= now

    def blacklisted(self, now: float) -> list[Slot]:
        """The slots that are there, but may not get a worker yet."""
        return [slot for slot in self if self._until(slot) > now]

    def next_return(self, now: float) -> float | None:
        """When the first of them may; None when there are none."""
        return min((self._until(slot) for slot in self.blacklisted(now)), default=None)

    def _until(self, slot: Slot) -> float:
        return self._crashes[slot].until if slot in self._crashes else 0.0
