"""The GPU kernels compile by NVRTC without a GPU, keep denormals, and need no memory for registers."""

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest

from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.launcher import same_locale


def libraries():
    """The NVRTC libraries of the installed ``nvidia-cuda-nvrtc`` wheels, oldest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*"))


LIBRARIES = libraries()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LIBRARIES, reason="no NVRTC is installed; pip install kvstore-hvd[test-gpu]"),
    pytest.mark.timeout(600),
]


def compiled(library, newest, dtype):
    """PTX, and what the compiler says; for the oldest architecture from sm_70 on that it knows, or the newest."""
    nvrtc, program, count = ctypes.CDLL(str(library)), ctypes.c_void_p(), ctypes.c_int()

    def call(name, *arguments):
        assert getattr(nvrtc, f"nvrtc{name}")(*arguments) == 0, name

    def text(what):
        size = ctypes.c_size_t()
        call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"Get{what}", program, buffer)
        return buffer.value.decode()

    call("GetNumSupportedArchs", ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    call("GetSupportedArchs", numbers)
    number = max(numbers) if newest else min(number for number in numbers if number >= 70)
    # CuPy appends -ftz=true to the options of every module.
    options = (f"--gpu-architecture=sm_{number}", *kernels.options(dtype), "-ftz=true", "--ptxas-options=-v")
    call("CreateProgram", ctypes.byref(program), kernels.source().encode(), b"kernels.cu", 0, None, None)
    try:
        with same_locale():
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = text("ProgramLog")
        assert not failed, log
        return text("PTX"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize(("newest", "dtype"), [(False, "float32"), (True, None)], ids=["oldest", "newest"])
def test_kernels_compile(library, newest, dtype):
    if dtype is None and library != LIBRARIES[-1]:
        dtype = "float32"  # all of them take minutes
    ptx, log = compiled(library, newest, dtype)
    functions = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill", log)
    assert {name for name, _, _ in functions} == set(kernels.kernel_names(dtype))
    assert not [each for each in functions if each[1] != "0"], "registers are kept in memory"
    instructions = set(re.findall(r"^\s+(?:@!?%\w+ )?([a-z]\w*(?:\.\w+(?:::\w+)?)+)", ptx, re.MULTILINE))
    assert "add.rn.f32" in instructions
    assert not {name for name in instructions if ".ftz" in name}, "denormals are flushed"
    assert not {name for name in instructions if name.startswith(("fma.", "mad.rn"))}, "operations are fused"
    # Peers write the memory while the kernel runs.
    assert not {name for name in instructions if name.startswith("ld.global.nc")}, "loads are taken for constant"
