"""What is said when CuPy, the driver or the GPU are missing or do not fit; streams, memory and devices."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvstore_hvd.errors import LaunchError, TransportError
from kvstore_hvd.gpu import runtime, shapes
from kvstore_hvd.gpu.devices import Device, active, choose_path, reaches, shared
from kvstore_hvd.gpu.memory import DeviceMemory, PeerMemory, PinnedMemory
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.gpu.tables import Tables
from support.fake_cuda import CUDARuntimeError, FakeCuda, FakeDevice, fake_cuda
from support.patience import patient

DRIVER = runtime.driver_version()
MODULES = sorted((Path(runtime.__file__).parent).glob("*.py"))


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as machine:
        yield machine


# -- CuPy ---------------------------------------------------------------------------------------------------------


def test_nothing_of_it_is_imported_before_a_gpu_is_used() -> None:
    names = ", ".join(f"kvstore_hvd.gpu.{path.stem}" for path in MODULES if path.stem != "__init__")
    code = f"import sys, kvstore_hvd.comm.device.executors, {names}; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine whose driver and CuPy the test chooses."""

    def have(driver: int | None, module: Any = None) -> None:
        monkeypatch.setattr(runtime, "_cupy", None)
        monkeypatch.setattr(runtime, "driver_version", lambda: driver)
        monkeypatch.setitem(sys.modules, "cupy", module)

    yield have


def stand_in(version: str = "14.2.0", devices: int = 1, error: str = "", **more: Any) -> Any:
    module: Any = ModuleType("cupy")
    module.__version__ = version

    def count() -> int:
        if error:
            raise CUDARuntimeError(error)
        return devices

    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=count, runtimeGetVersion=lambda: 13000, is_hip=False, **more)
    )
    return module


def test_no_driver(machine: Any) -> None:
    machine(None)
    with pytest.raises(LaunchError, match=r"no driver(.|\n)*Fix: install NVIDIA's driver"):
        runtime.cupy()


@pytest.mark.parametrize(("driver", "extra"), [(11080, "cu11"), (12040, "cu12"), (13000, "cu13"), (14020, "cu13")])
def test_no_cupy_names_the_extra_for_this_driver(machine: Any, driver: int, extra: str) -> None:
    machine(driver)
    with pytest.raises(LaunchError, match=rf"need CuPy(.|\n)*kvstore-hvd\[gpu-{extra}\]"):
        runtime.cupy()


def test_cupy_for_a_newer_cuda_than_the_drivers(machine: Any) -> None:
    machine(12040, stand_in(error="cudaErrorInsufficientDriver: CUDA driver version is insufficient"))
    with pytest.raises(LaunchError, match=r"built for a newer CUDA than 12.4(.|\n)*gpu-cu12"):
        runtime.cupy()


def test_no_device(machine: Any) -> None:
    machine(13000, stand_in(devices=0))
    with pytest.raises(LaunchError, match=r"sees no GPU(.|\n)*CUDA_VISIBLE_DEVICES"):
        runtime.cupy()


def test_cuda_that_does_not_start(machine: Any) -> None:
    machine(13000, stand_in(error="cudaErrorSystemNotReady"))
    with pytest.raises(LaunchError, match="cannot be started: cudaErrorSystemNotReady"):
        runtime.cupy()


def test_a_version_that_was_not_tried_is_mentioned(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(13000, stand_in(version="99.0.0"))
    assert runtime.cupy().__version__ == "99.0.0"
    assert "asks for 13 or 14" in caplog.text


def test_errors_of_cuda_become_ours_and_others_stay(cuda: FakeCuda) -> None:
    with (
        pytest.raises(TransportError, match=r"CUDA failed to do this: cudaErrorLaunchFailure"),
        runtime.checked("do this"),
    ):
        raise CUDARuntimeError("cudaErrorLaunchFailure")
    with pytest.raises(RuntimeError, match=r"^mine$"), runtime.checked("do this"):
        raise RuntimeError("mine")
    cuda.failures["malloc"] = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(TransportError, match=r"allocate 4 MiB on the GPU(.|\n)*KVHVD_GPU_STAGING_MIB"):
        DeviceMemory(3 << 20)


# -- Memory and streams -----------------------------------------------------------------------------------------------


def test_memory_is_whole_granules_and_zero(cuda: FakeCuda) -> None:
    memory = DeviceMemory(5)
    assert ("malloc", 2 << 20) in cuda.calls
    assert memory.nbytes == 2 << 20
    peer = PeerMemory(memory.export())
    assert peer.address == memory.address
    peer.close()
    assert "ipcOpenMemHandle" not in cuda.names()
    memory.close()
    memory.close()
    assert not cuda.memory


def test_memory_of_another_process_is_mapped_and_unmapped(cuda: FakeCuda) -> None:
    memory = DeviceMemory(1)
    told = json.loads(memory.export()) | {"process": "another", "address": 0}
    peer = PeerMemory(json.dumps(told))
    assert peer.address == memory.address
    peer.close()
    assert cuda.names()[-2:] == ["ipcOpenMemHandle", "ipcCloseMemHandle"]
    memory.close()


def test_where_memory_cannot_be_shared_one_process_works(cuda: FakeCuda) -> None:
    cuda.failures["ipcGetMemHandle"] = CUDARuntimeError("cudaErrorNotSupported: operation not supported")
    memory = DeviceMemory(1)
    told = json.loads(memory.export())
    assert PeerMemory(json.dumps(told)).address == memory.address
    with pytest.raises(TransportError, match=r"failed to share memory of the GPU(.|\n)*NotSupported"):
        PeerMemory(json.dumps(told | {"process": "another"}))
    memory.close()


def test_a_table_is_overwritten_only_when_it_has_been_read(cuda: FakeCuda) -> None:
    stream, goes_on = Stream(), threading.Event()
    cuda.stream_at(stream.address).push(lambda: goes_on.wait(patient(30)))
    awaited: list[Event] = []

    def wait(event: Event) -> None:
        if not event.done():
            awaited.append(event)
            goes_on.set()
        while not event.done():
            time.sleep(0.001)

    made = Tables(wait)
    table, _ = shapes.segments([0x1000], [0], [1])
    while not awaited:
        assert len(cuda.names()) < 10_000, "nobody waits for the device"
        made.put(stream, [table])
        made.fence(stream)
    stream.synchronize()
    made.close()


def test_a_stream_with_cupy_13(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(runtime.cupy().cuda.runtime)
    monkeypatch.delattr(kind, "streamCreateWithPriority")
    monkeypatch.setattr(kind, "streamCreateWithFlags", lambda self, flags: 5000 + flags, raising=False)
    if DRIVER is None:
        assert Stream().address == 5001


def test_pinned_memory_is_a_view(cuda: FakeCuda) -> None:
    memory = PinnedMemory(64)
    memory.view("float32")[:] = 3
    assert memory.view()[3] == 0x40
    memory.close()
    assert not cuda.memory


def test_a_stream_is_urgent_and_polled(cuda: FakeCuda) -> None:
    stream, source, target = Stream(), PinnedMemory(8), PinnedMemory(8)
    assert ("streamCreateWithPriority", 1, -100) in cuda.calls
    event = Event()
    assert event.done()
    source.view()[:] = 5
    stream.copy(target.address, source.address, 8)
    stream.copy(target.address, target.address, 8)  # nothing
    event.record(stream)
    stream.synchronize()
    assert event.done()
    assert target.view().tolist() == [5] * 8
    assert cuda.names().count("memcpyAsync") == 1
    for each in (event, stream, source, target):
        each.close()


# -- Devices ----------------------------------------------------------------------------------------------------------


def test_a_device_tells_the_others_about_itself(cuda: FakeCuda) -> None:
    device = Device.of(3, "here", 22304)
    assert (device.uuid, device.name, device.capability, device.nccl) == ("03" * 16, "Fake GPU", (9, 0), 22304)
    assert Device.from_text(device.to_text()) == device


def test_devices_that_are_too_old_or_not_there(cuda: FakeCuda) -> None:
    cuda.devices[1] = FakeDevice(b"x" * 16, "Old GPU", (6, 1))
    with pytest.raises(LaunchError, match=r"Old GPU \(compute capability 6.1\) is too old"):
        Device.of(1, "here")
    with pytest.raises(LaunchError, match="sees 8 GPUs, but an array is on GPU 8"):
        Device.of(8, "here")


def test_the_device_is_put_back(cuda: FakeCuda) -> None:
    cuda.set_device(2)
    with active(5):
        assert cuda.current == 5
    assert cuda.current == 2


def devices(*uuids: str, nccl: int = 22304, host: str = "here") -> list[Device]:
    return [Device(uuid, "H", host, (9, 0), 132, nccl) for uuid in uuids]


def test_who_reaches_whom(cuda: FakeCuda) -> None:
    cuda.peers = lambda own, other: other < 4
    all_of_them = [Device.of(n, "here") for n in range(5)]
    assert reaches(0, all_of_them[:4])
    assert not reaches(0, all_of_them)
    assert reaches(4, [all_of_them[4]] * 2)
    assert not reaches(0, devices("ff")), "not visible to this process"


@pytest.mark.parametrize(
    ("world", "reach", "wish", "path"),
    [
        (devices("a", "b"), True, "auto", "nccl"),
        (devices("a", "b"), False, "auto", "nccl"),
        (devices("a", "b", nccl=0), True, "auto", "kernels"),
        (devices("a", "b", nccl=21700), False, "auto", "staged"),
        (devices("a", "a"), True, "auto", "kernels"),
        (devices("a", "b", "a"), False, "auto", "staged"),
        (devices("a") + devices("b", host="there"), False, "auto", "nccl"),
        (devices("a", nccl=0) + devices("b", host="there"), True, "auto", "staged"),
        (devices("a", "b"), True, "kernels", "kernels"),
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
    _, reason = choose_path(devices("a", nccl=22304) + devices("b", nccl=0), False, "auto", 21800)
    assert reason == "rank 1 has no NCCL 2.18 or newer; not all GPUs reach each other's memory"
