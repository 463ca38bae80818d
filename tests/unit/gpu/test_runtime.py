"""What is said when CuPy, the driver or the GPU are missing or do not fit; and the way of a world."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.gpu import runtime
from kvstore_hvd.gpu.devices import Device, choose_path, shared
from support.fake_cuda import CUDARuntimeError, FakeDevice, fake_cuda

MODULES = sorted((Path(runtime.__file__).parent).glob("*.py"))


def test_nothing_of_it_is_imported_before_a_gpu_is_used() -> None:
    names = ", ".join(f"kvstore_hvd.gpu.{path.stem}" for path in MODULES if path.stem != "__init__")
    code = f"import sys, kvstore_hvd.comm.device.executors, {names}; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


def stand_in(error: str = "", devices: int = 1) -> Any:
    module: Any = ModuleType("cupy")
    module.__version__ = "14.2.0"

    def count() -> int:
        if error:
            raise CUDARuntimeError(error)
        return devices

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
        (13000, stand_in(devices=0), r"sees no GPU(.|\n)*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, driver: int | None, module: Any, text: str) -> None:
    monkeypatch.setattr(runtime, "_cupy", None)
    monkeypatch.setattr(runtime, "driver_version", lambda: driver)
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(LaunchError, match=text):
        runtime.cupy()


def test_devices_that_are_too_old_or_not_there() -> None:
    with fake_cuda() as cuda:
        cuda.devices[1] = FakeDevice(b"x" * 16, "Old GPU", (6, 1))
        with pytest.raises(LaunchError, match=r"Old GPU \(compute capability 6.1\) is too old"):
            Device.of(1, "here")
        with pytest.raises(LaunchError, match="sees 8 GPUs, but an array is on GPU 8"):
            Device.of(8, "here")


def devices(*uuids: str, nccl: int = 22304, host: str = "here") -> list[Device]:
    return [Device(uuid, "H", host, (9, 0), 132, nccl) for uuid in uuids]


@pytest.mark.parametrize(
    ("world", "reach", "wish", "path"),
    [
        (devices("a", "b"), True, "auto", "nccl"),
        (devices("a", "b", nccl=0), True, "auto", "kernels"),
        (devices("a", "b", nccl=21700), False, "auto", "staged"),
        (devices("a", "b", "a"), False, "auto", "staged"),
        (devices("a") + devices("b", host="there"), False, "auto", "nccl"),
        (devices("a", nccl=0) + devices("b", host="there"), True, "auto", "staged"),
        (devices("a", "b"), True, "staged", "staged"),
    ],
)
def test_the_path_of_a_world(world: list[Device], reach: bool, wish: str, path: str) -> None:
    assert choose_path(world, reach, wish, 21800)[0] == path


def test_what_stands_against_a_path_is_said() -> None:
    world = devices("a", "b", "a")
    assert shared(world) == {"a": [0, 2]}
    with pytest.raises(LaunchError, match=r"KVHVD_GPU_PATH=nccl is not possible: ranks 0, 2 share one GPU"):
        choose_path(world, True, "nccl", 21800)
    with pytest.raises(LaunchError, match="KVHVD_GPU_PATH=kernels is not possible: not all GPUs reach"):
        choose_path(world, False, "kernels", 21800)
