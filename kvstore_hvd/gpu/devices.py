"""Which GPUs the workers have, who shares one, and so which way their arrays travel."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore_hvd.errors import InvalidRequestError, LaunchError, message
from kvstore_hvd.gpu import runtime
from kvstore_hvd.gpu.runtime import checked, cupy

_OLDEST = (7, 0)  # our kernels order memory by acquire and release, which older ones do not have


@dataclass(frozen=True)
class Device:
    """One worker's GPU, as it tells the others."""

    uuid: str  # names the GPU on all hosts, whatever CUDA_VISIBLE_DEVICES says
    name: str
    host: str  # equal where memory of GPUs can be mapped: a `topology.Host.identity`
    capability: tuple[int, int]
    multiprocessors: int
    #: Version of NCCL that this worker found, as 22304 for 2.23.4; 0: none.
    nccl: int = 0

    @classmethod
    def of(cls, ordinal: int, host: str, nccl: int = 0) -> Device:
        """Ask CUDA about the device of this number."""
        cuda = cupy().cuda.runtime
        with checked("count the GPUs"):
            count = int(cuda.getDeviceCount())
        if not 0 <= ordinal < count:
            raise LaunchError(
                message(
                    f"this process sees {count} GPU{'' if count == 1 else 's'}, but an array is on GPU {ordinal}.",
                    fix="see what CUDA_VISIBLE_DEVICES says.",
                )
            )
        with checked(f"ask about GPU {ordinal}"):
            properties = cuda.getDeviceProperties(ordinal)
        name = properties["name"]
        capability = (int(properties["major"]), int(properties["minor"]))
        device = cls(
            uuid=runtime.device_uuid(ordinal),
            name=name.decode() if isinstance(name, bytes) else str(name),
            host=host,
            capability=capability,
            multiprocessors=int(properties["multiProcessorCount"]),
            nccl=nccl,
        )
        if capability < _OLDEST:
            raise LaunchError(
                message(
                    f"{device.name} (compute capability {capability[0]}.{capability[1]}) is too old: "
                    f"{_OLDEST[0]}.{_OLDEST[1]} (Volta) is the oldest that is served.",
                    fix="train on the CPU of this machine, or on newer GPUs.",
                )
            )
        return device

    def to_text(self) -> str:
        """For the other workers."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Device:
        """What `to_text` made."""
        fields = json.loads(text)
        fields["capability"] = tuple(fields["capability"])
        return cls(**fields)


def activate(ordinal: int) -> None:
    """Make a device the current one of this thread."""
    with checked(f"use GPU {ordinal}"):
        cupy().cuda.runtime.setDevice(ordinal)


@contextlib.contextmanager
def active(ordinal: int) -> Iterator[None]:
    """Make a device the current one of this thread inside."""
    with checked("ask for the current GPU"):
        before = int(cupy().cuda.runtime.getDevice())
    activate(ordinal)
    try:
        yield
    finally:
        activate(before)


class Residents:
    """Tells addresses on one device from those on others; what it has found it remembers."""

    _PAGE_BITS = 21  # memory of two devices is never in one piece of 2 MiB

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._known: set[int] = set()

    def check(self, addresses: Iterable[int]) -> None:
        """Refuse addresses that kernels on the device cannot use. Addresses of 0, of empty arrays, pass."""
        for address in addresses:
            if address and address >> self._PAGE_BITS not in self._known:
                with checked("ask where an array lies"):
                    found = int(cupy().cuda.runtime.pointerGetAttributes(address).device)
                if found != self._ordinal:
                    place = f"GPU {found}" if found >= 0 else "the CPU"
                    raise InvalidRequestError(
                        message(
                            f"an array is on {place}, but this worker's operations are on GPU {self._ordinal}.",
                            fix="use one GPU in each worker, and start a worker for each GPU.",
                        )
                    )
                self._known.add(address >> self._PAGE_BITS)


def reaches(ordinal: int, devices: Sequence[Device]) -> bool:
    """Whether this device can read and write the memory of all of `devices`: on its host, and visible to it."""
    cuda = cupy().cuda.runtime
    own = runtime.device_uuid(ordinal)
    with checked("ask which GPUs reach each other"):
        visible = {runtime.device_uuid(number): number for number in range(cuda.getDeviceCount())}
        for device in devices:
            if device.uuid == own:
                continue
            number = visible.get(device.uuid)
            if number is None or not cuda.deviceCanAccessPeer(ordinal, number):
                return False
    return True


def shared(devices: Sequence[Device]) -> dict[str, list[int]]:
    """The ranks on each GPU that has several, by its UUID."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device.uuid, []).append(rank)
    return {uuid: users for uuid, users in ranks.items() if len(users) > 1}


def choose_path(devices: Sequence[Device], reach: bool, wish: str, oldest_nccl: int) -> tuple[str, str]:
    """Which way arrays travel in a world, and why; the same on all workers."""
    users = shared(devices)
    same_host = len({device.host for device in devices}) == 1
    against_nccl = ""
    if users:
        uuid, ranks = next(iter(users.items()))
        listed = ", ".join(map(str, ranks))
        against_nccl = f"ranks {listed} share one GPU ({devices[ranks[0]].name}, UUID {uuid}), which NCCL refuses"
    elif min(device.nccl for device in devices) < oldest_nccl:
        rank = min(range(len(devices)), key=lambda r: devices[r].nccl)
        against_nccl = f"rank {rank} has no NCCL {oldest_nccl // 10000}.{oldest_nccl // 100 % 100} or newer"
    against_kernels = "" if same_host and reach else "not all GPUs reach each other's memory"
    against = {"nccl": against_nccl, "kernels": against_kernels, "staged": ""}
    if wish != "auto":
        if against[wish]:
            raise LaunchError(
                message(f"KVHVD_GPU_PATH={wish} is not possible: {against[wish]}.", fix="unset KVHVD_GPU_PATH.")
            )
        return wish, "" if wish == "nccl" else "KVHVD_GPU_PATH says so"
    path = next(name for name in ("nccl", "kernels", "staged") if not against[name])
    return path, "; ".join(filter(None, (against[name] for name in ("nccl", "kernels") if name != path)))
