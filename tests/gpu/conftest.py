"""Tests that need a GPU: ``pytest -m gpu tests/gpu``.

With KVHVD_TEST_FAKE_GPU=1 they run on the stand-in, to test the tests, with the real kernels, compiled for the CPU.

Ranks are threads of this process, with one GPU for all of them: kernels of one rank wait for those of another, so all
code is loaded at the start, and every stream has a queue of its own.
"""

import os

import pytest

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.gpu import runtime
from kvstore_hvd.gpu.runtime import Device, activate
from support.fake_cuda import fake_cuda
from support.gpu_memory import Arena, DeviceArray
from support.host_kernels import compiled, host_kernels, loaded

IS_FAKE = bool(os.environ.get("KVHVD_TEST_FAKE_GPU"))


def pytest_collection_modifyitems(items):
    """Mark all that is here."""
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """The machine's GPU; skips where there is none."""
    if IS_FAKE:
        with host_kernels(loaded(compiled(tmp_path_factory.mktemp("kernels")))), fake_cuda():
            yield
        return
    try:
        runtime.cupy()
    except LaunchError as error:
        pytest.skip(str(error).splitlines()[0])
    yield


@pytest.fixture(scope="session")
def device(machine):
    """The first GPU, which is the current one."""
    activate(0)
    return Device.of(0, "here")


@pytest.fixture(scope="session")
def _arena(device):
    arena = Arena((64 if IS_FAKE else 1024) << 20)
    yield arena
    arena.close()


@pytest.fixture
def arena(_arena):
    """Memory for the arrays of a test."""
    activate(0)
    _arena.reset()
    return _arena


@pytest.fixture
def new(arena):
    """Make arrays: from bytes, and how many bytes after an aligned address they begin."""
    return lambda raw, shift=0: DeviceArray(arena, raw, shift)
