"""NVRTC through ctypes: compiles the GPU kernels without a GPU, a driver or CUDA's headers."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

from kvstore_hvd.gpu.module import same_locale


class CompileError(Exception):
    """The compiler's messages."""


def libraries() -> list[Path]:
    """Return the NVRTC libraries of the installed ``nvidia-cuda-nvrtc`` wheels, oldest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    return sorted(
        (path for path in found if re.fullmatch(r"libnvrtc\.so\.[\d.]+", path.name)), key=lambda path: path.name
    )


class Compiler:
    """One version of NVRTC.

    Parameters
    ----------
    library : Path
        Its ``libnvrtc.so``.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """Return the architectures from sm_70 on that it knows, as numbers."""
        n = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(n)))
        numbers = (ctypes.c_int * n.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        return sorted(number for number in numbers if number >= 70)

    def compile(self, source: str, architecture: str, options: tuple[str, ...]) -> tuple[str, str]:
        """Compile to PTX (``compute_90``), or by way of PTX to machine code (``sm_90``).

        Returns
        -------
        ptx : str
        log : str
            What the compiler says.

        Raises
        ------
        CompileError
            With its messages.
        """
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        )
        try:
            texts = [text.encode() for text in (f"--gpu-architecture={architecture}", *options)]
            with same_locale():
                failed = self._library.nvrtcCompileProgram(program, len(texts), (ctypes.c_char_p * len(texts))(*texts))
            log = self._text(program, "ProgramLog")
            if failed:
                raise CompileError(log)
            return self._text(program, "PTX"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.value.decode()

    def _check(self, result: int) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(self._library.nvrtcGetErrorString(result).decode())
