"""The binding of NCCL: on a stand-in, and as far as it goes without a GPU on the real library where it is installed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_hvd import config as config_module
from kvstore_hvd import errors
from kvstore_hvd.errors import ConfigError, LaunchError, TransportError
from kvstore_hvd.gpu import nccl_library, runtime
from kvstore_hvd.gpu.nccl import NcclCommunicator
from kvstore_hvd.gpu.nccl_library import Config, NcclLibrary, UniqueId
from kvstore_hvd.process.stacks import OWN_THREADS
from support.fake_cuda import FakeCuda
from support.fake_nccl import FakeNccl
from support.gpu_ranks import on_ranks
from support.patience import patient


@pytest.fixture
def nccl() -> Iterator[Any]:
    cuda = FakeCuda()
    yield FakeNccl(cuda)
    cuda.close()


def pair(nccl: Any, timeout_s: float = 10.0) -> list[NcclCommunicator]:
    unique_id = nccl.unique_id()
    return on_ranks(2, lambda rank: NcclCommunicator(nccl, unique_id, rank, 2, timeout_s))


def await_abort(nccl: Any) -> None:
    """An abort returns at once, and takes place in a thread."""
    end = time.monotonic() + patient(20)
    while "ncclCommAbort" not in nccl.names():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- Structures -------------------------------------------------------------------------------------------------------


def test_layouts_are_those_of_nccl_h() -> None:
    assert ctypes.sizeof(UniqueId) == 128
    # size_t; magic, version, blocking, cgaClusterSize, minCTAs, maxCTAs; char*; splitShare, and its padding
    assert ctypes.sizeof(Config) == 8 + 6 * 4 + 8 + 4 + 4
    assert (Config.blocking.offset, Config.net_name.offset, Config.split_share.offset) == (16, 32, 40)
    made = Config.non_blocking()
    assert (made.size, made.magic, made.version, made.blocking) == (48, 0xCAFEBEEF, 21800, 0)
    assert (made.min_ctas, made.net_name) == (-(2**31), None)


# -- Communicators ----------------------------------------------------------------------------------------------------


def test_ranks_meet_and_part(nccl: Any) -> None:
    for communicator in pair(nccl):
        communicator.check()
        communicator.close()
        communicator.close()
    assert nccl.names().count("ncclCommFinalize") == nccl.names().count("ncclCommDestroy") == 2
    assert "ncclCommAbort" not in nccl.names()


def test_a_rank_that_does_not_come(nccl: Any) -> None:
    start = time.monotonic()
    with pytest.raises(errors.TimeoutError, match=r"within 0.2 s; the communicator is aborted"):
        NcclCommunicator(nccl, nccl.unique_id(), 0, 2, 0.2)
    assert time.monotonic() - start < patient(10)
    await_abort(nccl)


def test_nccl_refuses(nccl: Any) -> None:
    nccl.results["ncclCommInitRankConfig"] = 5
    with pytest.raises(LaunchError, match=r"cannot meet: planted error 5(.|\n)*KVHVD_GPU_PATH=staged"):
        NcclCommunicator(nccl, nccl.unique_id(), 0, 1, 1.0)


def test_calls_that_fail_say_which(nccl: Any) -> None:
    (one, _) = pair(nccl)
    nccl.results["ncclAllReduce"] = 4
    with pytest.raises(TransportError, match="ncclAllReduce failed: planted error 4"):
        one.allreduce(0, 0, 1, "float32", "sum", 0)
    nccl.state = 6
    with pytest.raises(TransportError, match="operations of the GPUs failed: planted error 6"):
        one.check()


def test_stall_reports_leave_its_thread_out(nccl: Any) -> None:
    before = set(threading.enumerate())
    one, other = pair(nccl)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert [name for name in names if "nccl" in name and not name.startswith(OWN_THREADS)] == []
    assert any("nccl" in name for name in names)
    for each in (one, other):
        each.abort()


def test_an_aborted_communicator_takes_no_calls(nccl: Any) -> None:
    one, other = pair(nccl)
    threads = [threading.Thread(target=one.abort) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(TransportError, match="was aborted"):
        one.check()
    with pytest.raises(TransportError, match="was aborted"):
        one.allreduce(0, 0, 1, "float32", "sum", 0)
    one.close()
    other.abort()
    other.close()
    assert nccl.names().count("ncclCommAbort") == 2


def test_an_abort_needs_no_new_thread(nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Python ends, from version 3.12 on, there are none."""
    (one, _) = pair(nccl)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    one.abort()
    one.close()
    assert nccl.names().count("ncclCommAbort") == 1


def test_a_group_ends_also_after_an_error(nccl: Any) -> None:
    (one, _) = pair(nccl)
    with pytest.raises(ValueError, match="mine"), one.group():
        raise ValueError("mine")
    assert nccl.names()[-2:] == ["ncclGroupStart", "ncclGroupEnd"]


def test_a_call_that_never_settles_is_aborted(nccl: Any) -> None:
    (one, _) = pair(nccl, 0.2)
    nccl.state = nccl_library.IN_PROGRESS
    with (
        pytest.raises(
            errors.TimeoutError, match=r"has not finished ncclCommFinalize within|has not finished ncclGroupEnd"
        ),
        one.group(),
    ):
        pass
    one.close()
    assert "ncclCommAbort" in nccl.names()


# -- Finding the library ----------------------------------------------------------------------------------------------


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(nccl_library, "_found", None)
    yield monkeypatch
    monkeypatch.undo()
    config_module.reload()


def test_a_chosen_library_that_is_none(search: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, why in ((str(tmp_path / "libnccl.so.2"), "No such file"), ("libc.so.6", "is too old, or not NCCL")):
        search.setenv("KVHVD_NCCL_LIBRARY", path)
        config_module.reload()
        with pytest.raises(ConfigError, match=rf"KVHVD_NCCL_LIBRARY=.*cannot be used: .*{why}"):
            nccl_library.library()


def test_nothing_found_says_what_to_install(search: pytest.MonkeyPatch) -> None:
    search.setattr(nccl_library, "_candidates", lambda: iter(["/nowhere/libnccl.so.2"]))
    with pytest.raises(LaunchError, match=r"not found(.|\n)*/nowhere(.|\n)*pip install nvidia-nccl-cu12"):
        nccl_library.library()


def test_another_library_is_not_taken_for_nccl() -> None:
    with pytest.raises(LaunchError, match="is too old, or not NCCL"):
        NcclLibrary("libc.so.6")


def test_wheels_for_a_newer_cuda_than_the_drivers_are_left_alone(search: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def in_wheel(name: str) -> Iterator[str]:
        asked.append(name)
        return iter(())

    search.setattr(nccl_library, "_in_wheel", in_wheel)
    search.setattr(nccl_library, "driver_version", lambda: 12040)
    assert list(nccl_library._candidates())[-1] == "libnccl.so.2"
    assert asked == ["nvidia-nccl-cu12", "nvidia-nccl-cu11"]


# -- The real one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> NcclLibrary:
    try:
        return nccl_library.library()
    except (LaunchError, ConfigError) as error:
        pytest.skip(f"NCCL is not installed: {str(error).splitlines()[0]}")


def test_the_library_knows_its_version(real: NcclLibrary) -> None:
    assert real.version >= nccl_library.OLDEST
    assert real.version_text.count(".") == 2


def test_ids_are_unique(real: NcclLibrary) -> None:
    first, second = real.unique_id(), real.unique_id()
    assert first != second
    assert len(bytes.fromhex(first)) == 128


@pytest.mark.skipif(runtime.driver_version() is not None, reason="there is a driver")
def test_without_a_driver_ranks_cannot_meet_and_nothing_hangs(real: NcclLibrary) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"NCCL [\d.]+: the ranks cannot meet(.|\n)*driver"):
        NcclCommunicator(real, real.unique_id(), 0, 1, 10.0)
    assert time.monotonic() - start < patient(10)
