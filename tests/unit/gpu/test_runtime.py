"""What is said when CuPy, the driver, the GPU or NCCL are missing or do not fit; and the way of a world."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from kvstore_hvd.errors import ConfigError, LaunchError, TransportError
from kvstore_hvd.gpu import kernels, launcher, nccl, runtime
from kvstore_hvd.gpu.nccl import Config, NcclCommunicator, UniqueId
from kvstore_hvd.gpu.runtime import Device, shared
from kvstore_hvd.world.gpus import choose_path
from support.fake_cuda import CUDARuntimeError, fake_cuda
from support.fake_nccl import FakeNccl
from support.patience import until


def stand_in(error=""):
    """A CuPy that sees no GPU, or fails."""
    module = ModuleType("cupy")
    module.__version__ = "14.2.0"
    count = Mock(side_effect=CUDARuntimeError(error)) if error else lambda: 0
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=count, runtimeGetVersion=lambda: 13000, is_hip=False)
    )
    return module


@pytest.mark.parametrize(
    ("driver", "module", "text"),
    [
        (None, None, r"no driver(.|\n)*Fix: install NVIDIA's driver"),
        (12040, None, r"need CuPy(.|\n)*kvstore-hvd\[gpu-cu12\]"),
        (12040, stand_in("cudaErrorInsufficientDriver"), r"built for a newer CUDA than 12.4(.|\n)*gpu-cu12"),
        (13000, stand_in(), r"sees no GPU(.|\n)*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, driver, module, text):
    runtime.cupy.cache_clear()
    monkeypatch.setattr(runtime, "driver_version", lambda: driver)
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(LaunchError, match=text):
        runtime.cupy()


def test_a_device_that_is_not_there():
    with fake_cuda(), pytest.raises(LaunchError, match="sees 8 GPUs, but an array is on GPU 8"):
        Device.of(8, "here")


def devices(*uuids, nccl=22304, host="here"):
    return [Device(uuid, "H", host, (9, 0), 132, nccl) for uuid in uuids]


@pytest.mark.parametrize(
    ("world", "reach", "wish", "path"),
    [
        (devices("a", "b"), True, "auto", "nccl"),
        (devices("a") + devices("b", nccl=0), True, "auto", "kernels"),
        (devices("a", "b", "a"), False, "auto", "staged"),
        (devices("a", "b", nccl=0), False, "auto", "staged"),
        (devices("a", "b"), True, "staged", "staged"),
    ],
)
def test_the_path_of_a_world(world, reach, wish, path):
    assert choose_path(world, reach, wish)[0] == path


def test_what_stands_against_a_path_is_said():
    world = devices("a", "b", "a")
    assert shared(world) == {"a": [0, 2]}
    with pytest.raises(LaunchError, match=r"KVHVD_GPU_PATH=nccl is not possible: ranks 0, 2 share one GPU"):
        choose_path(world, True, "nccl")
    with pytest.raises(LaunchError, match="KVHVD_GPU_PATH=kernels is not possible: not all GPUs reach"):
        choose_path(world, False, "kernels")


def test_sizes_and_launches_fit_the_device():
    # tests/native/cuda/test_gpu_kernels.cpp has the same numbers, as the C++ compiler sees them.
    assert kernels.STRUCTURES == {"Segment": 32, "World": 416, "Launch": 80, "Copy": 40, "Control": 27136}
    limits = kernels.Limits(132, 2, sharers=8)
    assert limits.blocks(1000) == 33
    assert limits.blocks(1000, meet=False) == 264
    assert limits.blocks(0) == kernels.Limits(1, 1, sharers=4).blocks(9) == 1
    assert kernels.ring_channels(1 << 30, 2048, limits) == 33
    assert kernels.ring_channels(1 << 30, 2048, kernels.Limits(132, 2)) == kernels.MAX_CHANNELS
    assert kernels.ring_channels(100, 2048, limits) == 1


@pytest.mark.parametrize("damage", [None, b"", b"conten", b"other content"])
def test_what_is_kept_is_made_again_only_where_it_is_damaged(tmp_path, damage):
    make = Mock(return_value=b"content")
    with launcher.cached("key", make, str(tmp_path)) as path:
        if damage is not None:
            path.write_bytes(damage)
    with launcher.cached("key", make, str(tmp_path)) as path:
        assert path.read_bytes() == b"content"
    assert make.call_count == (1 if damage is None else 2)
    assert len(list(tmp_path.iterdir())) == 1
    with launcher.cached("key", make, str(path / "below")) as other:  # a folder that cannot be written
        assert other.read_bytes() == b"content"
    assert not other.exists()


def test_a_library_that_is_no_nccl_is_refused(setting):
    assert ctypes.sizeof(UniqueId) == 128  # as nccl.h has them
    assert ctypes.sizeof(Config) == 8 + 6 * 4 + 8 + 4 + 4
    assert (Config.blocking.offset, Config.net_name.offset, Config.split_share.offset) == (16, 32, 40)
    nccl.library.cache_clear()
    for path, why in (("/nowhere/libnccl.so.2", "No such file"), ("libc.so.6", "is too old, or not NCCL")):
        setting(KVHVD_NCCL_LIBRARY=path)
        with pytest.raises(ConfigError, match=rf"KVHVD_NCCL_LIBRARY=.*cannot be used: .*{why}"):
            nccl.library()


@pytest.mark.parametrize(
    ("results", "error", "text"),
    [
        ({"ncclCommInitRankConfig": 3}, LaunchError, r"2.23.4: the ranks cannot meet: result 3.(.|\n)*PATH=staged"),
        ({"ncclAllGather": 3}, TransportError, "NCCL 2.23.4: ncclAllGather failed: result 3"),
        ({"ncclCommGetAsyncError": 7}, TimeoutError, "not finished the ranks' meeting within 0 s"),
    ],
)
def test_what_nccl_says_is_told_and_ends_the_communicator(results, error, text):
    with fake_cuda() as cuda:
        library = FakeNccl(cuda, 1)
        library.results, place = results, np.zeros(8).ctypes.data
        with pytest.raises(error, match=text):
            NcclCommunicator(library, "ab" * 128, 0, 1, 0, 0.0).all_gather(place, place, 8)
        until(lambda: error is TransportError or not library.live)
