"""The executor of a world's GPUs: the workers exchange what they have, and all choose the same path."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from kvstore_hvd import log, native
from kvstore_hvd.config import config
from kvstore_hvd.errors import KVHvdError, LaunchError, message
from kvstore_hvd.gpu.executor import Executor
from kvstore_hvd.gpu.kernels import MAX_RANKS
from kvstore_hvd.gpu.nccl import OLDEST, library, version_text
from kvstore_hvd.gpu.nccl_executor import NcclExecutor
from kvstore_hvd.gpu.ring_executor import RingExecutor
from kvstore_hvd.gpu.runtime import Device, activate, reaches, shared
from kvstore_hvd.gpu.staged_executor import StagedExecutor
from kvstore_hvd.world.topology import Host, Place, exchange

# Bytes of staging memory of our kernels beside NCCL: two halves.
_SMALL_STAGING = 2 << 20


def create_executor(engine: native.Engine | None, topology: Place, ordinal: int) -> Executor:
    """Make this worker's executor for arrays on one of its GPUs. Collective; the device becomes the current one."""
    number = 0

    def share(text: str) -> list[str]:
        """Every worker's text; every exchange has a name of its own."""
        nonlocal number
        number += 1
        return exchange(engine, topology, f"gpu/{number}", text)

    def agreed(fault: str, answer: Callable[[], str]) -> list[str]:
        """Every worker's answer. If one of them fails, all raise its error."""
        cause: KVHvdError | None = None
        try:
            own = {"answer": answer()}
        except KVHvdError as error:
            own, cause = {"fault": str(error)}, error
        everyone = [json.loads(text) for text in share(json.dumps(own))]
        faults = {rank: each["fault"] for rank, each in enumerate(everyone) if "fault" in each}
        if not faults:
            return [each["answer"] for each in everyone]
        details = []
        for text in dict.fromkeys(faults.values()):
            same = [rank for rank, each in faults.items() if each == text]
            details += [f"{topology.rank_list(same)}:", *text.splitlines()]
        ranks = topology.rank_list(faults)
        fix = "see what each of them says; KVHVD_GPU_PATH=staged asks nothing of the GPUs."
        raise LaunchError(message(f"{ranks} {fault}.", details=details, fix=fix, **topology.prefix)) from cause

    rank, size = topology.rank, topology.size
    devices = [Device.from_text(text) for text in agreed("cannot use the GPU", lambda: _describe(ordinal))]
    activate(ordinal)
    answers = agreed("cannot ask", lambda: json.dumps(reaches(ordinal, devices)))
    reach = all(map(json.loads, answers)) and len({device.host for device in devices}) == 1
    wish, timeout_s, staging = config().gpu_path, config().timeout_s, config().gpu_staging_mib << 20
    wishes = share(wish)
    if len(set(wishes)) > 1:
        fact, fix = "the workers disagree on KVHVD_GPU_PATH.", "set it alike on all workers."
        raise LaunchError(message(fact, details=topology.listed(wishes), fix=fix, **topology.prefix))
    # A world of one sends nothing: kernels copy and scale.
    alone = size == 1 and wish != "nccl"
    path, reason = ("kernels", "there is one worker") if alone else choose_path(devices, reach, wish)
    _log_path(path, reason, devices)
    if path == "nccl":
        unique_id = agreed("cannot start NCCL", lambda: library().unique_id() if rank == 0 else "")[0]
        made: list[NcclExecutor] = []

        def make() -> str:
            arguments = rank, size, devices[rank], ordinal, staging, timeout_s, config().start_timeout_s
            made.append(NcclExecutor(library(), unique_id, *arguments))
            return ""

        try:
            agreed("cannot join the others by NCCL", make)
        except LaunchError:
            for executor in made:
                executor.abort()
                executor.close()
            raise
        if wish == "auto" and reach and size <= MAX_RANKS and not shared(devices):
            stream = made[0].stream
            try:
                made[0].small = RingExecutor(rank, devices, ordinal, _SMALL_STAGING, timeout_s, share, stream)
            except LaunchError as error:
                log.once("gpu-small", logging.INFO, "small arrays on GPUs are reduced by NCCL, too: %s", error)
        return made[0]
    if path == "kernels":
        try:
            return RingExecutor(rank, devices, ordinal, staging, timeout_s, share)
        except LaunchError as error:
            # All workers fail alike. There is no other path if the user demands this one, or for a worker alone.
            if wish != "auto" or engine is None:
                raise
            _log_path("staged", str(error), devices)
    assert engine is not None, "a worker alone takes another way"
    return StagedExecutor(engine, rank, ordinal, timeout_s)


def choose_path(devices: Sequence[Device], reach: bool, wish: str) -> tuple[str, str]:
    """The path of a world's arrays, and the reason; the same on all workers."""
    against = {"nccl": "", "kernels": "" if reach else "not all GPUs reach each other's memory", "staged": ""}
    oldest = min(range(len(devices)), key=lambda rank: devices[rank].nccl)
    for uuid, ranks in shared(devices).items():
        listed, name = ", ".join(map(str, ranks)), devices[ranks[0]].name
        against["nccl"] = against["nccl"] or f"ranks {listed} share one GPU ({name}, UUID {uuid}), which NCCL refuses"
    if not against["nccl"] and devices[oldest].nccl < OLDEST:
        against["nccl"] = f"rank {oldest} has no NCCL {OLDEST // 10000}.{OLDEST // 100 % 100} or newer"
    if wish != "auto":
        if against[wish]:
            fact = f"KVHVD_GPU_PATH={wish} is not possible: {against[wish]}."
            raise LaunchError(message(fact, fix="unset KVHVD_GPU_PATH."))
        return wish, "" if wish == "nccl" else "KVHVD_GPU_PATH says so"
    path = next(name for name, fault in against.items() if not fault)
    return path, "; ".join(filter(None, (against[name] for name in ("nccl", "kernels") if name != path)))


def _describe(ordinal: int) -> str:
    try:
        nccl = library().version
    except LaunchError as error:  # a ConfigError passes: the user demands the library that it names
        log.logger.debug("no NCCL: %s", error)
        nccl = 0
    return Device.of(ordinal, Host.here().identity, nccl).to_text()


def _log_path(path: str, reason: str, devices: Sequence[Device]) -> None:
    if path == "staged":
        text = "arrays on GPUs are copied to the host and back for every operation, which is slow: %s"
        log.once("gpu-path", logging.WARNING, text, reason)
    elif path == "kernels":
        log.once("gpu-path", logging.INFO, "arrays on GPUs are reduced by our own kernels: %s", reason)
    else:
        versions = sorted({device.nccl for device in devices})
        text = "arrays on GPUs are reduced by NCCL %s"
        log.once("gpu-path", logging.INFO, text, ", ".join(map(version_text, versions)))
