"""The binding of NCCL, as far as it goes without a GPU: on the real library where it is installed."""

from __future__ import annotations

import ctypes

import pytest

from kvstore_hvd import config as config_module
from kvstore_hvd.errors import ConfigError, LaunchError
from kvstore_hvd.gpu import nccl_library, runtime
from kvstore_hvd.gpu.nccl import NcclCommunicator
from kvstore_hvd.gpu.nccl_library import Config, UniqueId


def test_layouts_are_those_of_nccl_h() -> None:
    assert ctypes.sizeof(UniqueId) == 128
    # size_t; magic, version, blocking, cgaClusterSize, minCTAs, maxCTAs; char*; splitShare, and its padding
    assert ctypes.sizeof(Config) == 8 + 6 * 4 + 8 + 4 + 4
    assert (Config.blocking.offset, Config.net_name.offset, Config.split_share.offset) == (16, 32, 40)


def test_a_library_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_found", None)
    try:
        for path, why in (("/nowhere/libnccl.so.2", "No such file"), ("libc.so.6", "is too old, or not NCCL")):
            monkeypatch.setenv("KVHVD_NCCL_LIBRARY", path)
            config_module.reload()
            with pytest.raises(ConfigError, match=rf"KVHVD_NCCL_LIBRARY=.*cannot be used: .*{why}"):
                nccl_library.library()
    finally:
        monkeypatch.undo()
        config_module.reload()


def test_without_a_driver_ranks_cannot_meet_and_nothing_hangs() -> None:
    try:
        real = nccl_library.library()
    except (LaunchError, ConfigError) as error:
        pytest.skip(f"NCCL is not installed: {str(error).splitlines()[0]}")
    assert real.unique_id() != real.unique_id()
    if runtime.driver_version() is None:
        with pytest.raises(LaunchError, match=r"NCCL [\d.]+: the ranks cannot meet(.|\n)*driver"):
            NcclCommunicator(real, real.unique_id(), 0, 1, 10.0)
