"""Compiling our kernels, keeping them on disk, and loading them."""

from __future__ import annotations

import contextlib
import ctypes
import locale
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_hvd import config
from kvstore_hvd.errors import KVHvdError, LaunchError
from kvstore_hvd.gpu import cache, kernels, module, shapes
from kvstore_hvd.gpu.runtime import nvrtc_library
from kvstore_hvd.gpu.streams import Stream
from support import fake_kernels
from support.fake_cuda import FakeCuda, NVRTCError, fake_cuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as machine:
        yield machine


def load(cuda: FakeCuda, dtype: str = "float32") -> module.Kernels:
    loaded = module.Kernels((9, 0), 4)
    loaded.limits(kernels.copy_kernel(), dtype)
    return loaded


# -- On disk ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"content"

    for _ in range(3):
        with cache.stored("key", make, str(tmp_path)) as path:
            assert path.read_bytes() == b"content"
    assert len(made) == 1
    assert cache.key_of("a", 1) != cache.key_of("a", 2)


@pytest.mark.parametrize("damage", [b"", b"conten", b"other content"])
def test_what_is_damaged_is_made_again(tmp_path: Path, damage: bytes) -> None:
    with cache.stored("key", lambda: b"content", str(tmp_path)) as path:
        path.write_bytes(damage)
    with cache.stored("key", lambda: b"content", str(tmp_path)) as path:
        assert path.read_bytes() == b"content"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with cache.stored("key", lambda: b"content", str(tmp_path / "file" / "below")) as path:
        assert path.read_bytes() == b"content"
    assert not path.exists()


def test_many_at_once_see_whole_files_only(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    wrong: list[bytes] = []

    def use() -> None:
        for _ in range(5):
            with cache.stored("key", lambda: content, str(tmp_path)) as path:
                found = path.read_bytes()
                if found != content:
                    wrong.append(found)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(list(tmp_path.iterdir())) == 1


# -- Loading ----------------------------------------------------------------------------------------------------------


def test_one_type_is_compiled_for_the_device_and_once(cuda: FakeCuda) -> None:
    load(cuda)
    assert cuda.compiled == [("--gpu-architecture=sm_90", *kernels.options("float32"))]
    load(cuda)
    assert len(cuda.compiled) == 1, "kept on disk"
    load(cuda, "int8")
    assert len(cuda.compiled) == 2
    assert len(list(Path(config.cache_folder()).iterdir())) == 2


def test_a_device_that_is_too_new_for_the_compiler_gets_ptx(cuda: FakeCuda) -> None:
    assert module.compile_kernels("float32", 130).startswith(b"ptx --gpu-architecture=compute_90")
    cuda.architectures = ()
    with pytest.raises(LaunchError, match=r"compute capability 13.0(.|\n)*newer CUDA"):
        module.compile_kernels("float32", 130)


def test_what_the_compiler_says_is_passed_on(cuda: FakeCuda) -> None:
    cuda.failures["nvrtc"] = NVRTCError(6)
    with pytest.raises(LaunchError, match=r"cannot compile our kernels(.|\n)*error: planted"):
        load(cuda)


@pytest.mark.parametrize("fails", [False, True])
def test_the_locale_stays(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """NVRTC of CUDA 11 gives the thread that calls it another one."""
    nvrtc = nvrtc_library()
    compile_program = nvrtc.compileProgram
    libc = ctypes.CDLL(None)
    libc.newlocale.restype = libc.uselocale.restype = ctypes.c_void_p
    libc.newlocale.argtypes, libc.uselocale.argtypes = (
        [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p],
        [ctypes.c_void_p],
    )
    mask = 1 << locale.LC_CTYPE
    others = {name: libc.newlocale(mask, name.encode(), None) for name in ("C", "C.UTF-8")}

    def with_another_locale(*arguments: object) -> None:
        libc.uselocale(others["C"])
        compile_program(*arguments)

    monkeypatch.setattr(nvrtc, "compileProgram", with_another_locale)
    if fails:
        cuda.failures["nvrtc"] = NVRTCError(6)
    before = libc.uselocale(others["C.UTF-8"])
    try:
        with pytest.raises(LaunchError) if fails else contextlib.nullcontext():
            load(cuda)
        assert locale.nl_langinfo(locale.CODESET) == "UTF-8"
    finally:
        libc.uselocale(before)


def test_structures_of_another_size_are_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_kernels, "sizes", lambda: [1] * 10)
    with pytest.raises(KVHvdError, match="structures of"):
        load(cuda)


def test_launches_have_our_shape(cuda: FakeCuda) -> None:
    loaded, stream = load(cuda), Stream()
    arguments = np.zeros(1, kernels.COPY)
    loaded.launch(kernels.copy_kernel(), "float32", 3, (arguments,), stream, waits=True)
    stream.synchronize()
    assert cuda.calls[-2] == ("launch", "kvhvd_copy", (3, 1, 1), True)
    assert loaded.limits(kernels.copy_kernel(), "float32") == shapes.Limits(4, 2, 1)
    stream.close()


# -- The real compiler, where CuPy is installed -----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [70, 90])
def test_nvrtc_compiles_them_without_a_gpu(architecture: int) -> None:
    try:
        nvrtc_library()
    except LaunchError as error:  # CuPy 13 starts no compiler without a driver
        pytest.skip(str(error).splitlines()[0])
    code = module.compile_kernels("int32", architecture)
    assert code.startswith(b"\x7fELF")
    for name in kernels.kernel_names("int32"):
        assert name.encode() in code
