"""Which executor a world gets for its GPUs: the workers tell each other what they have, and decide alike."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from kvstore_hvd import log, native
from kvstore_hvd.config import config
from kvstore_hvd.errors import KVHvdError, LaunchError, message
from kvstore_hvd.gpu.devices import Device, activate, choose_path, reaches, shared
from kvstore_hvd.gpu.executor import Executor, SplitExecutor
from kvstore_hvd.gpu.kernels import MAX_RANKS
from kvstore_hvd.gpu.nccl_executor import NcclExecutor
from kvstore_hvd.gpu.nccl_library import OLDEST, library, version_text
from kvstore_hvd.gpu.ring_executor import RingExecutor
from kvstore_hvd.gpu.staged_executor import StagedExecutor
from kvstore_hvd.world.agree import exchange
from kvstore_hvd.world.topology import Host, Topology

# What our kernels do sooner than NCCL begins; and their staging memory for it: two halves.
_SMALL_BYTES = 64 << 10
_SMALL_STAGING = 2 << 20


def create_executor(engine: native.Engine | None, topology: Topology, ordinal: int) -> Executor:
    """Make this worker's executor for arrays on one of its GPUs. Collective; the device becomes the current one."""
    talk = _Talk(engine, topology)
    devices = [Device.from_text(text) for text in talk.agreed("cannot use the GPU", lambda: _describe(ordinal))]
    activate(ordinal)
    reach = all(json.loads(text) for text in talk.agreed("cannot ask", lambda: json.dumps(reaches(ordinal, devices))))
    wish = config().gpu_path
    wishes = talk.tell(wish)
    if len(set(wishes)) > 1:
        details = topology.listed(wishes)
        fact = "the workers disagree on KVHVD_GPU_PATH."
        raise LaunchError(message(fact, details=details, fix="set it alike on all workers.", **topology.speaker))
    # A world of one sends nothing: kernels copy and scale.
    alone = topology.size == 1 and wish != "nccl"
    path, reason = ("kernels", "there is one worker") if alone else choose_path(devices, reach, wish, OLDEST)
    _say(path, reason, devices)
    has_small = (
        wish == "auto"
        and reach
        and topology.size <= MAX_RANKS
        and len({device.host for device in devices}) == 1
        and not shared(devices)
    )
    return _make(path, talk, topology, devices, ordinal, has_small)


def _make(
    path: str, talk: _Talk, topology: Topology, devices: Sequence[Device], ordinal: int, has_small: bool
) -> Executor:
    """The executor of a path; `has_small`: our kernels serve what is small, beside NCCL."""
    rank, size = topology.rank, topology.size
    staging, timeout_s = config().gpu_staging_mib << 20, config().timeout_s
    made: list[Executor] = []

    def make_nccl() -> str:
        arguments = rank, size, devices[rank], ordinal, staging, timeout_s, config().start_timeout_s
        made.append(NcclExecutor(library(), unique_id, *arguments))
        return ""

    if path == "nccl":
        unique_id = talk.agreed("cannot start NCCL", lambda: library().unique_id() if rank == 0 else "")[0]
        talk.agreed("cannot join the others by NCCL", make_nccl, made)
        large = made[0]
        if not has_small or not isinstance(large, NcclExecutor):
            return large
        try:
            small = RingExecutor(rank, devices, ordinal, _SMALL_STAGING, timeout_s, talk.tell, large.stream)
        except LaunchError as error:
            log.once("gpu-small", logging.INFO, "small arrays on GPUs are reduced by NCCL, too: %s", error)
            return large
        return SplitExecutor(small, large, _SMALL_BYTES)
    if path == "kernels":
        try:
            return RingExecutor(rank, devices, ordinal, staging, timeout_s, talk.tell)
        except LaunchError as error:
            # On all workers alike. Whoever demands this way, or has no other, gets the error.
            if config().gpu_path != "auto" or talk.engine is None:
                raise
            _say("staged", str(error), devices)
    assert talk.engine is not None, "a worker alone takes another way"
    return StagedExecutor(talk.engine, rank, ordinal, timeout_s)


def _describe(ordinal: int) -> str:
    try:
        nccl = library().version
    except LaunchError as error:  # not a ConfigError: what the user demands is not left out in silence
        log.logger.debug("no NCCL: %s", error)
        nccl = 0
    return Device.of(ordinal, Host.here().identity, nccl).to_text()


def _say(path: str, reason: str, devices: Sequence[Device]) -> None:
    if path == "staged":
        text = "arrays on GPUs are copied to the host and back for every operation, which is slow: %s"
        log.once("gpu-path", logging.WARNING, text, reason)
    elif path == "kernels":
        log.once("gpu-path", logging.INFO, "arrays on GPUs are reduced by our own kernels: %s", reason)
    else:
        versions = sorted({device.nccl for device in devices})
        text = "arrays on GPUs are reduced by NCCL %s"
        log.once("gpu-path", logging.INFO, text, ", ".join(map(version_text, versions)))


class _Talk:
    """What the workers tell each other while they set out; every text has a name of its own."""

    def __init__(self, engine: native.Engine | None, topology: Topology) -> None:
        self.engine, self._topology = engine, topology
        self._number = 0

    def tell(self, text: str) -> list[str]:
        """Every worker's text."""
        self._number += 1
        return exchange(self.engine, self._topology, f"gpu/{self._number}", text)

    def agreed(self, fault: str, answer: Callable[[], str], made: Sequence[Executor] = ()) -> list[str]:
        """Every worker's answer; where one has none, all raise why, and what was made is closed."""
        cause: Exception | None = None
        try:
            told = {"answer": answer()}
        except KVHvdError as error:
            told, cause = {"fault": str(error)}, error
        texts = [json.loads(text) for text in self.tell(json.dumps(told))]
        faults = {rank: each["fault"] for rank, each in enumerate(texts) if "fault" in each}
        if faults:
            for executor in made:
                executor.abort()
                executor.close()
            details = []
            for text in dict.fromkeys(faults.values()):
                same = [rank for rank, each in faults.items() if each == text]
                details += [f"{self._topology.rank_list(same)}:", *text.splitlines()]
            ranks = self._topology.rank_list(faults)
            fix = "see what each of them says; KVHVD_GPU_PATH=staged asks nothing of the GPUs."
            text = message(f"{ranks} {fault}.", details=details, fix=fix, **self._topology.speaker)
            raise LaunchError(text) from cause
        return [each["answer"] for each in texts]
