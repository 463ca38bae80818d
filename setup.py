"""Builds the native extension; everything that is only data stands in setup.cfg and pyproject.toml.

``KVHVD_BUILD_JOBS`` limits the number of compilers that run at once (default: one per core).
"""

from __future__ import annotations

import csv
import os
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from io import StringIO
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

SOURCES = sorted(str(path) for path in Path("native").rglob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("native").rglob("*.hpp"))
# -MMD: which headers a source includes, see _is_outdated.
# -ffp-contract=off: a fused multiply-add would round differently from kernel to kernel, and so from rank to rank.
FLAGS = ["-O3", "-MMD", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
# Instruction sets that only these files may use; the CPU is asked at run time. Elsewhere they compile to nothing.
X86_64_FLAGS = {
    "reduce_avx2.cpp": ["-mavx2", "-mf16c"],
    "reduce_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}
# Installed at the root of site-packages: a .pth file there is read by every start of the interpreter.
STARTUP_FILES = sorted(path for suffix in ("pth", "py") for path in Path("startup").glob(f"*.{suffix}"))


class BuildExt(build_ext):
    """Adds the flags of single sources, and compiles only what is older than its source or a header of it."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compile and link ``ext``."""
        if not SOURCES:
            raise RuntimeError("there is no native/**/*.cpp to build the extension from; is this a whole checkout?")
        compile_one = self.compiler._compile
        extra = X86_64_FLAGS if self.plat_name.endswith("x86_64") else {}

        def compile_with_extra(obj, src, suffix, cc_args, postargs, pp_opts):  # type: ignore[no-untyped-def]
            compile_one(obj, src, suffix, cc_args, [*postargs, *extra.get(Path(src).name, [])], pp_opts)

        self.compiler._compile = compile_with_extra
        try:
            with ParallelCompile("KVHVD_BUILD_JOBS", needs_recompile=_is_outdated):
                super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


class BuildPy(build_py):
    """Puts the start-up files beside the package."""

    def run(self) -> None:
        """Copy the package and the start-up files into the build folder."""
        super().run()
        if not self.editable_mode:
            self.mkpath(self.build_lib)
            for path in STARTUP_FILES:
                self.copy_file(str(path), str(Path(self.build_lib, path.name)))


class EditableWheel(editable_wheel):
    """Puts the start-up files into an editable installation too: they cannot be linked, so they are copied."""

    def run(self) -> None:
        """Build the wheel, then add the start-up files."""
        super().run()
        (wheel,) = Path(self.dist_dir).glob("*.whl")
        _add_to_wheel(wheel, STARTUP_FILES)


def _is_outdated(obj: str, src: str) -> bool:
    try:
        rule = Path(obj).with_suffix(".d").read_text()  # "obj: src header header ...", written by the compiler
        # Those of others have absolute paths, some in an environment that pip has made for one build.
        own = [path for path in rule.replace("\\\n", " ").partition(":")[2].split() if not os.path.isabs(path)]
        return any(os.path.getmtime(path) > os.path.getmtime(obj) for path in (*own, "setup.py"))
    except FileNotFoundError:  # never compiled, or a header is gone
        return True


def _add_to_wheel(wheel: Path, files: list[Path]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    record = next(info for info in members if info.filename.endswith(".dist-info/RECORD"))
    rows = list(csv.reader(StringIO(members.pop(record).decode())))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in members.items():
            archive.writestr(info, content)
        for path in files:
            content = path.read_bytes()
            digest = urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            rows.append([path.name, f"sha256={digest}", str(len(content))])
            archive.writestr(path.name, content)
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        archive.writestr(record, text.getvalue())


setup(
    ext_modules=[
        Pybind11Extension(
            "kvstore_hvd._native",
            sources=SOURCES,
            depends=HEADERS,
            include_dirs=["native"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            libraries=["dl"],
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "editable_wheel": EditableWheel},
)
